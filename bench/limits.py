"""What binds a plan: how its step time follows each resource.

Decides by changing one thing and timing the same plan again, not by looking at
who is busy: a busy worker may have slack, and an idle one may be waited for. A
share of 80 % for compute A says that 1 % faster attention GPUs shorten the step
by 0.8 %. Filling and draining is what a step twice as long would not repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from disagmoe.cost.model import CostModel
from disagmoe.ops import COMPUTE_KINDS
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.pricing import price
from disagmoe.simulator import simulate
from disagmoe.system import Candidate, NotApplicable, Problem, System

FASTER = 1.1
"""Speed of the resource in question in the second run."""
RESOURCES = ("compute A", "compute F", "NIC A", "NIC F")
BUBBLE = "bubble"


@dataclass(frozen=True)
class Limits:
    """Shares of the step, 0 to 1: how it follows each of RESOURCES, and filling and draining under "bubble".

    They need not add up to 1: filling is made of the others, and two resources may
    both be waited for.
    """

    shares: Mapping[str, float]

    @property
    def binds(self) -> str:
        """The largest share; the first of equals."""
        return max(self.shares, key=lambda name: self.shares[name])


def limits(system: System, problem: Problem, candidate: Candidate, plan: Plan) -> Limits:
    """Shares of a plan of a disaggregated system."""
    step_s = _step_s(plan, problem.costs)
    shares = {}
    for name in RESOURCES:
        what, pool = name.split()
        faster_s = _faster_s(plan, problem.costs, pool) if what == "compute" else _wider_s(plan, problem.costs, pool)
        shares[name] = max(0.0, (1.0 - faster_s / step_s) / (1.0 - 1.0 / FASTER))
    shares[BUBBLE] = _filling(system, problem, candidate, step_s)
    return Limits(shares)


def _step_s(plan: Plan, costs: CostModel) -> float:
    return simulate(plan.program, price(plan.layout, plan.program, costs)).step_s


def _faster_s(plan: Plan, costs: CostModel, pool: str) -> float:
    """The step with faster compute in one pool."""
    pricing = price(plan.layout, plan.program, costs)
    members = np.array([w.pool == pool for w in plan.layout.placement.workers])
    kinds = np.isin(plan.program.kind, [int(kind) for kind in COMPUTE_KINDS])
    factor = np.where(members[plan.program.worker] & kinds, 1.0 / FASTER, 1.0)
    return simulate(plan.program, replace(pricing, duration_s=pricing.duration_s * factor)).step_s


def _wider_s(plan: Plan, costs: CostModel, pool: str) -> float:
    """The step with wider NICs in one pool."""
    placement = plan.layout.placement
    workers = tuple(replace(w, nic_gbs=w.nic_gbs * FASTER) if w.pool == pool else w for w in placement.workers)
    layout: Layout = replace(plan.layout, placement=replace(placement, workers=workers))
    return _step_s(Plan(layout, plan.program), costs)


def _filling(system: System, problem: Problem, candidate: Candidate, step_s: float) -> float:
    """Share of the step that twice the batch would not do twice; 0 where such a step cannot be planned."""
    work = replace(problem.workload, global_batch=2 * problem.workload.global_batch)
    costs = CostModel(problem.model, problem.cluster, problem.costs.calibration, work)
    twice = replace(problem, workload=work, costs=costs)
    try:
        layout = system.layout(twice, candidate)
        plan = Plan(layout, system.program(twice, layout))
    except NotApplicable:
        return 0.0
    return max(0.0, 2.0 - _step_s(plan, costs) / step_s)
