"""Local search around a seed: what a formula cannot see, the step function does.

Decides how far to look. A formula's split ignores pipeline fill, synchronisation
and everything a schedule adds, so the neighbours of the seed are tried with the
real step (simulated, emulated or measured; it is handed in) and the best is kept:
Algorithm 1 of the DisagMoE paper (arXiv 2605.11005), which perturbs the seed within
a radius for K trials. A point is a place on several axes; its distance from the
centre is the number of steps along the axes. Nearer points come first, equally near
ones in an order drawn with the given seed, and with `recentre` a better point becomes
the centre. Trials are counted, never timed, so the search repeats; the result is never
worse than the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from disagmoe.plan.memory_report import lower_bound_gib, peak_gib
from disagmoe.plan.plan import Plan
from disagmoe.system import Candidate, NotApplicable, Problem, System, recompute_levels

Value = str | int | float
Point = tuple[Value, ...]
"""One value per axis, in the order of the axes."""

DEFAULT_RADIUS = 2
DEFAULT_TRIALS = 64
POINTS_PER_TRIAL = 4
"""Points looked at per trial: where hardly any fits in memory the search ends, too."""


@dataclass(frozen=True)
class Axis:
    """One thing that may change. Ordered values are one step apart from the next, unordered ones from each other."""

    name: str
    values: tuple[Value, ...]
    ordered: bool = True

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values):
            raise ValueError(f"axis {self.name}: values must be distinct and at least one, got {self.values}")

    def around(self, value: Value, radius: int) -> list[tuple[int, Value]]:
        """(steps away, value) of everything within `radius`, the value itself first."""
        at = self.values.index(value)
        steps = ((abs(i - at) if self.ordered else int(i != at), i) for i in range(len(self.values)))
        return [(distance, self.values[i]) for distance, i in sorted(steps) if distance <= radius]


@dataclass(frozen=True)
class Space:
    """Axes, the point to start from, and the planner's candidate of a point (None: there is none)."""

    axes: tuple[Axis, ...]
    seed: Point
    candidate: Callable[[Mapping[str, Value]], Candidate | None]

    def __post_init__(self) -> None:
        if len(self.seed) != len(self.axes):
            raise ValueError(f"the seed has {len(self.seed)} values for {len(self.axes)} axes")
        for axis, value in zip(self.axes, self.seed, strict=True):
            if value not in axis.values:
                raise ValueError(f"the seed's {axis.name}={value!r} is not on its axis {axis.values}")

    def named(self, point: Point) -> dict[str, Value]:
        """A point by the names of its axes."""
        return {axis.name: value for axis, value in zip(self.axes, point, strict=True)}

    def ball(self, centre: Point, radius: int) -> list[list[Point]]:
        """Points by their distance from the centre, 0 to `radius`, each list in a fixed order."""
        shells: list[list[Point]] = [[] for _ in range(radius + 1)]
        for distance, point in self._within(centre, radius, 0):
            shells[distance].append(point)
        return shells

    def _within(self, centre: Point, radius: int, index: int) -> Iterator[tuple[int, Point]]:
        if index == len(self.axes):
            yield 0, ()
            return
        for distance, value in self.axes[index].around(centre[index], radius):
            for further, rest in self._within(centre, radius - distance, index + 1):
                yield distance + further, (value, *rest)


@dataclass(frozen=True)
class Attempt:
    """One point and what became of it: "timed", "memory" (does not fit) or "not placeable"."""

    point: Mapping[str, Value]
    candidate: Candidate | None
    outcome: str
    reason: str = ""
    needed_gib: float | None = None
    step_s: float | None = None
    best: bool = False
    """Better than everything before it."""


@dataclass(frozen=True)
class Found:
    """The best plan; None where no point could be timed. `seed_s` is None where the seed could not."""

    plan: Plan | None
    step_s: float | None
    seed_s: float | None
    attempts: tuple[Attempt, ...]

    @property
    def trials(self) -> int:
        """How often the step function was asked."""
        return sum(attempt.outcome == "timed" for attempt in self.attempts)


def local_search(
    system: System,
    problem: Problem,
    step: Callable[[Plan], float],
    space: Space,
    *,
    radius: int = DEFAULT_RADIUS,
    trials: int = DEFAULT_TRIALS,
    seed: int = 0,
    recentre: bool = True,
    needed_gib: Callable[[Plan], float] | None = None,
    peak: Callable[[Plan], float] | None = None,
    on_trial: Callable[[int], None] | None = None,
) -> Found:
    """Time the seed and up to `trials` of its neighbours; the best that fits in memory.

    A point is tried with as little recompute as fits. `needed_gib` is the memory of
    a plan (default: by the order of its Program), `peak` its memory as it ran, asked
    for a plan that would be the best so far right after its step. Without `recentre`
    the ball stays around the seed. Points that cannot be placed or do not fit are no
    trials.
    """
    if radius < 0 or trials < 0:
        raise ValueError(f"local search with radius={radius}, trials={trials}: neither may be negative")
    search = _Search(system, problem, step, space, needed_gib, peak)
    search.attempt(space.seed)
    seed_s = search.step_s
    centre, order = space.seed, random.Random(seed)
    moved = True
    while moved:
        moved = False
        for point in _shuffled(space.ball(centre, radius), order):
            if search.timed > trials or len(search.attempts) > POINTS_PER_TRIAL * trials:
                break
            if search.attempt(point):
                if on_trial is not None:
                    on_trial(search.timed)
                if recentre and search.best == point:
                    centre, moved = point, True
                    break
    return Found(search.plan, search.step_s, seed_s, tuple(search.attempts))


def _shuffled(shells: Sequence[list[Point]], order: random.Random) -> Iterator[Point]:
    for shell in shells:
        points = list(shell)
        order.shuffle(points)
        yield from points


class _Search:
    """Points tried so far and the best of them."""

    def __init__(
        self,
        system: System,
        problem: Problem,
        step: Callable[[Plan], float],
        space: Space,
        needed_gib: Callable[[Plan], float] | None,
        peak: Callable[[Plan], float] | None,
    ) -> None:
        self.system = system
        self.problem = problem
        self.step = step
        self.space = space
        self.needed_gib = needed_gib
        self.peak = peak
        self.attempts: list[Attempt] = []
        self.best: Point | None = None
        self.plan: Plan | None = None
        self.step_s: float | None = None
        self.timed = 0
        self._seen: set[Point] = set()
        self._known: set[tuple[tuple[str, Value], ...]] = set()

    def attempt(self, point: Point) -> bool:
        """Try a point; True where it was timed, False where it was known, cannot be placed or does not fit."""
        if point in self._seen:
            return False
        self._seen.add(point)
        named = self.space.named(point)
        candidate = self.space.candidate(named)
        if candidate is not None:
            key = tuple(sorted(candidate.items()))
            if key in self._known:  # two points may mean the same plan
                return False
            self._known.add(key)
        tried = Attempt(named, candidate, "not placeable", "no plan at this point")
        for extra in recompute_levels(self.system) if candidate is not None else ():
            tried = self._with(point, Attempt(named, {**(candidate or {}), **extra}, "", ""))
            if tried.outcome != "memory":
                break
        self.attempts.append(tried)
        return tried.outcome == "timed"

    def _with(self, point: Point, start: Attempt) -> Attempt:
        """Plan, weigh and time one candidate of a point."""
        model, work, limit = self.problem.model, self.problem.workload, self.problem.cluster.limit_gib

        def too_large(needed: float) -> Attempt:
            reason = f"needs {needed:.1f} GiB, {limit:.1f} available"
            return replace(start, outcome="memory", reason=reason, needed_gib=needed)

        try:
            layout = self.system.layout(self.problem, start.candidate or {})
            if self.needed_gib is None and (least := lower_bound_gib(layout, model, work)) > limit:
                return too_large(least)  # no program of it would fit
            plan = Plan(layout, self.system.program(self.problem, layout))
        except NotApplicable as reason:
            return replace(start, outcome="not placeable", reason=str(reason))
        needed = peak_gib(layout, plan.program, model, work) if self.needed_gib is None else self.needed_gib(plan)
        if needed > limit:
            return too_large(needed)
        seconds = self.step(plan)
        better = self.step_s is None or seconds < self.step_s
        if better and self.peak is not None:
            needed = self.peak(plan)
            if needed > limit:
                return too_large(needed)
        self.timed += 1
        if better:
            self.best, self.plan, self.step_s = point, plan, seconds
        return replace(start, outcome="timed", needed_gib=needed, step_s=seconds, best=better)
