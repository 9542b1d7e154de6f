# One command per job; `make help` lists them. Everything runs in .venv, which is made and filled on first use.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --disable-pip-version-check --constraint constraints.txt
# torch without CUDA is a tenth of the size and all that the tests need: TORCH_INDEX may name an index that has it.
TORCH_INDEX ?=
# pip names each package it fetches, on one growing line; its errors go to stderr, its warnings nowhere.
NAMES := 2> >(grep -v '^WARNING' >&2) | awk '/^Collecting/ {printf " %s", $$2; fflush()} END {print ""}'
WORKERS ?= 2
SWEEP_MODELS := deepseek_moe,gpt_oss,qwen3
SWEEP_SEQS := 4k,8k,16k,32k
PAPER_CALIBRATIONS := h800,paper-profile
THREADS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1

# Variables that become Hydra overrides, each only where it is set.
override_of = $(if $(strip $($(1))),'$(2)=$($(1))')
OVERRIDES = $(call override_of,MODEL,model) $(call override_of,SEQ,seq) $(COMMON)
COMMON = $(WORKLOAD) $(call override_of,BACKEND,backend) $(call override_of,IMPL,impl) $(ARGS)
WORKLOAD = $(call override_of,CLUSTER,cluster) $(if $(strip $(SYSTEMS)),'systems=[$(SYSTEMS)]') \
	$(call override_of,TRANSPORT,transport) $(call override_of,CALIBRATION,calibration)
SIZED = $(call override_of,MODEL,model) $(call override_of,SEQ,seq) $(WORKLOAD) $(ARGS)

.PHONY: help bench bench-all crosscheck advise sweep sweep-paper sensitivity ablation plus-page example
.PHONY: collect calibrate curves train test test-slow lint microbench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  Variables: MODEL SEQ CLUSTER SYSTEMS TRANSPORT CALIBRATION BACKEND IMPL, and ARGS for any other override."
	@echo "  Example:   make bench MODEL=qwen3 SEQ=32k SYSTEMS=disagmoe,tutel ARGS=\"batch=1024\""

# Real processes need torch.
NEEDS = $(VENV)/$(if $(filter emulate measure,$(BACKEND)),.dev,.core)

bench: $(NEEDS) ## compare the systems: make bench MODEL=qwen3 SEQ=32k
	@$(PY) -m bench $(OVERRIDES)

bench-all: $(VENV)/.dev ## the systems simulated at full size, then a cut of their plans emulated by real processes
	@status=0; \
	$(PY) -m bench backend=simulate $(SIZED) || status=$$?; \
	$(PY) -m bench backend=emulate $(SIZED) || status=$$?; \
	exit $$status

crosscheck: $(VENV)/.dev ## emulated against simulated, the same cuts on 4 and 8 processes: errors and a parity plot
	@$(PY) -m bench.crosscheck $(SIZED)

advise: $(VENV)/.core ## does disaggregation pay: make advise MODEL=qwen3 SEQ=32k (SEQ=4k,32k ARGS=nic_gbit=100,400: a map)
	@$(PY) -m bench.advise $(OVERRIDES)

# One run per model and length, as many side by side as this machine has cores.
SWEEP = $(PY) -m bench -m 'model=$(or $(strip $(MODEL)),$(SWEEP_MODELS))' 'seq=$(or $(strip $(SEQ)),$(SWEEP_SEQS))' \
	artifacts=tables hydra/launcher=joblib
BOTH_CALIBRATIONS = $(if $(strip $(CALIBRATION)),,'calibration=$(PAPER_CALIBRATIONS)')

sweep: $(VENV)/.core ## three models at four sequence lengths (tables only), then the summary
	@status=0; \
	$(SWEEP) $(COMMON) || status=$$?; \
	$(PY) -m bench.collect || status=$$?; \
	exit $$status

sweep-paper: $(VENV)/.core ## the sweep under two calibrations and at 4x the batch, then results/paper.md: claim by claim
	@status=0; \
	$(SWEEP) $(COMMON) $(BOTH_CALIBRATIONS) || status=$$?; \
	$(SWEEP) batch=4x plans_from=default_batch $(COMMON) $(BOTH_CALIBRATIONS) || status=$$?; \
	$(PY) -m bench -m experiment=paper_claims $(COMMON) $(BOTH_CALIBRATIONS) || status=$$?; \
	$(PY) -m bench.collect || status=$$?; \
	$(PY) -m bench.paper_page || status=$$?; \
	exit $$status

sensitivity: $(VENV)/.core ## what DisagMoE's gain hangs on, and where it stops winning: a chart and tables
	@$(PY) -m bench experiment=sensitivity $(OVERRIDES)

ablation: $(VENV)/.core ## every switch of disagmoe_plus alone and all together, cells won, bounds: half an hour on two cores
	@$(PY) -m bench experiment=plus_ablation $(OVERRIDES)

plus-page: $(VENV)/.core ## the tables of docs/disagmoe-plus.md, from the newest study of make ablation
	@$(PY) -m bench.plus_page

example: $(VENV)/.core ## results/example/ and the README's headline table, from a sweep and a run (make sweep bench)
	@$(PY) -m bench.example

collect: $(VENV)/.core ## results/summary.{md,csv} and the by-sequence figures from all runs
	@$(PY) -m bench.collect

calibrate: $(VENV)/.dev ## measure this machine (CPU, GPUs, or torchrun's ranks): conf.local/calibration/local.yaml
	@$(PY) -m bench.calibrate $(call override_of,MODEL,model) $(ARGS)

curves: $(VENV)/.dev ## fifty steps of training by every system and by one process: one loss curve (results/systems/)
	@$(THREADS) $(PY) -m bench.system_curves $(ARGS)

train: $(VENV)/.dev ## train a model on this machine: make train ARGS="preset=text path=README.md"; ARGS=help lists all
	@$(PY) -m disagmoe.train $(call override_of,MODEL,model) $(call override_of,SEQ,seq) $(ARGS)

test: lint ## lint, types, import rules and the fast tests
	@$(THREADS) $(PY) -m pytest -m "not slow" -n $(WORKERS) $(PYTEST_ARGS)

test-slow: $(VENV)/.dev ## the tests that take long
	@$(THREADS) $(PY) -m pytest -m slow -n $(WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff, import rules, mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet . || { echo "some files are not formatted: run $(PY) -m ruff format ."; exit 1; }
	@$(VENV)/bin/lint-imports
	@$(PY) -m mypy

microbench: $(VENV)/.dev ## speed of simulator, plans, exchange and executor (pytest-benchmark)
	@$(THREADS) $(PY) -m pytest bench/micro --benchmark-only --benchmark-columns=min,median,stddev,rounds $(PYTEST_ARGS)

clean: ## remove caches and build files (neither results/ nor .venv)
	@rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks build dist *.egg-info
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The first Python of at least 3.11 on the path; PYTHON=... chooses another.
$(PY):
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
		python=; \
	done; \
	if [ -z "$$python" ]; then echo "no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "Making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(PY)
	@printf 'Installing the suite (about 150 MB to fetch, once):'
	@$(INSTALL) --editable '.[launchers]' $(NAMES)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.core
	@printf 'Installing torch (CPU) and the development tools (about 250 MB to fetch, once):'
	@$(if $(strip $(TORCH_INDEX)),$(INSTALL) --no-deps --index-url '$(TORCH_INDEX)' 'torch>=2.6' | $(NAMES))
	@$(INSTALL) --editable '.[launchers,dev]' $(NAMES)
	@touch $@
