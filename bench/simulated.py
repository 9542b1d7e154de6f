"""A plan's step and memory by simulation: what the tuner is handed, and what a row reports.

Memory is integrated over the simulated time, since receives that wait for their
turn hold buffers that the order of the compute streams alone does not show.
"""

from __future__ import annotations

from disagmoe.plan.memory_report import MemoryReport, memory_report, peak_gib
from disagmoe.plan.plan import Plan
from disagmoe.plan.pricing import Pricing, price
from disagmoe.simulator import simulate
from disagmoe.system import Problem
from disagmoe.timeline.timeline import Timeline


class Simulated:
    """Simulates plans of one problem; keeps the last one, so that asking for its memory costs no second run."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._last: tuple[Plan, Pricing, Timeline] | None = None

    def run(self, plan: Plan) -> tuple[Pricing, Timeline]:
        """Costs and timeline of a plan."""
        if self._last is None or self._last[0] is not plan:
            pricing = price(plan.layout, plan.program, self.problem.costs)
            self._last = (plan, pricing, simulate(plan.program, pricing))
        return self._last[1:]

    def step(self, plan: Plan) -> float:
        """Seconds of one step."""
        return self.run(plan)[1].step_s

    def memory(self, plan: Plan) -> MemoryReport:
        """What one GPU of every worker holds over the simulated step."""
        timeline = self.run(plan)[1]
        model, workload = self.problem.model, self.problem.workload
        return memory_report(plan.layout, plan.program, model, workload, start_s=timeline.start_s, end_s=timeline.end_s)

    def peak(self, plan: Plan) -> float:
        """GiB of the fullest GPU over the simulated step."""
        timeline = self.run(plan)[1]
        model, workload = self.problem.model, self.problem.workload
        return peak_gib(plan.layout, plan.program, model, workload, start_s=timeline.start_s, end_s=timeline.end_s)
