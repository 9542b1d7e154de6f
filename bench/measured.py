"""`backend=measure`: every tuned plan run by real ranks as fast as the hardware at hand goes.

Decides what a measured row says. One plan after the other has the machine to itself:
warm-up steps, then repeats; the step time is the median of the repeats, the slowest
rank counting in each, and its breakdown is that of the very step it is. Beside it
stands what the calibration predicted for the same plan. A row whose ranks fail, or
lose one of them, is `failed` with the reason, and the others still run.

An implementation is a function that all ranks call: this suite's own executor, or a
real system. It is given a Trial (model, batch, plan) and reports step times, losses
and memory of its rank; whose rows it can run it says itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.backends import Executed, Progress
from bench.config import RunConfig
from bench.evaluate import MEASURES, Outcome, Row, label
from bench.executed import COMPARED, failed, rates, refused
from bench.implementations import Implementation, implementations, of_row
from bench.implementations import notes as implementation_notes
from bench.machine import machine
from bench.timing import StepTimes, step_times
from disagmoe.cost.model import CostModel
from disagmoe.runtime.crew import Crew, Forked, Launched, device_kind, joined
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.measure import RankReport, Trial
from disagmoe.runtime.optimizer import Recipe
from disagmoe.runtime.step import RunOptions
from disagmoe.timeline.metrics import summarize, worker_metrics
from disagmoe.timeline.timeline import Timeline

WARM_UP = 2
"""Steps that do not count: the first allocates, the second still fills caches."""
PEER_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 120.0
PRECISION = {"cpu": "fp32", "cuda": "bf16"}
NOMINAL_DEVICES = ("cpu", "laptop")
"""Devices whose peak is no fact, so that no MFU is reported."""

Simulated = tuple[Row, Outcome]


class Measured:
    """The backend `measure`."""

    def run(self, config: RunConfig, costs: CostModel, simulated: Sequence[Simulated], progress: Progress) -> Executed:
        """Run every plan with every implementation asked for, one after the other."""
        chosen = implementations(config.impl, config.systems)
        crew, kind = crew_of(config), device_kind()
        rows, outcomes, told = [], [], []
        for row, outcome in simulated:
            for implementation in of_row(chosen, row):
                done, drawn, account = _measured(config, crew, kind, implementation, row, outcome, progress)
                rows.append(done)
                outcomes.append(drawn)
                told += account
        execution = {
            "ranks": crew.size,
            "backend": "nccl" if kind == "cuda" else "gloo",
            "precision": PRECISION[kind],
            "warm_up": WARM_UP,
            **asdict(machine(gpus=True)),
            "rows": told,
        }
        notes = [*_notes(config, crew, kind, rows), *implementation_notes(told)]
        return Executed(rows, outcomes, notes, None, execution)


def crew_of(config: RunConfig) -> Crew:
    """The ranks of a run: those that were started together, or forked ones. ValueError where the plans need others."""
    context = joined()
    crew: Crew = Forked(config.cluster.gpus, device_kind()) if context is None else Launched(context)
    if crew.size != config.cluster.gpus:
        raise ValueError(
            f"cluster {config.cluster.name} has {config.cluster.gpus} devices, {crew.size} ranks were started: "
            "they must be as many (without CLUSTER the plans are made for the ranks at hand)"
        )
    if config.processes not in (None, crew.size):
        raise ValueError(f"processes={config.processes}: cluster {config.cluster.name} has {crew.size} devices")
    return crew


def _measured(
    config: RunConfig,
    crew: Crew,
    kind: str,
    implementation: Implementation,
    row: Row,
    outcome: Outcome,
    progress: Progress,
) -> tuple[Row, Outcome, list[dict[str, Any]]]:
    """Row, Outcome and the account of one plan; those of the planner where there is no plan."""
    tuned = outcome.tuned
    named = {"implementation": implementation.name}
    if row["status"] != "ok" or tuned is None or tuned.plan is None:
        return {**row, **named}, outcome, []
    base = {**row, **dict.fromkeys(MEASURES), **named, "maximum": None, "memory_limit_gib": None}
    try:
        trial = trial_of(config, kind, outcome)
        if (reason := implementation.refuse(trial)) is not None:
            return *refused(base, reason, tuned), []
        progress(f"{row['view']}: {label(row)}, measured")
        reports = crew.call(implementation.run, trial, timeout_s=STEP_TIMEOUT_S * (trial.steps + 1))
        times = step_times([report.steps_s for report in reports], trial.warm_up)
        timeline = _typical(times, reports[0].timelines)
        base.update(_measures(config, trial, reports, times, timeline))
        base["simulated"] = {key: row[key] for key in COMPARED}
        account = {
            "system": row["system"], "variant": row["variant"], "view": row["view"], **named,
            "steps_s": list(times.steps_s), "losses": list(reports[0].losses),
            "peak_memory_gib": [report.peak_memory_gib for report in reports],
        }  # fmt: skip
        return base, Outcome(tuned.plan.layout, timeline, tuned), [account]
    except Exception as error:
        return *failed(config, base, error, tuned), []


def trial_of(config: RunConfig, kind: str, outcome: Outcome) -> Trial:
    """What the ranks are asked to run of a row: its plan, optimizer included."""
    assert outcome.tuned is not None and outcome.tuned.plan is not None
    plan, work = outcome.tuned.plan, config.workload
    batch = plan.layout.batch
    cut = Cut(work.global_batch, work.seq, plan.layout.placement.replicas, batch.microbatches)
    steps = WARM_UP + config.repeats
    recipe = Recipe(lr=1e-4, warmup=0, steps=steps)
    options = RunOptions(precision=PRECISION[kind], recipe=recipe, timeout_s=PEER_TIMEOUT_S)
    return Trial(plan, config.model, cut, options, WARM_UP, config.repeats)


def _typical(times: StepTimes, timelines: Sequence[Timeline]) -> Timeline | None:
    """The Timeline of the step whose time is the median (the lower of two)."""
    if not timelines:
        return None
    order = sorted(range(times.repeats), key=times.steps_s.__getitem__)
    return timelines[order[(times.repeats - 1) // 2]]


def _measures(
    config: RunConfig, trial: Trial, reports: Sequence[RankReport], times: StepTimes, timeline: Timeline | None
) -> Row:
    """The numbers of a row."""
    layout, model, seq = trial.plan.layout, config.model, config.workload.seq
    # The median, as the time of a step that was run: then its breakdown adds up to it.
    step_s = median(times.steps_s) if timeline is None else timeline.step_s
    nominal: Row = {"mfu": None} if config.cluster.device in NOMINAL_DEVICES else {}
    split = {} if timeline is None else summarize(worker_metrics(timeline), layout.placement).as_row()
    sent = [report.wire_bytes for report in reports if report.wire_bytes is not None]
    layers = sum(model.is_moe(layer) for layer in range(model.layers))
    counted = reports[0].dropped[trial.warm_up :]
    copies = max(1, layers * model.top_k)
    return {
        **rates(config, model, trial.cut.sequences * seq, step_s, config.cluster.gpus),
        **nominal,
        **split,
        "peak_memory_gib": max(report.peak_memory_gib for report in reports),
        "wire_bytes_per_gpu": sum(sent) / len(sent) if sent else None,
        "gpus_used": layout.placement.gpus_used,
        "microbatches": layout.batch.microbatches,
        "tokens_dropped": round(sum(counted) / len(counted) / copies) if counted else 0,
        "repeats": times.repeats,
        "spread": times.spread,
        "plan": dict(layout.details),
    }


def _notes(config: RunConfig, crew: Crew, kind: str, rows: Sequence[Row]) -> list[str]:
    on = "GPUs over NCCL" if kind == "cuda" else "processes on this machine's CPU over gloo"
    notes = [
        f"measured on {crew.size} {on} in {PRECISION[kind]}: median of {config.repeats} steps after {WARM_UP} of "
        "warm-up, optimizer included, the slowest rank counting; memory is the high-water mark of the fullest rank"
        + ("" if kind == "cuda" else ", code and libraries included")
    ]
    errors = prediction_errors(rows)
    if errors:
        told = ", ".join(f"{name} {error:+.0%}" for name, error in errors.items())
        middle, name = median(abs(error) for error in errors.values()), Path(config.calibration).stem
        notes.append(f"predicted step against measured, calibration {name}: {told}; median |error| {middle:.0%}")
    return notes


def prediction_errors(rows: Sequence[Row]) -> Mapping[str, float]:
    """Predicted over measured step, less one, by label of the row: of this suite's own executor."""
    return {
        label(row): row["simulated"]["step_time_s"] / row["step_time_s"] - 1.0
        for row in rows
        if row["status"] == "ok" and row.get("simulated") and row["implementation"] == "equivalent"
    }
