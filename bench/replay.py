"""Plans found for one problem, tried on another: a search over a handful of candidates.

Decides which plans of a search are kept (the fastest, distinct ones) and how they
are laid out again: by their own system, for the new problem, through the same
sieves of memory and time as in any search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from disagmoe.allocator import StepFunction, Tuned, tune
from disagmoe.cost.model import CostModel
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.specs import default_global_batch
from disagmoe.system import Candidate, Problem, System

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

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        return self.listed

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        return self.system.layout(problem, candidate)

    def program(self, problem: Problem, layout: Layout) -> Program:
        return self.system.program(problem, layout)


def best_candidates(found: Tuned, count: int = KEPT) -> tuple[Candidate, ...]:
    """The candidates of the `count` fastest plans that a search timed, the fastest first; ties in search order."""
    timed = [trial for trial in found.trials if trial.outcome == "timed"]
    return tuple(trial.candidate for trial in sorted(timed, key=lambda trial: trial.step_s or 0.0)[:count])


def replayed(system: System, problem: Problem, step: StepFunction, candidates: Sequence[Candidate]) -> Tuned:
    """The fastest of some candidates on `problem`. Their tiers are of the search they come from and count no more."""
    listed = tuple({key: value for key, value in c.items() if key != "tier"} for c in candidates)
    return tune(Fixed(system, listed), problem, step, budget=len(listed))


def from_default_batch(
    system: System, problem: Problem, step: StepFunction, search: Callable[[Problem], Tuned]
) -> Tuned:
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
    return replayed(system, problem, step, best_candidates(found))
