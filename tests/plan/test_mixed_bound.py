"""Mixes of both forms: the bounds as a linear program, and why one form is best where no GPU works for both."""

from __future__ import annotations

from itertools import product

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.cost.memory import Load, layer_bytes
from disagmoe.cost.model import CostModel
from disagmoe.cost.recompute import Recompute
from disagmoe.plan.mixed_bound import mixed_bound
from disagmoe.plan.resource_bound import resource_bound
from disagmoe.specs import load_model
from tests.problems import problem

TRANSPORTS = [("nccl", "none"), ("deepep", "node"), ("m2n_rdma", "node")]
MODELS = ["deepseek_moe", "gpt_oss", "qwen3"]


def costs_of(model: str) -> CostModel:
    return problem(model, "h800_128", seq=8192, global_batch=1024).costs


@pytest.mark.parametrize(("transport", "merge"), TRANSPORTS)
@pytest.mark.parametrize("model", MODELS)
def test_more_freedom_is_never_slower(model: str, transport: str, merge: str) -> None:
    costs = costs_of(model)
    found = mixed_bound(costs, transport, merge, 16)
    assert found.apart is not None
    assert found.pure_s == resource_bound(costs, transport, merge, 16).step_s
    assert found.shared_s <= found.separate_s * (1 + 1e-9)
    assert found.separate_s <= found.pure_s * (1 + 1e-9)
    assert 0 <= found.shared_apart <= found.layers
    # What is said in docs/disagmoe-plus.md rests on this: little is to be had from a mix.
    assert found.pure_s / found.shared_s < 1.03
    assert found.pure_s / found.separate_s < 1.005


@pytest.mark.parametrize("model", MODELS)
def test_pooled_resources_are_a_linear_program(model: str) -> None:
    """Any share of the layers apart: together n NICs and v NVLink a layer, apart both as much as the bound has."""
    costs = costs_of(model)
    found = mixed_bound(costs, "deepep", "node", 16)
    assert found.apart is not None
    moe = sum(costs.model.is_moe(layer) for layer in range(costs.model.layers))
    fan_out = found.apart.nvlink_s * found.apart.expert_gpus / 128
    share = pulp.LpVariable("share", 0.0, 1.0)
    exchange, step = pulp.LpVariable("exchange"), pulp.LpVariable("step")
    task = pulp.LpProblem("mix", pulp.LpMinimize)
    task += step
    task += exchange >= found.together.nic_s * (1 - share) + found.apart.nic_s * share
    task += exchange >= found.together.nvlink_s * (1 - share) + fan_out * share
    factors = costs.contention("deepep")
    gain = 1 / factors.compute + 1 / factors.comm - 1
    compute = found.together.compute_s
    task += step >= compute + exchange - gain * factors.compute * compute
    task += step >= compute + exchange - gain * factors.comm * exchange
    task.solve(pulp.PULP_CBC_CMD(msg=False))
    one_layer = found.pure_s / moe
    assert found.shared_s == pytest.approx(pulp.value(step), abs=0.2 * one_layer)


levels = st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.1, 3.0)), min_size=1, max_size=3)


@settings(max_examples=40)
@given(levels, levels)
def test_with_memory_too_one_form_is_best_where_no_gpu_works_for_both(
    together: list[tuple[float, float]], apart: list[tuple[float, float]]
) -> None:
    """(seconds, memory) of the layers by level of recompute: shares of the cluster at a step of 1 and a limit of 1."""

    def needed(*forms: list[tuple[float, float]]) -> float:
        task = pulp.LpProblem("shares", pulp.LpMinimize)
        gpus = [pulp.LpVariable(f"gpus{i}", 0.0) for i in range(len(forms))]
        parts = [[pulp.LpVariable(f"part{i}_{j}", 0.0) for j in range(len(form))] for i, form in enumerate(forms)]
        task += pulp.lpSum(gpus)
        task += pulp.lpSum(part for form in parts for part in form) == 1
        for own, form, shares in zip(gpus, forms, parts, strict=True):
            for resource in range(2):
                task += pulp.lpSum(level[resource] * x for level, x in zip(form, shares, strict=True)) <= own
        task.solve(pulp.PULP_CBC_CMD(msg=False))
        return float(pulp.value(task.objective))

    assert needed(together, apart) == pytest.approx(min(needed(together), needed(apart)), rel=1e-6)


POLICIES = [
    Recompute(attention, ffn, tokens)
    for attention, ffn, tokens in product(
        ("none", "selective", "full"), ("none", "selective", "full"), ("resend", "keep")
    )
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_layer_apart_keeps_no_less(name: str, policy: Recompute) -> None:
    model = load_model(name)
    load = Load(tokens=4096, rows=4096.0 * model.top_k, home_tokens=4096, sent=8192, received=12288, experts=4)
    together, apart = (
        layer_bytes(model, load, moe=True, disaggregated=away, recompute=policy) for away in (False, True)
    )
    for part in ("saved", "kept"):
        assert getattr(apart.attention, part) >= getattr(together.attention, part)
        assert getattr(apart.ffn, part) >= getattr(together.ffn, part)
