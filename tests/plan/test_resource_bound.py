"""The least step of a workload: closed forms, and that no plan of any system beats it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baselines import get_system, system_names
from disagmoe.allocator import tune
from disagmoe.cost.model import CostModel
from disagmoe.ops import Phase
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.pricing import price
from disagmoe.plan.resource_bound import Resources, resource_bound, side_by_side
from disagmoe.simulator import simulate
from disagmoe.system import Problem, variants_of
from tests.problems import problem, small_cluster
from tests.systems.test_random_programs import plans


def bound_of(costs: CostModel, layout: Layout) -> Resources:
    return resource_bound(costs, layout.transport, layout.merge, layout.ep, fused=layout.tiles is not None)


def step_s(pr: Problem, plan: Plan) -> float:
    return simulate(plan.program, price(plan.layout, plan.program, pr.costs)).step_s


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_no_plan_is_faster_than_its_resources(case: tuple[Problem, Plan]) -> None:
    pr, plan = case
    if not plan.layout.tokens_dropped:
        assert bound_of(pr.costs, plan.layout).step_s <= step_s(pr, plan) * (1 + 1e-9)


@pytest.mark.parametrize("name", system_names())
@pytest.mark.parametrize(("transport", "merge"), [("nccl", "none"), ("deepep", "node"), ("m2n_rdma", "node")])
def test_no_tuned_plan_is_faster_than_its_resources(name: str, transport: str, merge: str) -> None:
    pr = problem("deepseek_moe", small_cluster(4), global_batch=256, transport=transport, merge=merge, ep=16, layers=6)
    for form in variants_of(get_system(name), "uniform"):
        found = tune(form.system, pr, lambda plan: step_s(pr, plan), budget=6)
        if found.plan is not None:
            assert bound_of(pr.costs, found.plan.layout).step_s <= found.step_s


@given(st.floats(0.01, 10.0), st.floats(0.0, 10.0), st.floats(1.0, 2.0), st.floats(1.0, 2.0), st.integers(0, 20))
def test_overlap_of_any_length_takes_as_long_at_least(
    compute: float, exchange: float, slows: float, slowed: float, tenths: int
) -> None:
    overlap = tenths / 20 * min(slows * compute, slowed * exchange)
    taken = overlap + (compute - overlap / slows) + (exchange - overlap / slowed)
    assert side_by_side(compute, exchange, slows, slowed) <= taken * (1 + 1e-12)


def test_without_contention_the_longer_of_both_remains() -> None:
    assert side_by_side(3.0, 2.0, 1.0, 1.0) == pytest.approx(3.0)
    assert side_by_side(2.0, 3.0, 1.0, 1.0) == pytest.approx(3.0)


def test_together_by_hand() -> None:
    """EP 16 over two nodes, merged per node: half of the node copies cross NICs, every rank's copy fans out."""
    pr = problem("qwen3", "h800_128", global_batch=2048, transport="m2n_rdma", merge="node")
    found = resource_bound(pr.costs, "m2n_rdma", "node", 16)
    per_gpu = 2048 * 4096 / 128
    row = 4096 * 2.0
    ranks = 16 * (1 - _none_of(8))
    nodes = 2 * (1 - _none_of(64))
    assert found.form == "together"
    assert found.nic_s == pytest.approx(per_gpu * 94 * 4 * row * nodes / 2 / pr.costs.network.nic(50.0))
    assert found.nvlink_s == pytest.approx(per_gpu * 94 * 4 * row * ranks / pr.costs.network.nvlink)
    # No contention on this transport, and compute is what is needed longest.
    assert found.step_s == pytest.approx(found.compute_s)
    assert found.binds == "compute"
    attention = sum(pr.costs.attention(0, phase, 2048.0, packed=0.0) for phase in (Phase.F, Phase.B))
    assert found.compute_s > 94 * attention / 128


def _none_of(block: int) -> float:
    """Probability that eight of 128 experts are all outside a block."""
    missed = 1.0
    for drawn in range(8):
        missed *= (128 - block - drawn) / (128 - drawn)
    return missed


def test_merging_and_faster_links_never_raise_the_bound() -> None:
    pr = problem("qwen3_30b", small_cluster(4), global_batch=256)
    whole = [resource_bound(pr.costs, "deepep", merge, 16).step_s for merge in ("none", "rank", "node")]
    assert whole == sorted(whole, reverse=True)
    fewer = problem("qwen3_30b", small_cluster(4, nics=4), global_batch=256)
    assert resource_bound(fewer.costs, "deepep", "none", 16).step_s >= whole[0]


def test_twice_the_batch_takes_twice_as_long() -> None:
    """But for the optimizer and the weights' own traffic."""
    once, twice = (
        resource_bound(problem("qwen3_30b", small_cluster(4), global_batch=n).costs, "deepep", "node", 16).step_s
        for n in (512, 1024)
    )
    assert 1.9 < twice / once <= 2.0


def test_experts_that_fit_nowhere_apart_leave_the_other_form() -> None:
    pr = problem("qwen3", "h800_128", global_batch=256, transport="deepep", merge="node")
    small = replace(pr.cluster, memory_gib=10.0)
    costs = CostModel(pr.model, small, pr.costs.calibration, pr.workload)
    assert resource_bound(costs, "deepep", "node", 16).form == "together"
