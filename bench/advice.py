"""Does disaggregation pay here, at which split, and what binds it.

Decides what the question means: within a view, the fastest system that keeps
attention and experts apart against the fastest that does not, all of them tuned
and simulated by `bench.evaluate` as in every run. Beside the tuned plan stand the
steps that lead to a split (an even one, the roofline's, the program's, the local
search's) and what the program would do without a memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from baselines.registry import REFERENCE, get_system
from bench.comparison import OWN_SYSTEM
from bench.config import RunConfig
from bench.evaluate import Evaluation, Outcome, Row, cost_model, evaluate, problem_of
from bench.limits import Limits, limits
from bench.simulated import Simulated
from disagmoe.allocator import (
    Allocation,
    Axis,
    Found,
    Infeasible,
    RingMemory,
    Settings,
    Sizes,
    Space,
    allocate,
    local_search,
    ring_candidates,
    ring_space,
    sizes_of,
)
from disagmoe.allocator import roofline as rl
from disagmoe.allocator.local_search import DEFAULT_RADIUS
from disagmoe.cost.model import CostModel
from disagmoe.system import Candidate, NotApplicable, Problem, System, variants_of

RING_CHOICES: Mapping[str, tuple[str | int | float, ...]] = {
    "order": ("comm_stage", "megatron"),
    "compute_streams": (2, 1),
}
"""What an allocation does not decide: keys of a candidate and the values tried, where the planner has them."""
TRIALS = 48
NEGLIGIBLE = 0.005
"""A gain below this is none."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Split:
    """The way to a split: None where a step of it found nothing (`why` says why)."""

    even_s: float | None
    seed: Allocation | None
    seed_s: float | None
    found_s: float | None
    found: Mapping[str, Any] | None
    trials: int
    free: Allocation | None
    """The program's allocation without a memory limit."""
    why: str = ""

    @property
    def memory_binds(self) -> bool:
        """Whether more memory would allow a shorter bottleneck."""
        if self.seed is None or self.free is None:
            return False
        return self.free.bottleneck_s < self.seed.bottleneck_s * (1.0 - NEGLIGIBLE)


@dataclass(frozen=True)
class ViewAdvice:
    """The answer in one view. Rows are those of `bench.evaluate`; None where no such system runs."""

    view: str
    own: Row | None
    colocated: Row | None
    reference: Row | None
    why_not: str
    limits: Limits | None
    split: Split | None
    together: Row | None = None
    """A plan of our own planners that keeps attention and experts together, where that is the fastest of all."""

    @property
    def gain(self) -> float | None:
        """Step of the best colocated system over that of the best disaggregated one."""
        return _ratio(self.colocated, self.own)

    @property
    def speedup(self) -> float | None:
        """Step of megatron_1f1b over that of the best disaggregated system."""
        return _ratio(self.reference, self.own)


@dataclass(frozen=True)
class Roofline:
    """The formula's view of the problem: an even split, the formula's own and the tuned plan's NICs."""

    work: rl.Work
    machine: rl.Machine
    paper: rl.PaperIntensity | None
    merge: str
    even: rl.Split
    formula: rl.Split
    attention_point: float | None
    """Turning point of the tuned plan's attention pool; None without one."""
    expert_point: float | None
    ratios: tuple[rl.RatioRow, ...]
    """16:16 and 16:10 on NICs 16:16, as in the paper, at this cluster's rates."""


@dataclass(frozen=True)
class Advice:
    """Everything the screen and the figure show."""

    config: RunConfig
    evaluation: Evaluation
    views: tuple[ViewAdvice, ...]
    roofline: Roofline | None


def advise(config: RunConfig, settings: Settings | None = None, report: Report | None = None) -> Advice:
    """Answer for one configuration."""
    tell = report or (lambda text: None)
    evaluation = evaluate(config, tell)
    costs = cost_model(config)
    views = []
    for view in config.views:
        tell(f"{view}: split")
        views.append(_view(config, costs, evaluation, view, settings or Settings()))
    return Advice(config, evaluation, tuple(views), _roofline(config, evaluation, views))


def _ratio(slower: Row | None, faster: Row | None) -> float | None:
    if slower is None or faster is None:
        return None
    return float(slower["step_time_s"]) / float(faster["step_time_s"])


def is_disaggregated(outcome: Outcome) -> bool:
    """Whether a row's plan keeps attention and experts on different GPUs."""
    return outcome.layout is not None and outcome.layout.placement.disaggregated


def _is_ours(row: Row) -> bool:
    return str(row["system"]).startswith(OWN_SYSTEM)


def fastest(rows: Iterable[Row]) -> Row | None:
    """The row of the shortest step."""
    return min(rows, key=lambda row: float(row["step_time_s"]), default=None)


def best_of(evaluation: Evaluation, view: str) -> tuple[Row | None, Row | None, Row | None, str]:
    """Fastest disaggregated, fastest baseline and reference row of a view, and why there is none of the first.

    Plans of our own planners that keep both together are not what disaggregation is an alternative to.
    """
    pairs = [
        (row, outcome) for row, outcome in zip(evaluation.rows, evaluation.outcomes, strict=True) if row["view"] == view
    ]
    ok = [(row, outcome) for row, outcome in pairs if row["status"] == "ok"]

    own = fastest(row for row, outcome in ok if is_disaggregated(outcome))
    colocated = fastest(row for row, _ in ok if not _is_ours(row))

    reference = next((row for row, _ in ok if row["system"] == REFERENCE), None)
    failed = [row for row, _ in pairs if row["status"] != "ok" and _is_ours(row)]
    why = "; ".join(f"{row['system']}: {row['status']}, {row['reason']}" for row in failed)
    return own, colocated, reference, why or "no system of this run keeps attention and experts apart"


def _view(config: RunConfig, costs: CostModel, evaluation: Evaluation, view: str, settings: Settings) -> ViewAdvice:
    own, colocated, reference, why = best_of(evaluation, view)
    name, label = (OWN_SYSTEM, "") if own is None else (own["system"], own["variant"])
    if own is None and name not in config.systems:
        return ViewAdvice(view, None, colocated, reference, why, None, None)
    options = config.system_options.get(name, {})
    form = next(form for form in variants_of(get_system(name, **options), view) if form.label == label)
    problem = problem_of(config, costs, form, view)
    tuned = next((o.tuned for row, o in zip(evaluation.rows, evaluation.outcomes, strict=True) if row is own), None)
    found = None
    if tuned is not None and tuned.plan is not None and tuned.candidate is not None:
        found = limits(form.system, problem, tuned.candidate, tuned.plan)
    fixed = {key: value for key, value in options.items() if value is not None}
    split = _split(form.system, problem, fixed, settings)
    best = fastest(row for row in evaluation.rows if row["view"] == view and row["status"] == "ok")
    together = best if best is not None and _is_ours(best) and best is not own else None
    return ViewAdvice(view, own, colocated, reference, "" if own is not None else why, found, split, together)


def _split(system: System, problem: Problem, fixed: Mapping[str, Any], settings: Settings) -> Split:
    """The program's split, the search around it and an even split, for a ring planner."""
    candidate = next(iter(_candidates(system, problem)), None)
    if candidate is None:
        return Split(None, None, None, None, None, 0, None, "the planner has no candidate")
    choices = {key: values for key, values in RING_CHOICES.items() if key in candidate}
    defaults = {key: fixed.get(key, values[0]) for key, values in choices.items()}
    weigh = RingMemory(system, problem, defaults)
    sizes = sizes_of(fixed)
    try:
        free = allocate(problem, sizes=sizes, memory=lambda shape: (0.0, 0.0), settings=settings)
    except Infeasible as reason:
        return Split(None, None, None, None, None, 0, None, str(reason))
    try:
        seed = allocate(
            problem,
            sizes=sizes,
            memory=weigh.bound,
            check=weigh.whole,
            recompute=weigh.recompute,
            settings=settings,
        )
    except Infeasible as reason:
        return Split(None, None, None, None, None, 0, free, str(reason))
    even_s = _even(system, problem, defaults, settings, weigh)
    start, seed_s = _start(system, problem, seed, defaults)
    if start is None:
        return Split(even_s, seed, None, None, None, 0, free, "the program's split has no plan")
    space = ring_space(problem, start, fixed=fixed, others=choices)
    found = _search(system, problem, space, radius=DEFAULT_RADIUS, trials=TRIALS)
    details = None if found.plan is None else dict(found.plan.layout.details)
    return Split(even_s, seed, seed_s, found.step_s, details, found.trials, free)


def _candidates(system: System, problem: Problem) -> Iterable[Candidate]:
    try:
        return system.candidates(problem)
    except NotApplicable:
        return ()


def _search(system: System, problem: Problem, space: Space, *, radius: int, trials: int) -> Found:
    simulated = Simulated(problem)
    return local_search(system, problem, simulated.step, space, radius=radius, trials=trials, peak=simulated.peak)


def _start(
    system: System, problem: Problem, plan: Allocation, defaults: Mapping[str, str | int | float]
) -> tuple[Candidate | None, float | None]:
    """The fastest candidate that means an allocation and fits, and its simulated step."""
    timed = []
    for candidate in ring_candidates(plan, defaults):
        space = Space((Axis("only", (0,)),), (0,), lambda point, c=candidate: c)  # type: ignore[misc]
        step_s = _search(system, problem, space, radius=0, trials=0).step_s
        if step_s is not None:
            timed.append((step_s, candidate))
    if not timed:
        return None, None
    step_s, best = min(timed, key=lambda pair: pair[0])
    return best, step_s


def _even(
    system: System,
    problem: Problem,
    defaults: Mapping[str, str | int | float],
    settings: Settings,
    weigh: RingMemory,
) -> float | None:
    """The best plan with as many attention as expert GPUs and half of the NICs each."""
    size = min(problem.ep or problem.model.experts, problem.model.experts, problem.cluster.gpus // 2)
    for n in (size, size // 2):
        if n < 1:
            continue
        sizes = Sizes(n=(n,), m=(n,))
        try:
            plan = allocate(
                problem,
                mode="equal_nics",
                sizes=sizes,
                memory=weigh.bound,
                check=weigh.whole,
                recompute=weigh.recompute,
                settings=settings,
            )
        except Infeasible:
            continue
        return _start(system, problem, plan, defaults)[1]
    return None


def _roofline(config: RunConfig, evaluation: Evaluation, views: list[ViewAdvice]) -> Roofline | None:
    if config.cluster.gpus < 2:
        return None
    where = rl.machine(config.cluster)
    own = next((view.own for view in views if view.own is not None), None)
    ep = min(config.ep or config.model.experts, config.model.experts)
    merge, nodes = "node", -(-ep // config.cluster.gpus_per_node)
    points: dict[str, float] = {}
    if own is not None:
        layout = next(o.layout for row, o in zip(evaluation.rows, evaluation.outcomes, strict=True) if row is own)
        if layout is not None:
            first = {w.pool: w for w in reversed(layout.placement.workers)}
            merge, ep, nodes = layout.merge, layout.ep, first["F"].nodes
            points = {pool: rl.turning_point(where.peak_flops, first[pool].nic_gbs * 1e9) for pool in "AF"}
    need = rl.work(config.model, config.workload.seq, merge=merge, ep=ep, nodes=nodes)
    half = where.gpus // 2
    rate = where.nics / where.gpus
    fixed = replace(where, gpus=32, nics=32 * rate)
    return Roofline(
        work=need,
        machine=where,
        paper=rl.paper_intensity(config.model, config.workload.seq),
        merge=merge,
        even=rl.split(need, where, half, half),
        formula=rl.seed(need, where),
        attention_point=points.get("A"),
        expert_point=points.get("F"),
        ratios=rl.ratio_table(need, fixed, [(16, 16), (16, 10)], (16 * rate, 16 * rate)),
    )
