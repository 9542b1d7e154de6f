"""`backend=emulate`: the cut of every tuned plan, run by real processes at the modelled speed.

Decides how a cut is run and what its row says. One system after the other has the
machine to itself: one warm-up, then repeats, of which the best counts, since a busy
machine can only make a paced step slower. Times of a row are those of the cut at
full size; what the simulator gives for the very same cut stands beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from baselines.registry import get_system
from bench import plan_cache
from bench.backends import Executed, Progress
from bench.config import RunConfig
from bench.cut import CutPlan, make_cut
from bench.cut_sizes import MICROBATCHES, cut_layers
from bench.emulation import DEFAULT_PROCESSES, Ran, run_cut
from bench.evaluate import MEASURES, Outcome, Row, label, problem_of
from bench.executed import COMPARED, failed, rates, refused
from bench.machine import machine
from bench.simulated import Simulated
from disagmoe.allocator import Tuned
from disagmoe.cost.model import CostModel
from disagmoe.system import NotApplicable, Problem, Variant, variants_of
from disagmoe.timeline.metrics import summarize, worker_metrics
from disagmoe.timeline.timeline import Timeline

MORE_MEMORY, MOST_MORE = 0.03, 20
"""Where no plan fits, GPUs get this share more memory than the least that any plan needs, as often as it takes."""


class Emulated:
    """The backend `emulate`."""

    def run(
        self, config: RunConfig, costs: CostModel, simulated: Sequence[tuple[Row, Outcome]], progress: Progress
    ) -> Executed:
        """Run the cut of every plan, one after the other."""
        processes = config.processes or DEFAULT_PROCESSES
        rows, outcomes, ran = [], [], []
        for row, outcome in simulated:
            done, drawn, told = _emulated(config, costs, row, outcome, processes, progress)
            rows.append(done)
            outcomes.append(drawn)
            ran += told
        layers = cut_layers(config.model)
        execution = {
            "processes": processes,
            "layers": layers,
            "microbatches": MICROBATCHES,
            **asdict(machine(gpus=False)),
            "rows": ran,
        }
        notes = [*_notes(config, layers, processes), *memory_notes([row for row, _ in simulated])]
        return Executed(rows, outcomes, notes, layers, execution)


def _emulated(
    config: RunConfig, costs: CostModel, row: Row, outcome: Outcome, processes: int, progress: Progress
) -> tuple[Row, Outcome, list[dict[str, Any]]]:
    """Row, Outcome and the account of one system; those of the simulation where it has no plan."""
    tuned = outcome.tuned
    base = {**row, **dict.fromkeys(MEASURES), "status": "ok", "reason": "", "memory_limit_gib": None}
    try:
        cut = cut_of(config, costs, row, outcome, processes)
        if cut is None:
            return row, outcome, []
        progress(f"{row['view']}: {label(row)}, emulated")
        ran = run_cut(cut, processes, config.repeats)
        best = ran.best.timeline
        base.update(_measures(config, cut, best), simulated=times(cut, ran.simulated))
        base.update(repeats=len(ran.steps), spread=ran.spread)
        drawn = Outcome(cut.plan.layout, best, tuned)
        return base, drawn, [{"system": row["system"], "variant": row["variant"], "view": row["view"], **_account(ran)}]
    except NotApplicable as reason:
        return *refused(base, reason, tuned), []
    except Exception as error:
        return *failed(config, base, error, tuned), []


def cut_of(config: RunConfig, costs: CostModel, row: Row, outcome: Outcome, processes: int) -> CutPlan | None:
    """The cut of the plan behind a row, None where it has no plan at all. Raises NotApplicable."""
    form = form_of(config, row)
    problem = problem_of(config, costs, form, row["view"])
    return cut_of_tuned(form, problem, outcome.tuned, processes, config.budget)


def cut_of_tuned(form: Variant, problem: Problem, tuned: Tuned | None, processes: int, budget: int) -> CutPlan | None:
    """The cut of what a search with this budget found, None where it found no plan. Raises NotApplicable."""
    tight = tuned is not None and tuned.status == "oom"
    if tuned is not None and tight and tuned.needed_gib is not None:
        tuned = _roomier(form, problem, tuned.needed_gib, budget)
    if tuned is None or tuned.plan is None or tuned.candidate is None:
        return None
    full = tuned.plan.layout
    if tight:  # say what it takes
        full = replace(full, details={**full.details, "needs_gib": round(tuned.needed_gib or 0.0, 1)})
    return make_cut(form.system, problem, full, tuned.candidate, processes)


def _roomier(form: Variant, problem: Problem, needed_gib: float, budget: int) -> Tuned | None:
    """The fastest plan where GPUs have just enough memory for any: what is cut where nothing fits at full size."""
    for _ in range(MOST_MORE):
        limit_gib = needed_gib * (1.0 + MORE_MEMORY)
        memory_gib = limit_gib + problem.cluster.reserve_gib
        tuned = searched(form, replace(problem, cluster=replace(problem.cluster, memory_gib=memory_gib)), budget)
        if tuned.plan is not None:
            return tuned
        needed_gib = max(limit_gib, tuned.needed_gib or 0.0)
    return None


def searched(form: Variant, problem: Problem, budget: int) -> Tuned:
    """What a search with this budget finds, simulated step by step."""
    simulated = Simulated(problem)
    return plan_cache.tuned(form.system, problem, simulated.step, peak=simulated.peak, budget=budget)


def form_of(config: RunConfig, row: Row) -> Variant:
    """The planner behind a row."""
    system = get_system(row["system"], **config.system_options.get(row["system"], {}))
    return next(form for form in variants_of(system, row["view"]) if form.label == row["variant"])


def times(cut: CutPlan, timeline: Timeline) -> dict[str, float]:
    """What is compared between the emulated and the simulated cut."""
    mean = summarize(worker_metrics(timeline), cut.stands_for).mean
    return dict(zip(COMPARED, (timeline.step_s, mean.compute_s, mean.exposed_s, mean.bubble_s), strict=True))


def _measures(config: RunConfig, cut: CutPlan, timeline: Timeline) -> Row:
    """The numbers of a row, at full size: rates per GPU that the cut stands for."""
    model, tokens = config.model.with_layers(cut_layers(config.model)), cut.sequences * config.workload.seq
    gpus = np.array([worker.gpus for worker in cut.stands_for.workers], dtype=np.float64)
    weight = (gpus / gpus.sum())[cut.plan.program.worker]
    return {
        **rates(config, model, tokens, timeline.step_s, cut.gpus),
        **summarize(worker_metrics(timeline), cut.stands_for).as_row(),
        "wire_bytes_per_gpu": float(cut.pricing.wire_bytes @ weight),
        "gpus_used": cut.gpus,
        "microbatches": cut.plan.layout.batch.microbatches,
        "tokens_dropped": cut.plan.layout.tokens_dropped,
        "plan": {**cut.full.details, **{f"cut {key}": value for key, value in cut.sizes.items()}},
    }


def memory_notes(simulated: Sequence[Row]) -> list[str]:
    """What does not fit at full size, by what it needs."""
    tight: dict[str, list[str]] = {}
    for row in simulated:
        if row["status"] == "oom":
            tight.setdefault(f"{row['reason']}", []).append(label(row))
    return [
        f"out of memory at full size: {', '.join(dict.fromkeys(names))} ({reason}); "
        "shown is the cut of the fastest plan that fits where GPUs have just enough for any"
        for reason, names in tight.items()
    ]


def _account(ran: Ran) -> dict[str, Any]:
    """How a cut was run: pace, repeats, and what the machine was busy with."""
    return {
        "dilation": ran.pace.dilation,
        "slack_s": ran.pace.slack_s,
        "smallest_exchange_s": ran.cut.smallest_exchange_s,
        "repeats": [
            {
                "step_time_s": step.timeline.step_s,
                "wall_s": step.wall_s,
                "late_s": step.late_s,
                "late_share": step.late_share,
                "own_load": step.own_load,
                "foreign_load": step.foreign_load,
            }
            for step in ran.steps
        ],
    }


def _notes(config: RunConfig, layers: int, processes: int) -> list[str]:
    return [
        f"{layers} of {config.full_layers} layers, emulated: {MICROBATCHES} micro-batches on {processes} processes; "
        "every operation takes as long as in the full-size plan of its system, while tensors of a small model move",
        "tokens/s per GPU, MFU and speed-ups are per GPU of the full-size plan that the cut stands for; the steps "
        "themselves differ in their batch and cannot be compared",
    ]
