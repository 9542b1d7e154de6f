"""Turn a resolved configuration into rows: tune, verify, simulate and account every system; a backend may run it too.

Within a view every system gets the same model, batch and cluster, and is tuned in
its own search space. The reference (megatron_1f1b) is always run, since every
speed-up is relative to it; reductions compare with `disagmoe` where it was asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from baselines.registry import REFERENCE, get_system
from bench import plan_cache
from bench.backends import Executed, backend_of
from bench.choices import other_device
from bench.comparison import compare
from bench.config import RunConfig
from bench.coverage import check_covered
from bench.replay import KEPT, from_default_batch, replayed
from bench.side_by_side import in_order
from bench.simulated import Simulated
from bench.transports import MERGE_OF_TRANSPORT
from disagmoe.allocator import Tuned
from disagmoe.cost.calibration import load_calibration
from disagmoe.cost.flops import train_flops_per_token
from disagmoe.cost.model import CostModel
from disagmoe.plan.memory_report import MemoryReport
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.resource_bound import resource_bound
from disagmoe.plan.verify import verify
from disagmoe.specs import default_global_batch
from disagmoe.specs.devices import device
from disagmoe.system import Candidate, Problem, Variant, variants_of
from disagmoe.timeline.metrics import summarize, worker_metrics
from disagmoe.timeline.timeline import Timeline

Row = dict[str, Any]
Known = Mapping[str, Sequence[Candidate]]
"""Candidates of a system by label of the row."""


@dataclass(frozen=True)
class Outcome:
    """What stands behind a row: enough to draw it. None where there is no plan."""

    layout: Layout | None
    timeline: Timeline | None
    tuned: Tuned | None = None
    memory: MemoryReport | None = None


@dataclass(frozen=True)
class Evaluation:
    """Rows in table order, an Outcome each, and the notes the tables must carry."""

    rows: list[Row]
    outcomes: list[Outcome]
    notes: list[str] = field(default_factory=list)
    views: dict[str, dict[str, Any]] = field(default_factory=dict)
    layers: int | None = None
    """The depth that ran, where a backend did not run the model's."""
    execution: Mapping[str, Any] = field(default_factory=dict)
    """What an emulated or measured run was on."""


Progress = Callable[[str], None]


def label(row: Mapping[str, object]) -> str:
    """Name of a row: its system, with the variant where there is one."""
    return f"{row['system']} ({row['variant']})" if row["variant"] else str(row["system"])


def evaluate(config: RunConfig, progress: Progress | None = None) -> Evaluation:
    """Run every system of a configuration in every view, side by side where there are cores for it."""
    report = progress or (lambda text: None)
    costs = cost_model(config)
    backend = backend_of(config)
    asked = [(view, name) for view in config.views for name in _with_reference(config.systems)]
    # The larger search spaces stand last in the list of systems.
    longest_first = sorted(range(len(asked)), key=lambda i: -_with_reference(config.systems).index(asked[i][1]))
    found = in_order(
        [partial(_rows_of, config, costs, name, view) for view, name in asked],
        1 if config.debug else None,
        start=longest_first,
        report=lambda i: report("{}: {}".format(*asked[i])),
    )
    rows: list[Row] = []
    outcomes: list[Outcome] = []
    for listed in found:
        for row, outcome in listed:
            rows.append(row)
            outcomes.append(outcome)
    executed = Executed(rows, outcomes)
    if backend is not None:
        executed = backend.run(config, costs, list(zip(rows, outcomes, strict=True)), report)
    rows, outcomes = executed.rows, executed.outcomes
    views: dict[str, dict[str, Any]] = {}
    for view in config.views:
        shown = [row for row in rows if row["view"] == view]
        compare(shown)
        views[view] = _describe_view(shown)
    notes = [*_notes(config), *executed.notes, *_hints(config, rows)]
    return Evaluation(rows, outcomes, notes, views, executed.layers, executed.execution)


def _rows_of(config: RunConfig, costs: CostModel, name: str, view: str) -> list[tuple[Row, Outcome]]:
    return list(run_system(config, costs, name, view))


def cost_model(config: RunConfig) -> CostModel:
    """Prices under the configuration's calibration, its contention scaled as asked."""
    calibration = load_calibration(config.calibration).with_contention_scale(config.contention_scale)
    return CostModel(config.model, config.cluster, calibration, config.workload)


def run_system(
    config: RunConfig,
    costs: CostModel,
    name: str,
    view: str,
    progress: Progress | None = None,
    known: Known | None = None,
) -> Iterator[tuple[Row, Outcome]]:
    """The rows of one system in one view, not yet compared with any other.

    With `known`, candidates by label of the row, nothing else is tried.
    """
    report = progress or (lambda text: None)
    system = get_system(name, **config.system_options.get(name, {}))
    for form in variants_of(system, view):
        report(f"{view}: {name} ({form.label})" if form.label else f"{view}: {name}")
        candidates = None if known is None else known.get(form.label, ())
        yield _run(form, problem_of(config, costs, form, view), config, view, report, candidates)


def _with_reference(systems: tuple[str, ...]) -> tuple[str, ...]:
    return (REFERENCE, *(name for name in systems if name != REFERENCE))


def problem_of(config: RunConfig, costs: CostModel, form: Variant, view: str) -> Problem:
    """What a system is asked in one view: the transport and how it merges copies are settled here."""
    native = form.native_transport or form.system.native_transport
    transport = native if view == "native" else config.uniform_transport
    merge = config.merge or MERGE_OF_TRANSPORT[transport]
    return Problem(config.model, config.cluster, config.workload, costs, transport, merge, config.ep)


def _run(
    form: Variant,
    problem: Problem,
    config: RunConfig,
    view: str,
    report: Progress,
    known: Sequence[Candidate] | None = None,
) -> tuple[Row, Outcome]:
    system = form.system
    contention = problem.costs.contention(problem.transport)
    row: Row = {
        "system": system.name,
        "variant": form.label,
        "view": view,
        "transport": problem.transport,
        "merge": problem.merge,
        "contention": {"compute": contention.compute, "comm": contention.comm},
        "implementation": "equivalent",
        "memory_limit_gib": problem.cluster.limit_gib,
        **dict.fromkeys(MEASURES),
    }

    def search(asked: Problem) -> Tuned:
        simulated = Simulated(asked)
        return plan_cache.tuned(
            system,
            asked,
            simulated.step,
            peak=simulated.peak,
            budget=config.budget,
            on_trial=lambda count: report(f"{view}: {system.name}, plan {count} timed"),
        )

    try:
        if known is not None:
            tuned = replayed(system, problem, known)
        elif config.plans_from is not None:
            tuned = from_default_batch(system, problem, search)
        else:
            tuned = search(problem)
        row.update(status=tuned.status, reason=tuned.reason, peak_memory_gib=tuned.needed_gib)
        if tuned.plan is None:
            return row, Outcome(None, None, tuned)
        verify(tuned.plan.program)
        check_covered(tuned.plan, problem.model, problem.workload)
        simulated = Simulated(problem)
        pricing, timeline = simulated.run(tuned.plan)
        memory = simulated.memory(tuned.plan)
        row.update(_measures(problem, tuned.plan, pricing, timeline), peak_memory_gib=memory.peak_gib)
        return row, Outcome(tuned.plan.layout, timeline, tuned, memory)
    except Exception as error:  # one broken system must not take the others' rows with it
        if interrupted(error):
            raise KeyboardInterrupt from error
        if config.debug:
            raise
        row.update(status="failed", reason=f"{type(error).__name__}: {error}")
        return row, Outcome(None, None)


def interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: inside compiled code Python wraps it in a SystemError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return True
        error = error.__cause__ or error.__context__
    return False


MEASURES = (
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "speedup",
    "bound_s",
    "bound_ratio",
    "bound_by",
    "compute_s",
    "overlapped_comm_s",
    "exposed_comm_s",
    "bubble_s",
    "wait_s",
    "stall_s",
    "exposed_comm_reduction",
    "stall_reduction",
    "exposed_by_kind_s",
    "pools",
    "peak_memory_gib",
    "wire_bytes_per_gpu",
    "gpus_used",
    "microbatches",
    "tokens_dropped",
    "repeats",
    "spread",
    "plan",
)
"""Row fields that are null unless a plan ran."""


def _measures(problem: Problem, plan: Plan, pricing: Pricing, timeline: Timeline) -> Row:
    placement = plan.layout.placement
    summary = summarize(worker_metrics(timeline), placement)
    step_s = timeline.step_s
    tokens = problem.workload.global_batch * problem.workload.seq
    per_gpu = tokens / step_s / problem.cluster.gpus
    flops = train_flops_per_token(problem.model, problem.workload.seq)
    mfu = per_gpu * flops / (device(problem.cluster.device).peak_bf16_tflops * 1e12)
    if not 0.0 < mfu <= 1.0:
        raise ValueError(f"MFU {mfu:.3f} of {plan.layout.system} is not between 0 and 1: the cost model is wrong here")
    sent = float(pricing.wire_bytes @ _gpu_weight(plan))
    return {
        "step_time_s": step_s,
        "tokens_per_s": tokens / step_s,
        "tokens_per_s_per_gpu": per_gpu,
        "mfu": mfu,
        **_bound(problem, plan, step_s),
        **summary.as_row(),
        "wire_bytes_per_gpu": sent,
        "gpus_used": placement.gpus_used,
        "microbatches": plan.layout.batch.microbatches,
        "tokens_dropped": plan.layout.tokens_dropped,
        "repeats": 1,
        "spread": 0.0,
        "plan": {**plan.layout.details, **_padding(plan, problem)},
    }


def _bound(problem: Problem, plan: Plan, step_s: float) -> Row:
    """The least step that the hardware allows with this plan's experts per rank and transport."""
    layout = plan.layout
    if layout.tokens_dropped:  # the bound is that of all tokens
        return {}
    fused = layout.tiles is not None
    least = resource_bound(problem.costs, layout.transport, layout.merge, layout.ep, fused=fused)
    return {"bound_s": least.step_s, "bound_ratio": step_s / least.step_s, "bound_by": least.binds}


def _padding(plan: Plan, problem: Problem) -> dict[str, float]:
    """Where the batch does not divide: what the last micro-batch is charged beyond it, as a share of the batch."""
    batch = plan.layout.batch
    extra = batch.microbatches * batch.sequences * batch.data_ranks - problem.workload.global_batch
    return {"charged_padding": extra / problem.workload.global_batch} if extra else {}


def _gpu_weight(plan: Plan) -> Any:
    """Per row: the share of the used GPUs that belongs to the row's worker."""
    gpus = np.array([w.gpus for w in plan.layout.placement.workers], dtype=np.float64)
    return (gpus / gpus.sum())[plan.program.worker]


def _describe_view(rows: list[Row]) -> dict[str, Any]:
    return {
        "transports": {
            f"{row['system']} ({row['variant']})" if row["variant"] else row["system"]: row["transport"] for row in rows
        },
        "contention": {row["transport"]: row["contention"] for row in rows},
    }


def _hints(config: RunConfig, rows: list[Row]) -> list[str]:
    """What to ask for where the reference does not fit, since nothing can be compared with it then."""
    if all(row["status"] != "oom" for row in rows if row["system"] == REFERENCE):
        return []
    lighter = "" if config.workload.optimizer == "precision_aware" else " or optimizer=precision_aware"
    depth = (
        "" if config.depth == "common" else "; depth=common compares all systems at the depth that each of them fits"
    )
    return [f"{REFERENCE} is out of memory, so speed-ups are missing: try a shorter sequence{lighter}{depth}"]


def _notes(config: RunConfig) -> list[str]:
    notes: list[str] = []
    if config.contention_scale != 1.0:
        notes.append(f"contention scaled by {config.contention_scale:g}: every factor f is 1 + scale × (f − 1)")
    if config.plans_from is not None:
        batch = default_global_batch(config.workload.seq)
        notes.append(f"plans: the best {KEPT} of every system at {batch:,} sequences, simulated again at this batch")
    if (strange := other_device(config.calibration, config.cluster)) is not None:
        notes.append(strange)
    notes.extend(f"{config.model.name}: {text}" for text in config.model.assumptions)
    return notes
