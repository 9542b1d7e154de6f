"""From an allocation to candidates of the ring planner, and the axes of a search around one.

Decides what a neighbour of a split is. Nodes that the experts do not need are the
attention's, so a step along depth, replicas or expert size moves the boundary
between the pools with it; how many nodes stay idle and how many GPUs a group leaves
unused are axes of their own. The keys are those of the candidates of the `disagmoe`
planners, which also decide whether a point can be placed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil, gcd, inf

from disagmoe.allocator.allocation import Allocation
from disagmoe.allocator.local_search import Axis, Space, Value
from disagmoe.allocator.shapes import MICRO_BATCHES, Shape, Sizes
from disagmoe.allocator.static_memory import static_memory_of
from disagmoe.cost.recompute import Recompute
from disagmoe.plan.memory_report import lower_bound_gib, memory_report
from disagmoe.plan.plan import Layout
from disagmoe.system import Candidate, NotApplicable, Problem, System, recompute_levels, without_recompute

RULES = ("halves", "own")
"""NIC rules of pools on nodes of their own."""
GROUPS = (2, 3, 4)
"""In-flight group sizes, in depths of the ring."""


def ring_candidate(
    shape: Shape, rule: str, defaults: Mapping[str, Value], depths: int = GROUPS[-1], node_gpus: int = 1
) -> dict[str, Value]:
    """The planner's candidate of a Shape under a NIC rule, with `depths` depths of the ring in flight.

    `defaults` holds what a Shape does not decide ("order", ...). Pools that share nodes
    of `node_gpus` GPUs do so on as few as a stage fits on.
    """
    return {
        **defaults,
        "nics": rule,
        "p": shape.p,
        "dp": shape.dp,
        "m": shape.m,
        "n": shape.n,
        "stage_nodes": _stage_nodes(shape, node_gpus) if rule == "shared_nodes" else 0,
        "micro_batch": shape.micro_batch,
        "group": depths * shape.p,
    }


def _stage_nodes(shape: Shape, node_gpus: int) -> int:
    """The fewest nodes on which both groups of a stage lie evenly; 1 where there is no such number."""
    both = gcd(shape.m, shape.n)
    return next((k for k in range(1, both + 1) if both % k == 0 and (shape.m + shape.n) // k <= node_gpus), 1)


def ring_candidates(plan: Allocation, defaults: Mapping[str, Value]) -> list[dict[str, Value]]:
    """The candidates that mean this allocation, most faithful first.

    One per NIC rule that may hold it, with many micro-batches in flight and with few, which need less memory.
    """
    rules: tuple[str, ...] = RULES
    if any(use is not None and min(use.gpus) > 0 for use in plan.nodes):
        rules = ("shared_nodes",)
    elif max(plan.attention.nodes, plan.expert.nodes) > len(plan.nodes) // 2:
        rules = tuple(reversed(RULES))
    most = max((sum(use.gpus) for use in plan.nodes if use is not None), default=1)
    return [
        ring_candidate(plan.shape, rule, defaults, depths, most) for rule in rules for depths in (GROUPS[-1], GROUPS[0])
    ]


class RingMemory:
    """Memory of a Shape as its planner would lay it out, with as little recompute as fits.

    `bound` is what no program of it goes below, `whole` what its own program needs;
    both are pairs (attention, experts) of GiB. A Shape that cannot be placed is left
    to the allocation's rows.
    """

    def __init__(self, system: System, problem: Problem, defaults: Mapping[str, Value]) -> None:
        self.system = system
        self.problem = problem
        self.defaults = defaults
        self.static = static_memory_of(problem)
        self.levels = recompute_levels(system)
        self.rules = RULES if problem.cluster.nodes > 1 else ("shared_nodes",)
        self._least = cache(self._bounds)
        self._whole = cache(self._peaks)
        self._levels_of: dict[Shape, int] = {}

    def bound(self, shape: Shape) -> tuple[float, float]:
        """Weights, gradients and optimizer, and what must be in flight, with the least recompute that may fit."""
        return self._least(shape)[1]

    def recompute(self, shape: Shape) -> Recompute:
        """What a Shape must recompute: by its own program where `whole` was asked, else by the bound."""
        level = self._levels_of.get(shape)
        return Recompute.of(self.levels[self._least(shape)[0] if level is None else level])

    def _bounds(self, shape: Shape) -> tuple[int, tuple[float, float]]:
        """The least recompute level that may fit (the last where none does), and a bound on memory."""
        limit, last = self.problem.cluster.limit_gib, len(self.levels) - 1
        fixed = self.static(shape)
        if max(fixed) > limit:
            return last, fixed
        least = inf
        for level in (last, *range(last)):  # where the most recompute does not fit, less hardly does
            layout = self._layout(shape, self.levels[level])
            if layout is None:
                return last, fixed
            gib = lower_bound_gib(layout, self.problem.model, self.problem.workload)
            if level == last and gib > limit:
                return last, self._of_fullest(shape, gib)
            if level < last and gib <= limit:
                return level, self._of_fullest(shape, gib)
            least = min(least, gib)
        return last, self._of_fullest(shape, least)

    def whole(self, shape: Shape) -> tuple[float, float]:
        """Peaks of both pools over the order of the planner's program."""
        return self._whole(shape)

    def _peaks(self, shape: Shape) -> tuple[float, float]:
        limit, last = self.problem.cluster.limit_gib, len(self.levels) - 1
        choices = list(product(range(last + 1), (GROUPS[-1], GROUPS[0])))
        # The most recompute and the fewest micro-batches in flight hold the least.
        least = self._peaks_of(shape, self.levels[last], GROUPS[0])
        self._levels_of[shape] = last
        if max(least) > limit:
            return least
        for level, depths in choices[:-1]:
            peaks = self._peaks_of(shape, self.levels[level], depths)
            if max(peaks) <= limit:
                self._levels_of[shape] = level
                return peaks
        return least

    def _peaks_of(self, shape: Shape, extra: Candidate, depths: int) -> tuple[float, float]:
        """Peaks of both pools under one choice; infinite where there is no such program or none of it could fit."""
        layout = self._layout(shape, extra, depths)
        if layout is None:
            return self.static(shape)
        model, work = self.problem.model, self.problem.workload
        least = lower_bound_gib(layout, model, work)
        if least > self.problem.cluster.limit_gib:
            return self._of_fullest(shape, least)
        try:
            program = self.system.program(self.problem, layout)
        except NotApplicable:
            return inf, inf
        report = memory_report(layout, program, model, work)
        first, second = (max(w.peak_gib for w in report.workers if w.pool == pool) for pool in "AF")
        return first, second

    def _of_fullest(self, shape: Shape, gib: float) -> tuple[float, float]:
        """What is known of the fullest GPU only belongs to the pool that holds more parameters."""
        fixed = self.static(shape)
        return (gib, fixed[1]) if fixed[0] > fixed[1] else (fixed[0], gib)

    def _layout(self, shape: Shape, extra: Candidate, depths: int = GROUPS[-1]) -> Layout | None:
        for rule in self.rules:
            try:
                candidate = ring_candidate(shape, rule, self.defaults, depths, self.problem.cluster.gpus_per_node)
                return self.system.layout(self.problem, {**candidate, **extra})
            except NotApplicable:
                continue
        return None


def ring_space(
    problem: Problem,
    seed: Candidate,
    *,
    fixed: Mapping[str, Value] | None = None,
    others: Mapping[str, tuple[Value, ...]] | None = None,
) -> Space:
    """Axes around a candidate of a ring planner.

    `fixed` are sizes that may not change (the planner's own options), `others`
    further keys of a candidate with the values they may take ("order", ...).
    """
    seed, fixed = without_recompute(seed), dict(fixed or {})
    p, dp, m, n = (int(seed[key]) for key in ("p", "dp", "m", "n"))
    world, nodes = problem.cluster.gpus, problem.cluster.nodes
    pool = _Pool(problem, str(seed["nics"]), p, dp, n, int(seed["micro_batch"]))
    idle = pool.idle_nodes(m)
    unused = pool.most(idle) - m
    start: dict[str, Value] = {
        **seed,
        "group": ceil(int(seed["group"]) / p),
        "idle_nodes": idle,
        "unused": unused,
    }
    rules = (str(fixed["nics"]),) if "nics" in fixed else RULES
    if nodes == 1 or seed["nics"] not in rules:
        rules = (str(seed["nics"]),)
    axes = [
        _axis("p", p, range(1, min(problem.model.layers, world // 2) + 1), fixed),
        _axis("dp", dp, range(1, world // 2 + 1), fixed),
        _axis("n", n, _expert_sizes(problem, n), fixed),
        _axis("idle_nodes", idle, range(nodes), {}),
        _axis("unused", unused, range(max(0, unused - 2), unused + 3), {"unused": 0} if "m" in fixed else {}),
        _axis("micro_batch", int(seed["micro_batch"]), _micro_batches(problem), fixed),
        _axis("group", ceil(int(seed["group"]) / p), GROUPS, fixed),
        Axis("nics", rules, ordered=False),
    ]
    for name, values in (others or {}).items():
        allowed = (fixed[name],) if name in fixed else values
        axes.append(Axis(name, tuple(dict.fromkeys((seed[name], *allowed))), ordered=False))

    def candidate(point: Mapping[str, Value]) -> Candidate | None:
        depth, replicas, experts = (int(point[key]) for key in ("p", "dp", "n"))
        there = _Pool(problem, str(point["nics"]), depth, replicas, experts, int(point["micro_batch"]))
        size = int(fixed.get("m", there.most(int(point["idle_nodes"])) - int(point["unused"])))
        if size < 1:
            return None
        changed = {key: value for key, value in point.items() if key not in ("idle_nodes", "unused")}
        return {**seed, **changed, "m": size, "group": int(fixed.get("group", int(point["group"]) * depth))}

    return Space(tuple(axes), tuple(start[axis.name] for axis in axes), candidate)


@dataclass(frozen=True)
class _Pool:
    """The attention pool beside p dp expert groups of n GPUs."""

    problem: Problem
    rule: str
    p: int
    dp: int
    n: int
    micro_batch: int

    def most(self, idle_nodes: int) -> int:
        """The largest attention group; of those with equally many micro-batches the smallest."""
        cluster, groups = self.problem.cluster, self.p * self.dp
        size, nodes = cluster.gpus_per_node, cluster.nodes
        if self.rule == "halves":
            gpus = (nodes // 2 - idle_nodes) * size
        elif self.rule == "own":
            gpus = (nodes - ceil(groups * self.n / size) - idle_nodes) * size
        else:
            gpus = cluster.gpus - groups * self.n - idle_nodes * size
        largest = gpus // groups
        if largest < 1:
            return 0
        batch, per_gpu = self.problem.workload.global_batch, self.micro_batch * self.dp
        count = ceil(batch / (per_gpu * largest))
        return min(largest, ceil(batch / (per_gpu * count)))

    def idle_nodes(self, m: int) -> int:
        """Nodes that groups of `m` leave free."""
        idle = 0
        while self.most(idle + 1) >= m and idle + 1 < self.problem.cluster.nodes:
            idle += 1
        return idle


def _axis(name: str, at: int, values: range | tuple[int, ...], fixed: Mapping[str, Value]) -> Axis:
    """An ordered axis that holds the seed's own value."""
    allowed = (at,) if name in fixed else values
    return Axis(name, tuple(sorted({at, *allowed})))


def _expert_sizes(problem: Problem, at: int) -> tuple[int, ...]:
    """The size asked for stays; a free one may take any size that changes the experts per GPU."""
    if problem.ep is not None:
        return (at,)
    experts = problem.model.experts
    return tuple(sorted({ceil(experts / per_gpu) for per_gpu in range(1, experts + 1)}))


def _micro_batches(problem: Problem) -> tuple[int, ...]:
    asked = problem.workload.micro_batch
    return MICRO_BATCHES if asked is None else (asked,)


def sizes_of(fixed: Mapping[str, Value]) -> Sizes | None:
    """A planner's own options as admissible sizes of an allocation; None where it fixes none."""
    given = {key: (int(fixed[key]),) for key in ("p", "dp", "m", "n") if key in fixed}
    return Sizes(**given) if given else None
