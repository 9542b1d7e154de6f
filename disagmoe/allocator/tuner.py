"""The plan a system is judged by: the fastest of its candidates that fits in memory.

Every system goes through the same three sieves: what does not fit in memory is
dropped first, then what a lower bound on the step already rules out, and the
rest is timed by a step function that is handed in (the simulator today; an
emulated or measured step serves as well). Budgets are counts, never seconds, so
the choice is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from disagmoe.plan.memory import peak_static_gib
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.system import Candidate, NotApplicable, Problem, System

StepFunction = Callable[[Plan], float]

DEFAULT_BUDGET = 64
"""Candidates timed per round."""
REFINED_PLANS = 3
"""Best plans whose refinements are timed too."""


@dataclass(frozen=True)
class Trial:
    """One candidate and what became of it.

    `outcome` is "timed", "memory" (does not fit), "bound" (a better plan was
    already known), "budget" (enough were timed) or "not placeable"; the numbers
    that do not apply are None.
    """

    candidate: Candidate
    outcome: str
    reason: str = ""
    needed_gib: float | None = None
    bound_s: float | None = None
    step_s: float | None = None


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
    budget: int = DEFAULT_BUDGET,
    on_trial: Callable[[int], None] | None = None,
) -> Tuned:
    """Fastest plan of `system` that fits; ties go to the earlier candidate.

    The search has two rounds: the system's candidates by rising lower bound (at
    most `budget` of them are timed), then the refinements of the best
    REFINED_PLANS. `on_trial(timed)` reports progress.
    """
    try:
        candidates = list(system.candidates(problem))
    except NotApplicable as reason:
        return Tuned("not_applicable", str(reason), None, None, None, None, ())

    search = _Search(system, problem, step, on_trial)
    for tier in sorted({int(c.get("tier", 0)) for c in candidates}):
        search.run([c for c in candidates if int(c.get("tier", 0)) == tier], budget)
        for candidate in search.best_candidates(REFINED_PLANS):
            search.run(list(system.refinements(problem, candidate)), budget)
        if search.best is not None:
            best, plan = search.best
            return Tuned("ok", "", best.candidate, plan, best.step_s, best.needed_gib, tuple(search.trials))
    return _nothing_fits(problem, tuple(search.trials))


def _nothing_fits(problem: Problem, trials: tuple[Trial, ...]) -> Tuned:
    needs = [t.needed_gib for t in trials if t.needed_gib is not None]
    if not needs:
        reason = trials[0].reason if trials else "no candidate in the search space of this system"
        return Tuned("not_applicable", reason, None, None, None, None, trials)
    limit = problem.cluster.limit_gib
    reason = f"needs {min(needs):.1f} GiB per GPU for weights, gradients and optimizer state; {limit:.1f} GiB available"
    return Tuned("oom", reason, None, None, None, min(needs), trials)


class _Search:
    """The trials of one tuning run and the best plan among them."""

    def __init__(
        self, system: System, problem: Problem, step: StepFunction, on_trial: Callable[[int], None] | None
    ) -> None:
        self.system = system
        self.problem = problem
        self.step = step
        self.on_trial = on_trial
        self.trials: list[Trial] = []
        self.best: tuple[Trial, Plan] | None = None
        self._seen: set[tuple[tuple[str, str | int | float], ...]] = set()

    def best_candidates(self, count: int) -> list[Candidate]:
        timed = [t for t in self.trials if t.step_s is not None]
        return [t.candidate for t in sorted(timed, key=lambda t: t.step_s or 0.0)[:count]]

    def run(self, candidates: list[Candidate], budget: int) -> None:
        timed = 0
        for layout, trial in self._place(candidates):
            if self.best is not None and (trial.bound_s or 0.0) >= (self.best[0].step_s or 0.0):
                self.trials.append(replace(trial, outcome="bound"))
            elif timed >= budget:
                self.trials.append(replace(trial, outcome="budget"))
            else:
                timed += self._time(layout, trial)

    def _time(self, layout: Layout, trial: Trial) -> bool:
        """Time one layout; False where its program cannot be made."""
        try:
            plan = Plan(layout, self.system.program(self.problem, layout))
        except NotApplicable as reason:
            self.trials.append(replace(trial, outcome="not placeable", reason=str(reason)))
            return False
        done = replace(trial, outcome="timed", step_s=self.step(plan))
        self.trials.append(done)
        if self.on_trial is not None:
            self.on_trial(sum(t.outcome == "timed" for t in self.trials))
        if self.best is None or (done.step_s or 0.0) < (self.best[0].step_s or 0.0):
            self.best = (done, plan)
        return True

    def _place(self, candidates: list[Candidate]) -> list[tuple[Layout, Trial]]:
        """New layouts that fit in memory, by rising lower bound; the others become trials."""
        placed = []
        for candidate in candidates:
            key = tuple(sorted(candidate.items()))
            if key in self._seen:
                continue
            self._seen.add(key)
            try:
                layout = self.system.layout(self.problem, candidate)
            except NotApplicable as reason:
                self.trials.append(Trial(candidate, "not placeable", reason=str(reason)))
                continue
            needed = peak_static_gib(layout, self.problem.model)
            if needed > self.problem.cluster.limit_gib:
                self.trials.append(Trial(candidate, "memory", needed_gib=needed))
                continue
            bound = lower_bound_s(layout, self.problem.costs)
            placed.append((layout, Trial(candidate, "", needed_gib=needed, bound_s=bound)))
        return sorted(placed, key=lambda pair: pair[1].bound_s or 0.0)
