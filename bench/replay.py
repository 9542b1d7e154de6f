"""Plans found for one problem, tried on another: a search over a handful of candidates.

Decides which plans of a search are kept (the fastest, distinct ones) and how they
are laid out again: by their own system, for the new problem, through the same
sieves of memory and time as in any search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from bench.simulated import Simulated
from disagmoe.allocator import Tuned, tune
from disagmoe.cost.model import CostModel
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.specs import default_global_batch
from disagmoe.system import Candidate, NotApplicable, Problem, System, recompute_levels, without_recompute

KEPT = 3
"""Best plans of a search that are tried again."""


@dataclass(frozen=True)
class Fixed:
    """A system whose whole search space is a list of candidates of another."""

    system: System
    listed: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        return self.system.name

    @property
    def native_transport(self) -> str:
        return self.system.native_transport

    @property
    def recompute_levels(self) -> tuple[Candidate, ...]:
        return recompute_levels(self.system)

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        return self.listed

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        with _not_meant_for_this():
            return self.system.layout(problem, candidate)

    def program(self, problem: Problem, layout: Layout) -> Program:
        with _not_meant_for_this():
            return self.system.program(problem, layout)


@contextmanager
def _not_meant_for_this() -> Iterator[None]:
    """A candidate that its system would not list for this problem need not be possible here."""
    try:
        yield
    except ValueError as reason:
        raise NotApplicable(str(reason)) from reason


def best_candidates(found: Tuned, count: int = KEPT) -> tuple[Candidate, ...]:
    """The candidates of the `count` fastest plans of a search, the fastest first; ties in search order."""
    timed = sorted((t for t in found.trials if t.outcome == "timed"), key=lambda t: t.step_s or 0.0)
    return _distinct([trial.candidate for trial in timed])[:count]


def ranked_candidates(found: Tuned) -> tuple[Candidate, ...]:
    """Every candidate that a search could place and that fits, the most promising first.

    Ranked by the step where it was timed and by the lower bound on it where not.
    """
    usable = [t for t in found.trials if t.outcome in ("timed", "bound", "budget")]
    ordered = sorted(usable, key=lambda t: t.step_s if t.step_s is not None else t.bound_s or 0.0)
    return _distinct([trial.candidate for trial in ordered])


def _distinct(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Without repetitions; how much they recompute is left open, and so is the tier of the search."""
    bare = [{k: v for k, v in without_recompute(c).items() if k != "tier"} for c in candidates]
    first: dict[tuple[tuple[str, object], ...], Candidate] = {}
    for candidate in bare:
        first.setdefault(tuple(sorted(candidate.items())), candidate)
    return tuple(first.values())


def replayed(system: System, problem: Problem, candidates: Sequence[Candidate]) -> Tuned:
    """The fastest of some candidates on `problem`, by simulation."""
    simulated = Simulated(problem)
    fixed = Fixed(system, tuple(candidates))
    return tune(fixed, problem, simulated.step, peak=simulated.peak, budget=max(1, len(candidates)))


def from_default_batch(system: System, problem: Problem, search: Callable[[Problem], Tuned]) -> Tuned:
    """The fastest, at the batch of `problem`, of the best plans that `search` finds for the default batch.

    What cannot run at the default batch is reported as it is there.
    """
    costs, workload = problem.costs, problem.workload
    usual = replace(workload, global_batch=default_global_batch(workload.seq))
    if usual == workload:
        return search(problem)
    there = CostModel(costs.model, costs.cluster, costs.calibration, usual)
    found = search(replace(problem, workload=usual, costs=there))
    if found.plan is None:
        return replace(found, reason=f"{found.reason} (at {usual.global_batch:,} sequences)")
    return replayed(system, problem, best_candidates(found))
