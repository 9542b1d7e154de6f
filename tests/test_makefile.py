"""`make`: variables become overrides, failures fail, and nothing is installed twice."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


SWEPT = ("model=deepseek_moe,gpt_oss,qwen3", "seq=4k,8k,16k,32k", "artifacts=tables", "hydra/launcher=joblib")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout (in a path with a space) whose environment is there and whose python only notes how it is called."""
    root = tmp_path / "a checkout"
    (root / ".venv" / "bin").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    for name in ("python", "lint-imports"):
        program = root / ".venv" / "bin" / name
        program.write_text(
            f"#!{sys.executable}\n"
            "import os, sys\n"
            "with open('calls', 'a') as calls: calls.write(repr(sys.argv[1:]) + '\\n')\n"
            "sys.exit(int(os.environ.get('FAIL', '0')) if os.environ.get('FAIL_AT', '') in sys.argv else 0)\n"
        )
        program.chmod(0o755)
    return root


def make(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=root, env={**inherited, **environment}, capture_output=True, text=True, check=False
    )


def calls(root: Path) -> list[list[str]]:
    return [ast.literal_eval(line) for line in (root / "calls").read_text().splitlines()]


def bench_calls(root: Path) -> list[list[str]]:
    return [call[2:] for call in calls(root) if call[:2] == ["-m", "bench"]]


def test_variables_become_overrides_only_where_set(checkout: Path) -> None:
    assert make(checkout, "bench").returncode == 0
    assert make(checkout, "bench", "MODEL=qwen3", "SEQ=32k").returncode == 0
    everything = ["CLUSTER=h800_64", "SYSTEMS=disagmoe,tutel", "TRANSPORT=uniform", "CALIBRATION=paper-profile"]
    more = ["MODEL=my models/config.json", "BACKEND=simulate", "IMPL=equivalent", "ARGS=batch=64 tag='a b'"]
    assert make(checkout, "bench", *everything, *more).returncode == 0
    assert bench_calls(checkout) == [
        [],
        ["model=qwen3", "seq=32k"],
        [
            *("model=my models/config.json", "cluster=h800_64", "systems=[disagmoe,tutel]", "transport=uniform"),
            *("calibration=paper-profile", "backend=simulate", "impl=equivalent", "batch=64", "tag=a b"),
        ],
    ]


def test_bench_all_simulates_and_then_emulates_whatever_the_first_says(checkout: Path) -> None:
    sizes = ["MODEL=qwen3", "SEQ=32k", "SYSTEMS=disagmoe", "ARGS=batch=64"]
    assert make(checkout, "bench-all", *sizes).returncode == 0
    expected = ["model=qwen3", "seq=32k", "systems=[disagmoe]", "batch=64"]
    assert bench_calls(checkout) == [["backend=simulate", *expected], ["backend=emulate", *expected]]
    assert make(checkout, "bench-all", FAIL="3", FAIL_AT="backend=simulate").returncode != 0
    assert len(bench_calls(checkout)) == 4


def test_crosscheck_takes_the_settings_of_a_bench(checkout: Path) -> None:
    assert make(checkout, "crosscheck", "MODEL=qwen3", "SEQ=8k", "CLUSTER=h800_64", "ARGS=processes=4").returncode == 0
    wanted = ["-m", "bench.crosscheck", "model=qwen3", "seq=8k", "cluster=h800_64", "processes=4"]
    assert calls(checkout)[-1] == wanted
    assert make(checkout, "crosscheck", FAIL="1", FAIL_AT="bench.crosscheck").returncode != 0


def test_a_warm_make_installs_nothing_and_a_changed_constraint_does(checkout: Path) -> None:
    make(checkout, "bench")
    make(checkout, "bench")
    assert sum("pip" in call for call in calls(checkout)) == 1
    later = (checkout / ".venv" / ".core").stat().st_mtime + 10
    os.utime(checkout / "constraints.txt", (later, later))
    make(checkout, "bench")
    assert sum("pip" in call for call in calls(checkout)) == 2


def test_bench_installs_no_torch(checkout: Path) -> None:
    make(checkout, "bench")
    (install,) = [call for call in calls(checkout) if "pip" in call]
    assert install[-1] == ".[launchers]"
    assert install[install.index("--constraint") + 1] == "constraints.txt"


def test_train_passes_its_options_on_and_fails_where_training_does(checkout: Path) -> None:
    assert make(checkout, "train", "MODEL=tiny", "SEQ=1k", "ARGS=preset=text path='a b'").returncode == 0
    assert calls(checkout)[-1] == ["-m", "disagmoe.train", "model=tiny", "seq=1k", "preset=text", "path=a b"]
    assert make(checkout, "train", FAIL="2", FAIL_AT="disagmoe.train").returncode != 0


@pytest.mark.parametrize(
    "target",
    ["bench", "sweep", "sweep-paper", "sensitivity", "ablation", "plus-page", "collect", "test", "test-slow", "lint"],
)
def test_a_failing_command_fails_make(checkout: Path, target: str) -> None:
    at = {
        "collect": "bench.collect",
        "plus-page": "bench.plus_page",
        "test": "pytest",
        "test-slow": "pytest",
        "lint": "mypy",
    }.get(target, "bench")
    assert make(checkout, target).returncode == 0
    assert make(checkout, target, FAIL="3", FAIL_AT=at).returncode != 0


def test_a_failing_install_fails_make_and_is_tried_again(checkout: Path) -> None:
    assert make(checkout, "bench", FAIL="1", FAIL_AT="pip").returncode != 0
    assert bench_calls(checkout) == []
    assert make(checkout, "bench").returncode == 0


def test_sweep_runs_twelve_jobs_and_collects_even_where_some_failed(checkout: Path) -> None:
    assert make(checkout, "sweep", "CLUSTER=h800_64", FAIL="1", FAIL_AT="bench").returncode != 0
    assert bench_calls(checkout) == [
        ["-m", *SWEPT, "cluster=h800_64"],
    ]
    assert ["-m", "bench.collect"] in calls(checkout)


def test_the_paper_sweep_adds_a_calibration_the_large_batch_and_the_claims(checkout: Path) -> None:
    assert make(checkout, "sweep-paper").returncode == 0
    both = "calibration=h800,paper-profile"
    assert bench_calls(checkout) == [
        ["-m", *SWEPT, both],
        ["-m", *SWEPT, "batch=4x", "plans_from=default_batch", both],
        ["-m", "experiment=paper_claims", both],
    ]
    assert calls(checkout)[-2:] == [["-m", "bench.collect"], ["-m", "bench.paper_page"]]
    assert make(checkout, "sweep-paper", "CALIBRATION=h100").returncode == 0
    assert bench_calls(checkout)[-1] == ["-m", "experiment=paper_claims", "calibration=h100"]


def test_sensitivity_takes_the_same_variables(checkout: Path) -> None:
    assert make(checkout, "sensitivity", "MODEL=gpt_oss", "SEQ=16k").returncode == 0
    assert bench_calls(checkout) == [["experiment=sensitivity", "model=gpt_oss", "seq=16k"]]


def test_fast_and_slow_tests_are_told_apart(checkout: Path) -> None:
    make(checkout, "test")
    make(checkout, "test-slow")
    fast, slow = (call for call in calls(checkout) if "pytest" in call)
    assert "not slow" in fast
    assert "slow" in slow
