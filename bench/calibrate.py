"""`python -m bench.calibrate [name=local] [model=tiny] [processes=4]`: rates of the hardware at hand.

Decides the course of a calibration: kernels and links are timed one by one on all
ranks at once (`disagmoe/runtime/probe.py`), then a few whole steps are
(`calibration_steps.py`), and the rates that explain them are written to
conf.local/calibration/<name>.yaml, every number with its source. `CALIBRATION=<name>`
uses them; runs with BACKEND=measure do by themselves. What cannot be measured here
(NICs, where all ranks share one node) says so. Under torchrun or srun all of their
ranks take part.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import fmean

import numpy as np

from bench import at_hand
from bench.calibration_file import write
from bench.calibration_steps import (
    FITTED,
    MICRO_BATCHES,
    ROUNDS,
    Case,
    OpSample,
    case_of,
    nbytes,
    op_samples,
    prices,
    with_share,
)
from bench.machine import machine
from disagmoe.cost.calibration import Calibration, load_calibration
from disagmoe.cost.rate_fit import AttentionFit, LinkFit, MultiplyFit, fit_attention, fit_link, fit_multiply, search
from disagmoe.ops import Kind
from disagmoe.runtime.crew import Crew, Forked, Launched, device_kind, joined, under_launcher
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.errors import RankError
from disagmoe.runtime.measure import Trial, measure
from disagmoe.runtime.optimizer import Recipe
from disagmoe.runtime.probe import Sample, probe
from disagmoe.runtime.step import RunOptions
from disagmoe.specs import ClusterSpec, ModelSpec, cluster_from_mapping, load_model
from disagmoe.specs import fields as read
from disagmoe.specs.devices import Device, device
from disagmoe.system import NotApplicable
from disagmoe.timeline.timeline import Timeline

LENGTHS = {"cpu": (96, 256, 1024), "cuda": (1024, 2048, 8192)}
MODELS = {"cpu": ("tiny", None), "cuda": ("qwen3_30b", 2)}
"""Model and depth of the steps that are timed, where none is named."""
DTYPES = {"cpu": ("float32", "fp32"), "cuda": ("bfloat16", "bf16")}
WARM_UP, REPEATS = 2, 5
BF16_BYTES = 2
LOWEST, HIGHEST = np.array([0.1, 0.002]), np.array([5000.0, 1.0])
"""Bounds of the search: launch in us, memory bandwidth as a fraction of the device's."""


@dataclass(frozen=True)
class Measured:
    """Everything a calibration is read from."""

    kernels: list[Sample]
    operations: list[OpSample]


@dataclass(frozen=True)
class Fitted:
    """The rates, how well each explains its samples (rms of the relative error), and the slow-downs."""

    rates: Mapping[str, float]
    errors: Mapping[str, float]
    contention: tuple[float, float]


def measure_all(crew: Crew, model: ModelSpec, cluster: ClusterSpec, nominal: Calibration, kind: str) -> Measured:
    """Kernels, links and steps on all ranks."""
    told = crew.call(probe, DTYPES[kind][0], timeout_s=300.0)
    kernels = [replace(same[0], seconds=fmean(s.seconds for s in same)) for same in zip(*told, strict=True)]
    cases: list[Case] = []
    for name, wanted in MICRO_BATCHES[kind].items():
        for seq in LENGTHS[kind]:
            with suppress(NotApplicable):
                cases.append(case_of(name, model, cluster, nominal, seq, wanted))
    timelines: list[list[Timeline]] = [[] for _ in cases]
    for _ in range(ROUNDS):
        for case, seen in zip(cases, timelines, strict=True):
            seen += crew.call(measure, _trial(case, kind), timeout_s=300.0)[0].timelines
    operations = [sample for case, seen in zip(cases, timelines, strict=True) for sample in op_samples(case, seen)]
    return Measured(kernels, with_share(operations))


def _trial(case: Case, kind: str) -> Trial:
    layout, work = case.plan.layout, case.problem.workload
    cut = Cut(case.sequences, work.seq, layout.placement.replicas, layout.batch.microbatches)
    recipe = Recipe(lr=1e-4, warmup=0, steps=WARM_UP + REPEATS)
    options = RunOptions(precision=DTYPES[kind][1], recipe=recipe, timeout_s=60.0)
    return Trial(case.plan, case.problem.model, cut, options, WARM_UP, REPEATS)


def fit(measured: Measured, nominal: Calibration, cluster: ClusterSpec) -> Fitted:
    """Rates that explain what was measured."""
    here = device(cluster.device)
    peak = here.peak_bf16_tflops * 1e12
    dense, grouped = _multiply(measured, "gemm", peak), _multiply(measured, "grouped", peak)
    scores = _attention(measured, peak)
    multiplies = {"projection": dense, "dense": dense, "grouped": grouped}
    rates = {
        **{f"{use}_efficiency": found.efficiency for use, found in multiplies.items()},
        **{f"{use}_rows_half": found.rows_half for use, found in multiplies.items()},
        "attention_efficiency": scores.efficiency,
        "attention_dim_half": scores.dim_half,
        "attention_pad_keys": scores.pad_keys,
        "attention_backward_ratio": scores.backward_ratio,
    }
    link, ring = _links(measured, nominal, here), _ring(measured, here)
    rates |= {
        "nvlink_efficiency": link.bytes_per_s / (here.nvlink_gbs * 1e9),
        "nvlink_alpha_us": link.alpha_s * 1e6,
        "ring_nvlink_efficiency": ring.bytes_per_s / (here.nvlink_gbs * 1e9),
        "nic_efficiency": 1.0,
        "ring_nic_efficiency": 1.0,
        "nic_alpha_us": link.alpha_s * 1e6,
    }
    so_far = nominal.with_rates("local", **rates)
    compute = [sample for sample in measured.operations if sample.kind in FITTED]
    launch_us, hbm, error = search(
        lambda a, b: np.array(prices(compute, so_far.with_rates("local", launch_us=a, hbm_efficiency=b))),
        np.array([sample.seconds for sample in compute]),
        np.array([sample.share for sample in compute]),
        LOWEST,
        HIGHEST,
    )
    rates |= {"launch_us": launch_us, "hbm_efficiency": hbm}
    errors = {"multiplies": dense.error, "grouped multiplies": grouped.error, "attention": scores.error,
              "exchanges": link.error, "rings": ring.error, "operations": error}  # fmt: skip
    return Fitted(rates, errors, _contention(measured))


def _multiply(measured: Measured, what: str, peak: float) -> MultiplyFit:
    samples = [sample for sample in measured.kernels if sample.what == what]
    rows = np.array([sample.sizes[0] for sample in samples], dtype=np.float64)
    flops = np.array([2.0 * np.prod(np.array(sample.sizes, dtype=np.float64)) for sample in samples])
    return fit_multiply(rows, flops, np.array([sample.seconds for sample in samples]), peak)


def _attention(measured: Measured, peak: float) -> AttentionFit:
    samples = [sample for sample in measured.kernels if sample.what == "scores"]
    by_phase = {phase: {s.sizes: s.seconds for s in samples if s.phase == phase} for phase in "FI"}
    sizes = sorted(by_phase["F"])
    seq, heads, width = (np.array([size[i] for size in sizes], dtype=np.float64) for i in range(3))
    forward, backward = (np.array([by_phase[phase][size] for size in sizes]) for phase in "FI")
    return fit_attention(seq, heads, width, forward, backward, peak)


def _links(measured: Measured, nominal: Calibration, here: Device) -> LinkFit:
    samples = [sample for sample in measured.operations if sample.kind in (Kind.DISPATCH, Kind.COMBINE)]
    if not samples:  # one rank
        rates = nominal.rates
        return LinkFit(rates.nvlink_alpha_us * 1e-6, rates.nvlink_efficiency * here.nvlink_gbs * 1e9, 0.0)
    moved = np.array([sum(nbytes(sample, nominal)) for sample in samples])
    return fit_link(moved, np.array([sample.seconds for sample in samples]), here.nvlink_gbs * 1e9)


def _ring(measured: Measured, here: Device) -> LinkFit:
    samples = [sample for sample in measured.kernels if sample.what == "ring"]
    if not samples:
        return LinkFit(0.0, here.nvlink_gbs * 1e9, 0.0)
    # The cost model counts gradients as fp32 and parameters as bf16; values moved here are fp32.
    moved = np.array([4.0 * values * (ranks - 1) / ranks for values, ranks in (s.sizes for s in samples)])
    return fit_link(moved, np.array([sample.seconds for sample in samples]), here.nvlink_gbs * 1e9)


def _contention(measured: Measured) -> tuple[float, float]:
    """Slow-down of compute and of communication beside each other."""
    seconds = {(s.what, s.phase): s.seconds for s in measured.kernels if s.what in ("alone", "beside")}
    if not seconds:
        return 1.0, 1.0
    compute, comm = (max(1.0, seconds["beside", what] / seconds["alone", what]) for what in ("compute", "comm"))
    return compute, comm


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate; the exit status. Of processes that torchrun or srun started the first one writes."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        asked = read_arguments(given)
        if at_hand.launched() is None:
            return _run(asked)
        return under_launcher(lambda crew: _run(asked))
    except (ValueError, RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


@dataclass(frozen=True)
class Asked:
    """What to call the calibration, the model whose steps are timed, and on how many ranks."""

    name: str = at_hand.OWN_CALIBRATION
    model: str | None = None
    processes: int | None = None


def read_arguments(given: Sequence[str]) -> Asked:
    """From key=value. Raises ValueError in one line."""
    values = dict(argument.partition("=")[::2] for argument in given)
    if unknown := sorted(set(values) - {"name", "model", "processes"}):
        raise ValueError(f"no setting {unknown[0]!r}; settings: name, model, processes")
    name, model, processes = values.get("name", at_hand.OWN_CALIBRATION), values.get("model"), values.get("processes")
    read.check_name(name, "calibration")
    if name in read.shipped("calibration"):
        raise ValueError(f"name={name} is shipped; choose another name for your own calibration")
    if processes is not None and (not processes.isdecimal() or not int(processes)):
        raise ValueError(f"processes={processes}: allowed: a positive integer")
    return Asked(name, model, None if processes is None else int(processes))


def _run(asked: Asked) -> int:
    begin = datetime.now(UTC)
    kind = device_kind()
    ranks = at_hand.rank_count(asked.processes)
    cluster, nominal = _starting_point(ranks, kind)
    context = joined()
    crew: Crew = Forked(ranks, kind) if context is None else Launched(context)
    name, depth = (asked.model, None) if asked.model else MODELS[kind]
    model = load_model(name)
    model = model if depth is None else model.with_layers(depth)
    print(f"calibrating {ranks} ranks of {machine(gpus=True).device}, steps of {model.name}", flush=True)
    measured = measure_all(crew, model, cluster, nominal, kind)
    found = fit(measured, nominal, cluster)
    path = write(asked.name, found, measured, cluster, model)
    for what, error in found.errors.items():
        print(f"  {what}: rms error of the fit {error:.0%}")
    took = (datetime.now(UTC) - begin).total_seconds()
    print(f"{path} ({took:.0f} s); BACKEND=measure uses it from now on" if asked.name == at_hand.OWN_CALIBRATION
          else f"{path} ({took:.0f} s); use it with CALIBRATION={asked.name}")  # fmt: skip
    return 0


def _starting_point(ranks: int, kind: str) -> tuple[ClusterSpec, Calibration]:
    """The cluster at hand, and a calibration whose measured numbers are all replaced."""
    nominal = load_calibration("laptop" if kind == "cpu" else "h100")
    mapping = at_hand.cluster_at_hand(ranks, "laptop" if kind == "cpu" else "h100")
    cluster = cluster_from_mapping({**mapping, "device": "cpu"} if kind == "cpu" else mapping)
    return cluster, replace(nominal, device=cluster.device)


if __name__ == "__main__":
    sys.exit(main())
