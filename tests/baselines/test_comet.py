"""Comet: what it refuses, what it says of itself, closed forms of whole plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.comet import Comet
from baselines.megatron import Megatron1F1B
from disagmoe.allocator import tune
from disagmoe.ops import Kind, Phase
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.pricing import LayoutCosts, price
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.specs import load_model
from disagmoe.system import Problem, variants_of
from tests.baselines.test_tutel import undisturbed
from tests.problems import problem, small_cluster

PIPELINE = {"ep": 16, "pp": 2, "virtual": 2, "micro_batch": 1, "group": 2}
ONE_STAGE = {"ep": 16, "pp": 1, "virtual": 1, "micro_batch": 1, "group": 1}


def step_s(system: Comet, pr: Problem, layout: Layout) -> float:
    program = system.program(pr, layout)
    verify(program)
    return simulate(program, price(layout, program, pr.costs)).step_s


def refused(system: Comet, pr: Problem) -> str:
    tuned = tune(system, pr, lambda plan: 1.0)
    assert tuned.status == "not_applicable"
    return tuned.reason


def test_each_dispatch_type_is_a_row() -> None:
    assert [form.label for form in variants_of(Comet(), "native")] == ["all-to-all", "open"]
    assert [form.label for form in variants_of(Comet(variant="open"), "uniform")] == ["open"]


@pytest.mark.parametrize(("variant", "dispatch"), [("all-to-all", "all-to-all dispatch"), ("open", "all-gather")])
def test_a_row_says_that_the_schedule_is_ours_and_what_it_moves(variant: str, dispatch: str) -> None:
    pr = problem("qwen3_30b", ep=8)
    layout = Comet(variant=variant).layout(pr, {**PIPELINE, "ep": 8})
    text = str(layout.details["schedule"])
    assert text.startswith("Comet-style: re-implemented schedule") and dispatch in text
    assert layout.variant == variant


def test_open_kernels_stay_in_one_node() -> None:
    reason = refused(Comet(variant="open"), problem("qwen3_30b", ep=16))
    assert reason == (
        "the open Comet kernels write through NVLink peer memory, one node only: "
        "EP 16 does not fit into a node of 8 GPUs"
    )
    assert Comet(variant="open").candidates(problem("qwen3_30b", ep=8))
    # Where the size of the group is free, those of one node are left.
    free = Comet(variant="open").candidates(problem("qwen3_30b", ep=None))
    assert {c["ep"] for c in free} == {8}


def test_open_kernels_know_some_shapes_only() -> None:
    assert refused(Comet(variant="open"), problem("mixtral_8x7b", ep=8)) == (
        "the open Comet kernels are registered for top-k 4, 5, 6, 8, 10, not 2"
    )
    assert refused(Comet(variant="open"), problem("gpt_oss_20b", ep=8)) == (
        "the open Comet kernels are registered for column blocks of "
        "128, 256, 384, 512, 640, 768, 1024, 1280, not 2880 / 8 = 360"
    )
    pr = problem("qwen3_30b", ep=8)
    many = replace(pr, model=replace(load_model("qwen3_30b"), experts=512, top_k=10))
    assert "wrong values from 512 experts on" in refused(Comet(variant="open"), many)


def test_the_all_to_all_variant_runs_where_the_open_one_does_not() -> None:
    """top-8 of 128 and top-10 of 512, over two nodes."""
    for dimensions in ({}, {"experts": 512, "top_k": 10}):
        base = problem("qwen3_30b", global_batch=32)
        model = replace(base.model, **dimensions)  # type: ignore[arg-type]
        costs = type(base.costs)(model, base.cluster, base.costs.calibration, base.workload)
        pr = replace(base, model=model, costs=costs)
        assert step_s(Comet(), pr, Comet().layout(pr, PIPELINE)) > 0.0


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="comet variant=ideal: allowed are all-to-all, open"):
        Comet(variant="ideal")
    with pytest.raises(ValueError, match="comet comm_sms=0: at least 1 thread block must send"):
        Comet(comm_sms=0)
    assert refused(Comet(comm_sms=132), problem("tiny")) == (
        "132 sending thread blocks leave none of the 132 SMs for the GEMM"
    )


@pytest.mark.parametrize(("variant", "ep"), [("all-to-all", 16), ("all-to-all", 8), ("open", 8)])
def test_closed_form_of_whole_plans(variant: str, ep: int) -> None:
    """T0 = max over j of arrive_j + G1 (1 - cum_j), T1 = act + max(G2' + X / b, X + G2' / b), W behind it."""
    pr = undisturbed(problem("qwen3_30b", global_batch=64, ep=ep))
    system = Comet(variant=variant)
    layout = system.layout(pr, {**ONE_STAGE, "ep": ep})
    costs, chain = LayoutCosts(layout, pr.costs), 0.0
    rates, tokens, token_bytes = pr.costs.calibration.rates, 4096, 4096 * 2048 * 2
    nvlink, nic = 200e9 * rates.nvlink_efficiency, 50e9 * rates.nic_efficiency
    nodes = ep // 8
    alpha = (rates.nvlink_alpha_us if nodes == 1 else rates.nic_alpha_us) * 1e-6
    near_alpha = rates.nvlink_alpha_us * 1e-6
    distinct = pr.costs.distinct(ep)
    if variant == "open":
        near_s, back_s = 7 * token_bytes / nvlink, distinct * 7 / 8 * token_bytes / nvlink
        nic_s = 0.0
    else:
        near_s, nic_s = 8 * 7 / ep * token_bytes / nvlink, 8 * (nodes - 1) / nodes * token_bytes / nic
        back_s = max(near_s, nic_s)
    if nodes == 1:
        sources, arrive = [1] * 8, [0.0] + [near_alpha + near_s * j / 7 for j in range(1, 8)]
    else:
        sources = [1, 3, 2, 2, 2, 2, 2, 2]
        arrive = [
            0.0,
            *(near_alpha + near_s * j / 7 for j in (3, 5, 7)),
            *(alpha + nic_s * j / 4 for j in (1, 2, 3, 4)),
        ]
        arrive = list(np.maximum.accumulate(arrive))
    for phase, whole in ((Phase.F, Phase.F), (Phase.I, Phase.B)):
        up, activation, down = pr.costs.expert_halves(phase, 8.0 * tokens, 128 / ep)
        returned = 1.0 if layout.tiles is not None and layout.tiles.gather else 8.0  # a reduce-scatter returns the sum
        home_s = pr.costs.ffn(0, phase, home_tokens=tokens, rows=0.0, local_experts=0.0, returned=returned)
        home = home_s / (up + down)
        sms = costs.tiles(phase).comm_sms
        g1, g2 = up * (1 + home), down * (132 / (132 - sms) + home)
        before = np.concatenate([[0], np.cumsum(sources)[:-1]]) / ep
        t0 = max(a + g1 * (1 - cum) for a, cum in zip(arrive, before, strict=True))
        block, send = g2 / 8, back_s / 8
        t1 = activation + max(g2 + send, 8 * send + block) + alpha
        weights = 0.0
        if phase is Phase.I:
            weights = pr.costs.ffn(0, Phase.W, home_tokens=tokens, rows=8.0 * tokens, local_experts=128 / ep)
        layer = costs.op(Kind.ATTN, whole, 0).seconds + max(t0 + t1, t0 + activation + g2 + weights)
        chain += 48 * layer + sum(costs.op(kind, whole, -1).seconds for kind in (Kind.EMBED, Kind.HEAD))
    program = system.program(pr, layout)
    pricing = price(layout, program, pr.costs)
    reduced = (program.kind == int(Kind.GRAD_SYNC)) & (program.phase == int(Phase.B))
    pricing = replace(pricing, duration_s=np.where(reduced, 0.0, pricing.duration_s))
    update = sum(costs.worker_op(*key, -1, 0).seconds for key in ((Kind.OPTIM, Phase.F), (Kind.GRAD_SYNC, Phase.F)))
    step = simulate(program, pricing).step_s
    assert step == pytest.approx(layout.batch.microbatches * chain + update, rel=1e-9)
    assert lower_bound_s(layout, pr.costs) == pytest.approx(step, rel=1e-9)


def test_profiled_blocks_beat_fixed_ones() -> None:
    pr = undisturbed(problem("qwen3_30b", global_batch=32))
    best = step_s(Comet(), pr, Comet().layout(pr, PIPELINE))
    for fixed in (4, 28, 64):
        system = Comet(comm_sms=fixed)
        layout = system.layout(pr, PIPELINE)
        assert layout.details["comm_sms_forward"] == layout.details["comm_sms_backward"] == fixed
        assert best <= step_s(system, pr, layout) * (1 + 1e-12)


def test_its_gemms_pay_for_the_sms_once() -> None:
    """Tiles have the SMs of their sending blocks taken out; the transport's share is not charged on top."""
    pr = problem("qwen3_30b", global_batch=32)
    layout = Comet().layout(pr, PIPELINE)
    program = Comet().program(pr, layout)
    pricing = price(layout, program, pr.costs)
    exchange = np.isin(program.kind, (Kind.DISPATCH, Kind.COMBINE))
    assert (pricing.slows_compute[exchange] == 1.0).all()
    assert (pricing.slowed_by_compute[exchange] == pr.costs.contention("nccl").comm).all()


def test_bytes_are_those_of_the_transport() -> None:
    """However finely it is cut, an all-to-all moves what the reference moves; the open kernels use no NIC."""
    pr = problem("qwen3_30b", global_batch=32, skew=1.3)
    sent = []
    for system in (Comet(), Megatron1F1B()):
        layout = system.layout(pr, PIPELINE)
        program = system.program(pr, layout)
        exchange = np.isin(program.kind, (Kind.DISPATCH, Kind.COMBINE))
        sent.append(price(layout, program, pr.costs).wire_bytes[exchange].sum())
    assert sent[0] == pytest.approx(sent[1])
    one_node = problem("qwen3_30b", global_batch=32, ep=8)
    layout = Comet(variant="open").layout(one_node, {**PIPELINE, "ep": 8})
    costs = LayoutCosts(layout, one_node.costs)
    assert all(t.nic_bytes == 0.0 for t in (*costs.tiles(Phase.F).first, *costs.tiles(Phase.F).second))


def test_coarse_tiles_rank_pipelines_and_are_never_faster() -> None:
    pr = problem("qwen3_30b", global_batch=64)
    first = next(iter(Comet().candidates(pr)))
    assert first["tiles"] == "coarse"
    (fine,) = Comet().refinements(pr, first)
    for depth, virtual in ((1, 1), (2, 2), (2, 4)):
        pipeline = {"pp": depth, "virtual": virtual, "group": depth}
        rough, whole = (Comet().layout(pr, {**c, **pipeline}) for c in (first, fine))
        assert len(Comet().program(pr, rough)) < len(Comet().program(pr, whole)) / 2
        assert step_s(Comet(), pr, whole) < step_s(Comet(), pr, rough)


def test_a_plan_of_94_layers_stays_small() -> None:
    pr = problem("qwen3", "h800_128", seq=32768, global_batch=256)
    layout = Comet().layout(pr, {"ep": 16, "pp": 4, "virtual": 12, "micro_batch": 1, "group": 4})
    per_layer = 2 * (8 + 16 + 8) + 3
    assert len(Comet().program(pr, layout)) < 94 * layout.batch.microbatches * (per_layer + 3) + 200


def test_symmetric_buffer_is_reported_to_the_memory_model() -> None:
    """Rows a rank may receive at once, bf16: every token of the group when gathered, its own copies' number else."""
    pr = problem("qwen3_30b", ep=8)
    gathered = Comet(variant="open").layout(pr, {**PIPELINE, "ep": 8}).options["static_buffer_bytes"]
    assert gathered == 2 * 8 * 4096 * 2048
    assert Comet().layout(pr, {**PIPELINE, "ep": 8, "micro_batch": 2}).options["static_buffer_bytes"] == (
        2 * 8 * 2 * 4096 * 2048
    )


@given(
    st.sampled_from(["all-to-all", "open"]),
    st.sampled_from([1, 2, 4]),
    st.floats(1.0, 2.0),
    st.sampled_from([("nccl", "none"), ("deepep", "node"), ("deepep", "rank"), ("m2n_rdma", "node")]),
    st.sampled_from(["coarse", "all"]),
)
@settings(max_examples=25, deadline=None)
def test_random_plans_verify_and_keep_their_bound(
    variant: str, depth: int, skew: float, how: tuple[str, str], tiles: str
) -> None:
    pr = problem("deepseek_moe_16b", ep=8, skew=skew, transport=how[0], merge=how[1])
    system = Comet(variant=variant)
    candidate = {"ep": 8, "pp": depth, "virtual": 2 if depth > 1 else 1, "micro_batch": 1, "group": depth}
    layout = system.layout(pr, {**candidate, "tiles": tiles})
    plan = Plan(layout, system.program(pr, layout))
    verify(plan)
    step = simulate(plan.program, price(layout, plan.program, pr.costs)).step_s
    assert lower_bound_s(layout, pr.costs) <= step * (1 + 1e-12)


@pytest.mark.parametrize("tokens", ["resend", "keep"])
def test_recompute_costs_at_most_what_it_repeats(tokens: str) -> None:
    """One stage, no contention: attention and experts again, with an exchange of their own where tokens are re-sent.

    With kept tokens the repeat is compute alone, and the backward's exchange comes after it.
    """
    pr = undisturbed(problem("qwen3_30b", global_batch=64))
    again = {**ONE_STAGE, "recompute": "full", "recompute_tokens": tokens}
    plain, redone = (Comet().layout(pr, candidate) for candidate in (ONE_STAGE, again))
    steps = [step_s(Comet(), pr, layout) for layout in (plain, redone)]
    costs = LayoutCosts(plain, pr.costs)
    attention = costs.op(Kind.ATTN, Phase.F, 0).seconds
    experts = pr.costs.ffn(0, Phase.F, home_tokens=4096, rows=8 * 4096, local_experts=8)
    most = attention + (costs.tiles(Phase.F).seconds if tokens == "resend" else experts)
    added = (steps[1] - steps[0]) / (48 * plain.batch.microbatches)
    assert 0.0 < added <= most
    if tokens == "keep":  # the step may hide more of the gradients' reduction, which shares the link with the arrivals
        arriving = sum(t.seconds for t in costs.tiles(Phase.I).first)
        assert added >= most - arriving
    assert lower_bound_s(redone, pr.costs) <= steps[1] * (1 + 1e-12)


def test_one_gpu_has_nothing_to_exchange() -> None:
    pr = problem("tiny", small_cluster(nodes=1, gpus=1, nics=1), ep=16, global_batch=4)
    layout = Comet().layout(pr, {**ONE_STAGE, "ep": 1})
    tiles = LayoutCosts(layout, pr.costs).tiles(Phase.F)
    assert sum(t.seconds for t in (*tiles.first, *tiles.second)) == 0.0
    assert step_s(Comet(), pr, layout) > 0.0
