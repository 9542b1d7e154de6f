"""Whether a system fits in memory at all, without looking for its fastest plan.

The candidates that hold least (static memory and one micro-batch, under the most
recompute the system has) are built until one fits; how many are tried is a count,
so the answer is the same everywhere, and a system that fits only with a candidate
further down the list is called too large.
"""

from __future__ import annotations

from dataclasses import replace

from disagmoe.allocator.tuner import PeakFunction
from disagmoe.plan.memory_report import lower_bound_gib, peak_gib
from disagmoe.plan.plan import Plan
from disagmoe.system import Candidate, NotApplicable, Problem, System, recompute_levels

LEANEST = 6
"""Candidates built before a system is called too large."""


def fits(system: System, problem: Problem, peak: PeakFunction | None = None) -> bool | None:
    """True where some plan fits, None where the system cannot run this problem whatever its memory.

    `peak` gives a plan's memory as it runs, beyond the order of its Program.
    """
    try:
        candidates = list(system.candidates(problem))
    except NotApplicable:
        return None
    most = recompute_levels(system)[-1]
    limit = problem.cluster.limit_gib
    sized: list[tuple[float, int, Candidate]] = []
    placeable = False
    for index, candidate in enumerate(candidates):
        try:
            layout = system.layout(problem, candidate)
        except NotApplicable:
            continue
        placeable = True
        leanest = replace(layout, options={**layout.options, **most})
        needed = lower_bound_gib(leanest, problem.model, problem.workload)
        if needed <= limit:
            sized.append((needed, index, {**candidate, **most}))
    for _, _, candidate in sorted(sized, key=lambda entry: entry[:2])[:LEANEST]:
        try:
            layout = system.layout(problem, candidate)
            plan = Plan(layout, system.program(problem, layout))
        except NotApplicable:
            continue
        if peak_gib(layout, plan.program, problem.model, problem.workload) > limit:
            continue
        if peak is None or peak(plan) <= limit:
            return True
    return False if placeable else None
