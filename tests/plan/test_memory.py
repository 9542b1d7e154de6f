"""Static memory, against counts written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baselines import get_system
from baselines.megatron import Megatron1F1B
from disagmoe.cost.recompute import Recompute
from disagmoe.plan.memory import (
    GEMM_WORKSPACE_BYTES,
    GIB,
    RECIPES,
    holdings,
    peak_static_gib,
    static_memory,
    workspace_bytes,
)
from disagmoe.plan.memory_load import worker_bytes
from disagmoe.plan.memory_report import lower_bound_gib, peak_gib
from disagmoe.plan.plan import Layout
from disagmoe.specs import parameters
from disagmoe.system import NotApplicable, Problem, recompute_levels, variants_of
from disagmoe.systems import DisagMoE
from tests.problems import problem

QWEN_30B_ATTENTION_SIDE = 1_541_093_376
QWEN_30B_EXPERTS = 28_991_029_248
"""Published-config arithmetic of Qwen3-30B-A3B: attention side (with embeddings and head) and routed experts."""


def test_colocated_one_stage_holds_the_dense_model_and_its_share_of_experts() -> None:
    pr = problem("qwen3_30b", ep=16)
    layout = Megatron1F1B(pp=1).layout(pr, {"pp": 1, "virtual": 1, "micro_batch": 1, "group": 1, "ep": 16})
    (held,) = holdings(layout, pr.model)
    assert held.dense == QWEN_30B_ATTENTION_SIDE
    assert held.expert == QWEN_30B_EXPERTS / 16
    assert (held.dense_ranks, held.expert_ranks) == (32, 2)
    (memory,) = static_memory(layout, pr.model)
    assert memory.weights_gib == pytest.approx((held.dense + held.expert) * 2 / GIB)
    assert memory.gradients_gib == pytest.approx((held.dense + held.expert) * 4 / GIB)
    assert memory.optimizer_gib == pytest.approx((held.dense / 32 + held.expert / 2) * 12 / GIB)


def test_stages_together_hold_the_model_once() -> None:
    pr = problem("qwen3_30b", ep=8)
    layout = Megatron1F1B().layout(pr, {"pp": 4, "virtual": 2, "micro_batch": 1, "group": 4, "ep": 8})
    held = holdings(layout, pr.model)
    assert sum(h.dense for h in held) == QWEN_30B_ATTENTION_SIDE
    assert sum(h.expert for h in held) * 8 == QWEN_30B_EXPERTS


def test_disaggregated_sides_add_up_to_the_whole_model() -> None:
    pr = problem("qwen3_30b", ep=8)
    candidate = {"nics": "halves", "p": 2, "dp": 1, "m": 8, "n": 8, "micro_batch": 1, "order": "megatron", "group": 4}
    layout = DisagMoE().layout(pr, candidate)
    held = holdings(layout, pr.model)
    total = sum(h.dense for h in held) + 8 * sum(h.expert for h in held)
    assert total == parameters(pr.model).total
    # Only the F-group of the last layer carries anything dense (the head, with the final norm).
    assert [h.dense > 0 for h in held] == [True, True, False, True]
    assert [h.expert > 0 for h in held] == [False, False, True, True]


def test_uneven_experts_are_charged_to_the_fullest_rank() -> None:
    pr = problem("tiny", ep=3)
    candidate = {"nics": "halves", "p": 1, "dp": 1, "m": 2, "n": 3, "micro_batch": 1, "order": "megatron", "group": 2}
    held = holdings(DisagMoE().layout(pr, candidate), pr.model)
    per_expert = 3 * 64 * 96  # gate, up and down of hidden 64, width 96
    assert held[1].expert == 3 * per_expert * 4  # 8 experts on 3 ranks: 3, 3, 2; four layers


def test_replicas_shard_the_optimizer_but_not_the_weights() -> None:
    pr = problem("tiny", ep=4)
    base = {"nics": "halves", "p": 1, "m": 4, "n": 4, "micro_batch": 1, "order": "megatron", "group": 2}
    one = static_memory(DisagMoE().layout(pr, {**base, "dp": 1}), pr.model)
    two = static_memory(DisagMoE().layout(pr, {**base, "dp": 2}), pr.model)
    assert two[1].weights_gib == one[1].weights_gib
    # Experts alone are on the F-group beside the head, and both are sharded twice as finely.
    assert two[1].optimizer_gib == pytest.approx(one[1].optimizer_gib / 2)
    assert peak_static_gib(DisagMoE().layout(pr, {**base, "dp": 2}), pr.model) < max(m.total_gib for m in one)


def test_tensor_parallel_ranks_hold_the_model_with_norms_and_router_repeated() -> None:
    pr = problem("qwen3_30b", ep=8)
    layout = Megatron1F1B(pp=1).layout(pr, {"pp": 1, "virtual": 1, "micro_batch": 1, "group": 1, "ep": 8})
    whole, split = holdings(layout, pr.model)[0], holdings(replace(layout, options={"tp": 4}), pr.model)[0]
    repeated = 48 * (2 * 2048 + 2048 * 128 + 2 * 128)  # both norms, router, head norms
    # The last norm is counted with the output matrix and split like it.
    assert 4 * split.dense == whole.dense + 3 * repeated
    assert split.expert == whole.expert
    assert (whole.dense_ranks, split.dense_ranks, split.expert_ranks) == (32, 8, 4)


def test_workspace_holds_one_dummy_gradient_per_shape() -> None:
    pr = problem("gpt_oss_20b", ep=8)
    layout = Megatron1F1B(pp=1).layout(pr, {"pp": 1, "virtual": 1, "micro_batch": 1, "group": 1, "ep": 8})
    h, width = 2880, 2880
    shapes = h * (64 + 2 * 8) * 64 + 64 * 64 * h + 2 * width * h + h * width
    assert workspace_bytes(layout, pr.model) == [2 * shapes + GEMM_WORKSPACE_BYTES]
    own = replace(layout, options={**layout.options, "static_buffer_bytes": 1000})
    assert workspace_bytes(own, pr.model) == [2 * shapes + GEMM_WORKSPACE_BYTES + 1000]


def test_precision_aware_states_take_half() -> None:
    pr = problem("qwen3_30b", ep=16)
    layout = Megatron1F1B(pp=1).layout(pr, {"pp": 1, "virtual": 1, "micro_batch": 1, "group": 1, "ep": 16})
    full = static_memory(layout, pr.model)[0]
    light = static_memory(layout, pr.model, recipe=RECIPES["precision_aware"])[0]
    # Moments of 2 + 2 bytes and 16 bits of the master weight, against 4 + 4 + 4.
    assert light.optimizer_gib == pytest.approx(full.optimizer_gib / 2)
    assert (light.weights_gib, light.gradients_gib) == (full.weights_gib, full.gradients_gib)
    assert sum(full.parts.values()) == full.total_gib


def slow_bound_gib(layout: Layout, pr: Problem) -> float:
    """The bound worker by worker and layer by layer."""
    policy, model = Recompute.of(layout.options), pr.model
    placement, most = layout.placement, 0.0
    of_worker = worker_bytes(layout, model, pr.workload, policy, frames=False)
    for index, (fixed, of) in enumerate(zip(static_memory(layout, model), of_worker, strict=True)):
        kept, least = 0.0, float("inf")
        counts = {False: [0, 0], True: [0, 0]}
        for layer in range(model.layers):
            moe, whole, holds = model.is_moe(layer), 0.0, False
            sides = (
                (placement.attn[layer], of.layers[moe].attention, policy.attention),
                (placement.ffn[layer], of.layers[moe].ffn, policy.ffn),
            )
            for side, (holder, op, mode) in enumerate(sides):
                if index in placement.holders(holder):
                    each = op.kept if mode == "full" else op.saved
                    counts[moe][side] += 1
                    kept, whole, holds = kept + each, whole + each, True
            least = min(least, whole) if holds else least
        once = sum(max(pair) for pair in counts.values())
        more = float(layout.options.get(f"in_flight_{placement.workers[index].name}", once)) - once
        kept += more * least if more > 0 and once else 0.0
        most = max(most, fixed.total_gib + kept / GIB)
    return most


@pytest.mark.parametrize("name", ["megatron_1f1b", "comet", "dualpipe", "disagmoe", "disagmoe_plus"])
@pytest.mark.parametrize("model", ["deepseek_moe", "gpt_oss_20b"])
def test_the_bound_is_that_of_the_slow_rule(name: str, model: str) -> None:
    system = variants_of(get_system(name), "uniform")[0].system
    pr = problem(model, ep=8, global_batch=256, transport="m2n_rdma", merge="node")
    checked = 0
    for candidate in list(system.candidates(pr))[::11]:
        for extra in recompute_levels(system):
            try:
                layout = system.layout(pr, {**candidate, **extra})
            except NotApplicable:
                continue
            assert lower_bound_gib(layout, pr.model, pr.workload) == pytest.approx(
                slow_bound_gib(layout, pr), rel=1e-12
            )
            checked += 1
    assert checked > 2


@pytest.mark.parametrize("name", ["megatron_1f1b", "megatron_1f1b_overlap", "tutel", "disagmoe"])
def test_no_program_needs_less_than_the_bound(name: str) -> None:
    system = get_system(name)
    pr = problem("gpt_oss_20b", ep=8, global_batch=128, transport="m2n_rdma", merge="node")
    checked = 0
    for candidate in list(system.candidates(pr))[::7]:
        for extra in recompute_levels(system):
            try:
                layout = system.layout(pr, {**candidate, **extra})
                program = system.program(pr, layout)
            except NotApplicable:
                continue
            bound = lower_bound_gib(layout, pr.model, pr.workload)
            assert bound <= peak_gib(layout, program, pr.model, pr.workload) * (1 + 1e-12), (candidate, extra)
            checked += 1
    assert checked > 10
