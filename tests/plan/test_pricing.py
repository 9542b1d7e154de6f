"""Pricing: which arguments of the cost model a row of a plan stands for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baselines.comet import Comet
from baselines.megatron import Megatron1F1B
from baselines.tutel import Tutel
from disagmoe.cost.model import CostModel
from disagmoe.ops import COMM_KINDS, Kind, Phase, Stream
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.pricing import LayoutCosts, price
from disagmoe.simulator import simulate
from disagmoe.specs.params import attention_params, expert_params
from disagmoe.system import Problem, System
from disagmoe.systems import DisagMoE
from tests.problems import problem

COLOCATED = {"ep": 16, "pp": 2, "virtual": 2, "micro_batch": 1, "group": 2, "degree": 4}
DISAGGREGATED = {
    "nics": "halves", "p": 2, "dp": 1, "m": 4, "n": 8, "micro_batch": 1, "order": "megatron", "group": 4
}  # fmt: skip


def colocated(pr: Problem) -> Layout:
    return Megatron1F1B().layout(pr, COLOCATED)


def test_rows_per_expert_rank_follow_the_attention_to_expert_ratio() -> None:
    # Classic EP: every rank brings its own tokens, so a rank computes T x k rows whatever EP is.
    # Disaggregated, M = 4 and N = 8: M x T x k / N.
    pr = problem("qwen3_30b", seq=4096)
    layer = 3
    classic = LayoutCosts(colocated(pr), pr.costs).op(Kind.FFN, Phase.F, layer).seconds
    assert classic == pr.costs.ffn(layer, Phase.F, home_tokens=4096.0, rows=32768.0, local_experts=8.0)
    apart = LayoutCosts(DisagMoE().layout(pr, DISAGGREGATED), pr.costs).op(Kind.FFN, Phase.F, layer).seconds
    # Copies as they are arrive without the norm before the experts: each row gets it on the expert GPU.
    assert apart == pr.costs.ffn(layer, Phase.F, home_tokens=2048.0, rows=16384.0, local_experts=16.0, normed=16384.0)


def test_chunks_divide_tokens_and_rows() -> None:
    pr = problem("qwen3_30b", seq=4096)
    layout = Tutel().layout(pr, COLOCATED)
    chunk = LayoutCosts(layout, pr.costs).op(Kind.FFN, Phase.F, 0).seconds
    assert chunk == pr.costs.ffn(0, Phase.F, home_tokens=1024.0, rows=8192.0, local_experts=8.0)


def test_uneven_experts_and_skew_set_the_busiest_rank() -> None:
    # 8 experts on 3 ranks: the fullest holds 3 where the mean is 8/3; skew 1.5 on top.
    pr = problem("tiny", seq=4096, skew=1.5)
    layout = DisagMoE().layout(pr, {**DISAGGREGATED, "n": 3})
    rows = 4096 * 4 / 3 * 2 * (3 / (8 / 3)) * 1.5
    expected = pr.costs.ffn(0, Phase.F, home_tokens=4096 * 4 / 3, rows=rows, local_experts=3.0, normed=rows)
    assert LayoutCosts(layout, pr.costs).op(Kind.FFN, Phase.F, 0).seconds == pytest.approx(expected, rel=1e-12)


def test_gradients_are_reduced_over_the_ranks_that_hold_the_tensor() -> None:
    pr = problem("qwen3_30b")
    layout = colocated(pr)  # 32 GPUs, pp 2: 16 data ranks on 2 nodes, each expert on one rank only
    worker = layout.placement.attn[0]
    sync = LayoutCosts(layout, pr.costs).worker_op(Kind.GRAD_SYNC, Phase.B, 0, worker)
    dense = pr.costs.reduce_scatter(nbytes=4.0 * attention_params(pr.model, 0), ranks=16, nodes=2, nic_gbs=50.0)
    assert sync.seconds == dense.seconds
    deeper = LayoutCosts(Megatron1F1B().layout(pr, {**COLOCATED, "ep": 8}), pr.costs)
    expert = pr.costs.reduce_scatter(nbytes=4.0 * 16 * expert_params(pr.model), ranks=2, nodes=2, nic_gbs=50.0)
    assert deeper.worker_op(Kind.GRAD_SYNC, Phase.B, 0, worker).seconds == dense.seconds + expert.seconds


def test_every_row_of_every_kind_is_priced() -> None:
    pr = problem("deepseek_moe_16b", global_batch=64)
    for system, candidate in ((Megatron1F1B(), COLOCATED), (Tutel(), COLOCATED), (DisagMoE(), DISAGGREGATED)):
        layout = system.layout(pr, candidate)
        program = system.program(pr, layout)
        pricing = price(layout, program, pr.costs)
        assert (pricing.duration_s >= 0.0).all()
        comm = np.isin(program.kind, [int(k) for k in COMM_KINDS])
        assert (pricing.duration_s[~comm] > 0.0).all()
        assert (pricing.slows_compute[~comm] == 1.0).all() and (pricing.slowed_by_compute[~comm] == 1.0).all()
        receives = np.isin(program.stream, [int(Stream.RECV), int(Stream.RECV_B)])
        assert (pricing.wire_bytes[receives] == 0.0).all()


def test_both_ends_of_a_transfer_have_one_duration() -> None:
    pr = problem("deepseek_moe", global_batch=64, transport="m2n_rdma", merge="node")
    layout = DisagMoE().layout(pr, DISAGGREGATED)
    program = DisagMoE().program(pr, layout)
    duration = price(layout, program, pr.costs).duration_s
    ends: dict[tuple[int, ...], set[float]] = {}
    for i in np.flatnonzero(np.isin(program.stream, [int(Stream.SEND), int(Stream.RECV)])):
        ends.setdefault(tuple(program.op(i)), set()).add(float(duration[i]))
    assert {len(v) for v in ends.values()} == {1}


def test_a_straggler_slows_its_worker_only() -> None:
    base, slow = problem("tiny"), problem("tiny", stragglers=((5, 1.5), (16, 9.0)))  # A1 has GPUs 4 to 7, 16 is idle
    layout = DisagMoE().layout(base, {**DISAGGREGATED, "n": 4})
    program = DisagMoE().program(base, layout)
    before, after = price(layout, program, base.costs).duration_s, price(layout, program, slow.costs).duration_s
    slowed = ~np.isin(program.kind, [int(k) for k in COMM_KINDS]) & (program.worker == 1)
    assert slowed.any()
    assert after[slowed] == pytest.approx(1.5 * before[slowed])
    assert (after[~slowed] == before[~slowed]).all()


def test_lower_bound_of_a_single_stage_is_its_serial_work() -> None:
    # One pipeline stage and no overlap: everything but the reduction of gradients is one chain.
    pr = problem("tiny", ep=8, global_batch=64)
    layout = Megatron1F1B().layout(pr, {"ep": 8, "pp": 1, "virtual": 1, "micro_batch": 1, "group": 1})
    program = Megatron1F1B().program(pr, layout)
    pricing = price(layout, program, pr.costs)
    chain = (program.kind != int(Kind.GRAD_SYNC)) | (program.phase == int(Phase.F))
    bound = lower_bound_s(layout, pr.costs)
    assert bound == pytest.approx(float(pricing.duration_s[chain].sum()), rel=1e-12)
    assert bound <= simulate(Plan(layout, program).program, pricing).step_s


@pytest.mark.parametrize("merge", ["none", "rank", "node"])
@pytest.mark.parametrize(("system", "more"), [(Megatron1F1B(), {}), (Comet(variant="all-to-all"), {"tiles": "all"})])
def test_skew_moves_no_bytes_but_takes_longer(system: System, more: dict[str, str], merge: str) -> None:
    """Skew changes who receives a row, not how many are sent; capped merged copies must not make them fewer."""
    moved, seconds = [], []
    for skew in (1.0, 1.2, 4.0):
        pr = problem("qwen3_30b", ep=16, transport="m2n_rdma", merge=merge, skew=skew)
        prices = LayoutCosts(system.layout(pr, {**COLOCATED, **more}), pr.costs)
        chunks = range(prices.layout.tiles.groups) if prices.layout.tiles else range(1)
        exchange = [prices.op(Kind.DISPATCH, Phase.F, 0, chunk) for chunk in chunks]
        moved.append(sum(t.nic_bytes for t in exchange))
        seconds.append(sum(t.seconds for t in exchange))
    assert moved == pytest.approx([moved[0]] * 3, rel=1e-12)
    assert moved[0] > 0.0
    assert seconds[0] <= seconds[1] <= seconds[2]


@pytest.mark.parametrize("head", ["last_f", "spread"])
def test_the_last_combine_inside_the_expert_group(head: str) -> None:
    """Every copy of a token meets on its home rank: T x M / N x k rows, taking as long as the fullest rank has more."""
    for skew in (1.0, 1.5):
        pr = problem("qwen3_30b", skew=skew)
        layout = DisagMoE(head=head).layout(pr, DISAGGREGATED)
        prices = LayoutCosts(layout, pr.costs)
        inside = prices.op(Kind.COMBINE, Phase.F, pr.model.layers - 1)
        group = layout.placement.workers[layout.placement.ffn[-1]]
        even = pr.costs.all_to_all(
            tokens=2048.0, ep=8, nodes=group.nodes, transport="nccl", merge="none", nic_gbs=group.nic_gbs,
            phase=Phase.F, combine=True,
        )  # fmt: skip
        assert inside.nic_bytes == even.nic_bytes
        alpha_s = pr.costs.network.alpha_s(even.nic_bytes, 7)
        assert inside.seconds - alpha_s == pytest.approx(skew * (even.seconds - alpha_s), rel=1e-12)


def test_a_dense_last_layer_needs_no_combine_before_the_head() -> None:
    """Its rows are on their home ranks already."""
    pr = problem("deepseek_moe_16b")
    last = pr.model.layers - 1
    model = replace(pr.model, dense_layers=(last,))
    pr = replace(pr, model=model, costs=CostModel(model, pr.cluster, pr.costs.calibration, pr.workload))
    prices = LayoutCosts(DisagMoE().layout(pr, DISAGGREGATED), pr.costs)
    for phase in (Phase.F, Phase.B):
        assert prices.op(Kind.COMBINE, phase, last).seconds == 0.0
        assert prices.op(Kind.COMBINE, phase, last - 1).seconds > 0.0


def test_kernels_that_merge_per_node_leave_no_copies_to_pack_or_sum() -> None:
    """M = 4, N = 8: 2048 tokens per expert GPU; each of 8 ranks norms the tokens it gets once."""
    pr = problem("qwen3_30b", seq=4096, transport="m2n_rdma", merge="node")
    prices = LayoutCosts(DisagMoE().layout(pr, DISAGGREGATED), pr.costs)
    assert prices.op(Kind.ATTN, Phase.F, 0).seconds == pr.costs.attention(0, Phase.F, 1.0, packed=0.0)
    assert prices.op(Kind.FFN, Phase.F, 0).seconds == pr.costs.ffn(
        0, Phase.F, home_tokens=2048.0, rows=16384.0, local_experts=16.0, returned=1.0,
        normed=2048.0 * pr.costs.distinct(8),
    )  # fmt: skip
    here = LayoutCosts(colocated(pr), pr.costs)  # the norm was done before the exchange
    assert here.op(Kind.FFN, Phase.F, 0).seconds == pr.costs.ffn(
        0, Phase.F, home_tokens=4096.0, rows=32768.0, local_experts=8.0, returned=1.0
    )
