"""The plan a system is judged by: the fastest of its candidates that fits in memory.

Every system goes through the same sieves: what cannot fit in memory is dropped
first, then what a lower bound on the step already rules out; the rest is timed by
a step function that is handed in (the simulator today; an emulated or measured
step serves as well). A candidate that does not fit is tried again with more
recompute, as far as its system can recompute. Budgets are counts, never seconds,
so the choice is the same on every machine.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace

from disagmoe.allocator.seeding import neighbours, seeds
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Kind
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.plan.memory_report import lower_bound_gib, peak_gib
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.program import Program
from disagmoe.system import Candidate, NotApplicable, Problem, System, recompute_levels, without_recompute

_Key = tuple[tuple[str, str | int | float], ...]
StepFunction = Callable[[Plan], float]
"""Seconds of one step of a plan."""
PeakFunction = Callable[[Plan], float]
"""GiB of the fullest GPU of a plan that was just timed."""

DEFAULT_BUDGET = 64
"""Candidates timed per round."""
REFINED_PLANS = 3
"""Best plans whose refinements are timed too."""
MOST_MOVES = 8
"""Times a better neighbour becomes the one whose neighbours are tried."""


@dataclass(frozen=True)
class Trial:
    """One candidate and what became of it.

    `origin` says why it was looked at: "seed" (the allocator's program proposed it),
    "candidate" (of the system's search space), "refinement" (of a good one) or
    "neighbour" (of the best one). `outcome` is "timed", "memory" (does not fit), "bound" (a better plan was
    already known), "budget" (enough were timed) or "not placeable"; the numbers
    that do not apply are None.
    """

    candidate: Candidate
    outcome: str
    reason: str = ""
    needed_gib: float | None = None
    bound_s: float | None = None
    step_s: float | None = None
    origin: str = "candidate"


@dataclass(frozen=True)
class Tuned:
    """The result of tuning one system on one problem.

    `candidate` is the point of the search space that `plan` was made from; both
    are None unless `status` is "ok" (else "oom" or "not_applicable", with the
    reason). `needed_gib` is the plan's memory, or the least that anything needs.
    """

    status: str
    reason: str
    candidate: Candidate | None
    plan: Plan | None
    step_s: float | None
    needed_gib: float | None
    trials: tuple[Trial, ...]


def tune(
    system: System,
    problem: Problem,
    step: StepFunction,
    *,
    peak: PeakFunction | None = None,
    budget: int = DEFAULT_BUDGET,
    on_trial: Callable[[int], None] | None = None,
) -> Tuned:
    """Fastest plan of `system` that fits; ties go to the earlier candidate.

    For a ring planner the allocator's seeds come first. Then the search has two
    rounds: the system's candidates by rising lower bound (at most `budget` of them
    are timed), then the refinements of the best REFINED_PLANS; of a ring planner
    also the neighbours of the best plan, as long as they are better. What a bound
    rules out in the first round could not be among those refined either. A plan
    fits where its memory by the order of its Program does and, with `peak`, its
    memory as it ran; `peak` is only asked for plans that
    would be the best so far, right after their `step`. `on_trial(timed)` reports
    progress.
    """
    try:
        candidates = list(system.candidates(problem))
    except NotApplicable as reason:
        return Tuned("not_applicable", str(reason), None, None, None, None, ())

    search = _Search(system, problem, step, peak, on_trial)
    first = seeds(system, problem, candidates)
    for tier in sorted({int(c.get("tier", 0)) for c in candidates}):
        tried = [c for c in candidates if int(c.get("tier", 0)) == tier]
        refined = any(True for _ in system.refinements(problem, tried[0]))
        search.run([c for c in first if int(c["tier"]) == tier], budget, "seed", keep=REFINED_PLANS)
        search.run(tried, budget, "candidate", keep=REFINED_PLANS if refined else 1)
        for candidate in search.best_candidates(REFINED_PLANS):
            search.run(list(system.refinements(problem, candidate)), budget, "refinement")
        search.climb(budget)
        if search.best is not None:
            best, plan = search.best
            return Tuned("ok", "", best.candidate, plan, best.step_s, best.needed_gib, tuple(search.trials))
    return _nothing_fits(problem, tuple(search.trials))


def _nothing_fits(problem: Problem, trials: tuple[Trial, ...]) -> Tuned:
    needs = [t.needed_gib for t in trials if t.outcome == "memory" and t.needed_gib is not None]
    if not needs:
        refused = [t.reason for t in trials if t.reason]
        reason = refused[0] if refused else "no candidate in the search space of this system"
        return Tuned("not_applicable", reason, None, None, None, None, trials)
    limit = problem.cluster.limit_gib
    reason = f"needs {min(needs):.1f} GiB per GPU at least; {limit:.1f} GiB available"
    return Tuned("oom", reason, None, None, None, min(needs), trials)


class _Search:
    """The trials of one tuning run and the best plan among them."""

    def __init__(
        self,
        system: System,
        problem: Problem,
        step: StepFunction,
        peak: PeakFunction | None,
        on_trial: Callable[[int], None] | None,
    ) -> None:
        self.system = system
        self.problem = problem
        self.step = step
        self.peak = peak
        self.on_trial = on_trial
        self.levels = recompute_levels(system)
        self.limit_gib = problem.cluster.limit_gib
        self.trials: list[Trial] = []
        self.best: tuple[Trial, Plan] | None = None
        self.steps: list[float] = []
        """Step times of the plans that fit, shortest first."""
        self._seen: set[_Key] = set()
        self._layouts: dict[_Key, Layout] = {}

    def best_candidates(self, count: int) -> list[Candidate]:
        """The candidates of the fastest plans that fit, without their recompute."""
        timed = sorted((t for t in self.trials if t.outcome == "timed"), key=lambda t: t.step_s or 0.0)
        return [without_recompute(trial.candidate) for trial in timed[:count]]

    def climb(self, budget: int) -> None:
        """Try the neighbours of the best plan, and of a better one among them, and so on."""
        for _ in range(MOST_MOVES):
            if self.best is None:
                return
            centre = self.best[0]
            self.run(neighbours(self.system, self.problem, centre.candidate), budget, "neighbour")
            if self.best[0] is centre:
                return

    def run(self, candidates: list[Candidate], budget: int, origin: str, keep: int = 1) -> None:
        """Time candidates by rising lower bound, but for those that cannot be among the `keep` best."""
        timed = 0
        for level, trial in self._place(candidates, origin):
            beaten = self._beaten_from(keep)
            if (trial.bound_s or 0.0) >= beaten:
                self.trials.append(replace(trial, outcome="bound"))
            elif timed >= budget:
                self.trials.append(replace(trial, outcome="budget"))
            else:
                timed += self._settle(level, trial, beaten)
        self._layouts.clear()

    def _beaten_from(self, keep: int) -> float:
        """The step time of the `keep`-th best plan so far; infinite where there are fewer."""
        if self.best is None or len(self.steps) < keep:
            return float("inf")
        return self.steps[keep - 1]

    def _place(self, candidates: list[Candidate], origin: str) -> list[tuple[int, Trial]]:
        """(first recompute level that may fit, trial) of new candidates, by rising lower bound on the step."""
        placed = []
        for candidate in candidates:
            key = _key(candidate)
            if key in self._seen:
                continue
            self._seen.add(key)
            try:
                level, needed = self._first_level(self._layout(candidate))
                if needed <= self.limit_gib:
                    bound = self._bound_s(candidate, level)
                    placed.append((level, Trial(candidate, "", needed_gib=needed, bound_s=bound, origin=origin)))
                else:
                    self._layouts.pop(key, None)
                    self.trials.append(Trial(candidate, "memory", needed_gib=needed, origin=origin))
            except NotApplicable as reason:
                self.trials.append(Trial(candidate, "not placeable", reason=str(reason), origin=origin))
        return sorted(placed, key=lambda pair: pair[1].bound_s or 0.0)

    def _layout(self, candidate: Candidate) -> Layout:
        """The layout of a candidate, which is asked for when it is placed and again when it is timed."""
        key = _key(candidate)
        if key not in self._layouts:
            self._layouts[key] = self.system.layout(self.problem, candidate)
        return self._layouts[key]

    def _bound_s(self, candidate: Candidate, first: int) -> float:
        """What the step takes at least with the recompute of level `first` or of one after it."""
        return min(
            lower_bound_s(self._layout({**candidate, **extra}), self.problem.costs) for extra in self.levels[first:]
        )

    def _first_level(self, layout: Layout) -> tuple[int, float]:
        """The least recompute with which a layout may fit, and what it then needs at least (GiB)."""
        needed = float("inf")
        for level, extra in enumerate(self.levels):
            redone = replace(layout, options={**layout.options, **extra})
            needed = min(needed, lower_bound_gib(redone, self.problem.model, self.problem.workload))
            if needed <= self.limit_gib:
                return level, needed
        return len(self.levels), needed

    def _settle(self, level: int, trial: Trial, beaten: float) -> bool:
        """Time a candidate with as little recompute as fits, unless its bound with that is `beaten`; True if timed."""
        timed = False
        programs: dict[frozenset[Kind], Program] = {}
        for extra in self.levels[level:]:
            candidate = {**trial.candidate, **extra}
            try:
                layout = self._layout(candidate)
                bound = lower_bound_s(layout, self.problem.costs)
                if bound >= beaten:
                    self.trials.append(replace(trial, candidate=candidate, outcome="bound", bound_s=bound))
                    continue
                repeated = Recompute.of(layout.options).repeated(disaggregated=layout.placement.disaggregated)
                if repeated not in programs:  # what is redone inside a backward changes no order
                    programs[repeated] = self.system.program(self.problem, layout)
            except NotApplicable as reason:
                self.trials.append(replace(trial, candidate=candidate, outcome="not placeable", reason=str(reason)))
                continue
            plan = Plan(layout, programs[repeated])
            needed = peak_gib(layout, plan.program, self.problem.model, self.problem.workload)
            if needed > self.limit_gib:
                self.trials.append(replace(trial, candidate=candidate, outcome="memory", needed_gib=needed))
                continue
            done = replace(trial, candidate=candidate, outcome="timed", needed_gib=needed, bound_s=bound)
            done, timed = replace(done, step_s=self.step(plan)), True
            if self.best is None or (done.step_s or 0.0) < (self.best[0].step_s or 0.0):
                if self.peak is not None:
                    done = replace(done, needed_gib=self.peak(plan))
                if (done.needed_gib or 0.0) > self.limit_gib:
                    self.trials.append(replace(done, outcome="memory"))
                    continue
                self.best = (done, plan)
            self._record(done)
            break
        return timed

    def _record(self, trial: Trial) -> None:
        self.trials.append(trial)
        insort(self.steps, trial.step_s or 0.0)
        if self.on_trial is not None:
            self.on_trial(sum(t.outcome == "timed" for t in self.trials))


def _key(candidate: Candidate) -> _Key:
    return tuple(sorted(candidate.items()))
