"""Tile-level costs of a fused exchange, the all-gather of the open kernels, and the two-level all-to-all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.cost.calibration import load_calibration
from disagmoe.cost.comet import (
    PROFILED_SMS,
    SM_BYTES_PER_S,
    Exchange,
    TileCosts,
    TileSplit,
    column_blocks,
    exchange_of,
    first_half_s,
    near_equal,
    second_half_s,
    tile_costs,
    tile_split,
)
from disagmoe.cost.model import CostModel
from disagmoe.cost.network import Transfer
from disagmoe.ops import Phase
from disagmoe.specs import Workload, load_cluster, load_model

SMS = 132
times = st.floats(0.0, 1.0)


def model(name: str = "qwen3") -> CostModel:
    return CostModel(load_model(name), load_cluster("h800_128"), load_calibration("h800"), Workload(4096, 128))


def exchange(nic_s: float, nvlink_s: float, alpha_s: float = 0.0, *, fan_out: bool = False) -> Exchange:
    """An exchange of 46 GB/s and 160 GB/s links; the latency inside the node is half of the other."""
    whole = Transfer(max(nic_s, nvlink_s) + alpha_s, nic_s * 46e9, nvlink_s * 160e9, link=0 if nic_s else 1)
    return Exchange(whole, nic_s, nvlink_s, alpha_s, alpha_s / 2 if nic_s else alpha_s, fan_out)


NOTHING = exchange(0.0, 0.0)


def costs(
    split: TileSplit,
    experts: tuple[float, float, float] = (0.0, 0.0, 0.0),
    arriving: Exchange = NOTHING,
    leaving: Exchange = NOTHING,
    home_s: float = 0.0,
) -> TileCosts:
    return tile_costs(split, experts, home_s, arriving, leaving, sms=SMS)


def test_sources_inside_one_node_are_a_ring_of_single_ranks() -> None:
    split = tile_split(8, 1, 4096)
    assert (split.near, split.far, split.columns, split.ranks) == ((1,) * 7, (), 8, 8)
    assert tile_split(1, 1, 4096).groups == 1


def test_sources_across_nodes_are_aggregated() -> None:
    split = tile_split(16, 2, 4096)
    assert (split.near, split.far, split.groups) == ((3, 2, 2), (2, 2, 2, 2), 8)
    assert tile_split(64, 8, 4096).ranks == 64
    assert tile_split(2, 2, 4096) == TileSplit((), (1,), 8)
    assert near_equal(7, 3) == (3, 2, 2)


def test_column_blocks_of_the_open_kernel() -> None:
    assert [column_blocks(h) for h in (4096, 7168, 1152, 2880)] == [8, 7, 9, 8]


@given(st.integers(1, 64), st.integers(1, 8), times, times, times, st.booleans())
def test_arrivals_add_up_to_the_whole_exchange(
    local: int, nodes: int, nic_s: float, nvlink_s: float, alpha_s: float, fan_out: bool
) -> None:
    split = tile_split(local * nodes, nodes, 4096)
    moved = exchange(
        nic_s if nodes > 1 else 0.0, nvlink_s if local > 1 or (fan_out and nodes > 1) else 0.0, alpha_s, fan_out=fan_out
    )
    first = costs(split, arriving=moved).first
    assert len(first) == split.groups
    assert first[0].seconds == first[0].nic_bytes == first[0].nvlink_bytes == 0.0  # the rank's own rows
    if split.groups > 1:
        assert sum(t.seconds for t in first) == pytest.approx(moved.transfer.seconds, abs=1e-12)
        assert sum(t.nic_bytes for t in first) == pytest.approx(moved.transfer.nic_bytes)
        assert sum(t.nvlink_bytes for t in first) == pytest.approx(moved.transfer.nvlink_bytes)


def test_both_links_bring_rows_at_the_same_time() -> None:
    """EP16 on two nodes: near sources by NVLink from 0.1 on, far ones by NIC from 0.2 on, whichever is later."""
    first = costs(tile_split(16, 2, 4096), arriving=exchange(8.0, 0.7, 0.2)).first
    arrive = [sum(t.seconds for t in first[: i + 1]) for i in range(len(first))]
    near = [0.1 + 0.7 * share for share in (3 / 7, 5 / 7, 1.0)]
    far = [0.2 + 8.0 * share for share in (0.25, 0.5, 0.75, 1.0)]
    assert arrive == pytest.approx([0.0, *near, *far])


def test_rows_that_fan_out_wait_for_nvlink_too() -> None:
    """Merged per node, all sources' rows pass over NVLink, near ones first."""
    first = costs(tile_split(16, 2, 4096), arriving=exchange(1.0, 15.0, 0.0, fan_out=True)).first
    arrive = [sum(t.seconds for t in first[: i + 1]) for i in range(len(first))]
    assert arrive == pytest.approx([0.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0])


def test_tiles_are_the_share_of_their_sources() -> None:
    """One sixteenth of the first GEMM needs no remote row; T0 = max over j of arrive_j + G1 (1 - cum_j)."""
    tiles = costs(tile_split(16, 2, 4096), (16.0, 0.0, 0.0), exchange(8.0, 0.7, 0.2))
    assert tiles.gemms[:8] == pytest.approx([1, 3, 2, 2, 2, 2, 2, 2])
    # The GEMM is the bottleneck from the first near group on: that arrives at 0.4, before the own tile is done.
    assert tiles.first_half_s == pytest.approx(16.0)
    late = costs(tile_split(16, 2, 4096), (8.0, 0.0, 0.0), exchange(80.0, 0.7, 0.2))
    assert late.first_half_s == pytest.approx(80.2 + 8.0 * 2 / 16)  # the last two sources decide


def test_sending_blocks_slow_the_second_gemm_only() -> None:
    split = TileSplit((1,) * 7, (), 8, comm_sms=32)
    tiles = costs(split, (10.0, 0.5, 10.0), home_s=2.0)
    assert sum(tiles.gemms[:8]) == pytest.approx(10.0 + 1.0)  # half of the home work
    assert sum(tiles.gemms[8:]) == pytest.approx(0.5 + 10.0 * SMS / (SMS - 32) + 1.0)
    assert tiles.gemms[8] - tiles.gemms[9] == pytest.approx(0.5)  # the activation comes before the first block
    assert tiles.compute_s == pytest.approx(sum(tiles.gemms))


def test_few_sending_blocks_cannot_fill_the_link() -> None:
    split = TileSplit((1,) * 7, (), 8, comm_sms=4)
    moved = exchange(0.0, 1.0, 0.25)
    second = costs(split, leaving=moved).second
    assert sum(t.seconds for t in second) == pytest.approx(160e9 / (4 * SM_BYTES_PER_S) + 0.25)
    assert second[-1].seconds - second[0].seconds == pytest.approx(0.25)  # latency once, at the end


@given(st.floats(0.01, 10.0), st.floats(0.01, 10.0))
def test_profile_picks_the_fastest_second_half(gemm_s: float, send_s: float) -> None:
    split = TileSplit((1,) * 7, (), 8)
    best = costs(split, (0.0, 0.0, gemm_s), leaving=exchange(0.0, send_s))

    def seconds(comm_sms: int) -> float:
        sends = max(send_s, send_s * 160e9 / (comm_sms * SM_BYTES_PER_S))
        slowed = gemm_s * SMS / (SMS - comm_sms)
        return max(slowed + sends / 8, sends + slowed / 8)

    assert best.comm_sms in PROFILED_SMS
    assert best.second_half_s == pytest.approx(min(seconds(n) for n in PROFILED_SMS))


def test_optimum_moves_with_the_shape() -> None:
    """As the paper finds: the more there is to send per FLOP, the more blocks should send."""
    split = TileSplit((1,) * 7, (), 8)
    picked = [costs(split, (0.0, 0.0, g), leaving=exchange(0.0, 1.0)).comm_sms for g in (8.0, 2.0, 0.5)]
    assert picked == sorted(picked) and picked[0] < picked[-1]


@given(st.lists(st.tuples(times, times), min_size=1, max_size=9))
def test_halves_against_a_step_by_step_run(pairs: list[tuple[float, float]]) -> None:
    free, t0 = 0.0, 0.0
    for arrive, tile in ((sum(a for a, _ in pairs[: i + 1]), t) for i, (_, t) in enumerate(pairs)):
        free = max(free, arrive) + tile
        t0 = free
    arrivals = [sum(a for a, _ in pairs[: i + 1]) for i in range(len(pairs))]
    assert first_half_s(arrivals, [t for _, t in pairs]) == pytest.approx(t0)
    made, link = 0.0, 0.0
    for block, send in pairs:
        made += block
        link = max(link, made) + send
    assert second_half_s([b for b, _ in pairs], [s for _, s in pairs]) == pytest.approx(link)


def test_all_gather_receives_every_token_of_the_other_ranks() -> None:
    """(W - 1) T h 2 bytes there, at most one row per token and remote rank that holds one of its experts back."""
    there, back = model().gathered(tokens=4096.0, ep=8, nic_gbs=50.0)
    token_bytes = 4096 * 4096 * 2
    assert there.nvlink_bytes == 7 * token_bytes and there.nic_bytes == 0.0
    # Eight of 128 experts uniformly at random over 8 ranks of 16: distinct ranks by inclusion and exclusion.
    distinct = 8 * (1 - _choose_all_from(112, 128, 8))
    assert back.nvlink_bytes == pytest.approx(distinct * 7 / 8 * token_bytes)


def _choose_all_from(allowed: int, total: int, drawn: int) -> float:
    share = 1.0
    for i in range(drawn):
        share *= (allowed - i) / (total - i)
    return share


def test_the_open_volume_beats_an_all_to_all_only_where_top_k_exceeds_the_ranks() -> None:
    qwen = model()  # top-8 of 128
    for ep, gathers_less in ((4, True), (8, False)):
        there, _ = qwen.gathered(tokens=4096.0, ep=ep, nic_gbs=50.0)
        copies = qwen.all_to_all(
            tokens=4096.0, ep=ep, nodes=1, transport="nccl", merge="none", nic_gbs=50.0, phase=Phase.F, combine=False
        )
        assert (there.nvlink_bytes < copies.nvlink_bytes) is gathers_less


def linear_and_two_level(tokens: float, ep: int, nodes: int) -> tuple[Transfer, Transfer]:
    both = (model().all_to_all, model().two_level_all_to_all)
    linear, two_level = (
        exchange(
            tokens=tokens,
            ep=ep,
            nodes=nodes,
            transport="nccl",
            merge="none",
            nic_gbs=50.0,
            phase=Phase.F,
            combine=False,
        )
        for exchange in both
    )
    return linear, two_level


def test_two_levels_move_the_same_bytes_between_nodes_and_more_inside() -> None:
    """2DH: S (G-1)/G over NVLink, S (n-1)/n over the NIC, one after the other, each after a strided copy."""
    linear, two_level = linear_and_two_level(4096.0, 16, 2)
    sent = 4096 * 8 * 4096 * 2
    assert two_level.nic_bytes == linear.nic_bytes == sent / 2
    assert two_level.nvlink_bytes == sent * 7 / 8
    rates = load_calibration("h800").rates
    copy_s = 2 * (2 * sent / (3350e9 * rates.hbm_efficiency) + rates.launch_us * 1e-6)
    links = sent * 7 / 8 / (200e9 * rates.nvlink_efficiency) + sent / 2 / (50e9 * rates.nic_efficiency)
    assert two_level.seconds == pytest.approx(links + copy_s + (rates.nvlink_alpha_us + rates.nic_alpha_us) * 1e-6)


def test_two_levels_pay_for_small_messages_at_scale_only() -> None:
    """Published for Tutel: at hundreds of GPUs and about 1 MiB (arXiv 2206.03382); for EP16 the direct one is right."""
    few = 16.0  # tokens: 1 MiB of copies
    linear, two_level = linear_and_two_level(few, 16, 2)
    assert linear.seconds < two_level.seconds
    linear, two_level = linear_and_two_level(few, 512, 64)
    assert two_level.seconds < linear.seconds
    linear, two_level = linear_and_two_level(16384.0, 512, 64)
    assert linear.seconds < two_level.seconds


def test_within_one_node_two_levels_are_one() -> None:
    linear, two_level = linear_and_two_level(4096.0, 8, 1)
    assert two_level.nvlink_bytes == linear.nvlink_bytes and two_level.link == linear.link == 1


def test_two_levels_cannot_merge_copies() -> None:
    with pytest.raises(ValueError, match="a two-level all-to-all moves every copy: merge none is allowed, not node"):
        model().two_level_all_to_all(
            tokens=1.0, ep=16, nodes=2, transport="nccl", merge="node", nic_gbs=50.0, phase=Phase.F, combine=False
        )


def test_halves_of_an_expert_are_its_gemms_and_activation() -> None:
    """Fused, the halves cost what the layer costs less the two copies that ride in the kernels."""
    qwen, rows = model(), 65536.0
    rates = qwen.calibration.rates
    whole = qwen.ffn(0, Phase.F, home_tokens=0.0, rows=rows, local_experts=8.0)
    copies = 2 * (2 * 4096 * 2 * rows / (3350e9 * rates.hbm_efficiency) + rates.launch_us * 1e-6)
    forward = qwen.expert_halves(Phase.F, rows, 8.0)
    assert sum(forward) == pytest.approx(whole - copies)
    backward = qwen.expert_halves(Phase.I, rows, 8.0)
    assert backward[0] == pytest.approx(forward[2], rel=0.02) and backward[2] == pytest.approx(forward[0], rel=0.02)
    with pytest.raises(ValueError, match="exist in phases F and I, not W"):
        qwen.expert_halves(Phase.W, rows, 8.0)


def test_exchange_parts_come_from_the_transfer() -> None:
    qwen = model()
    whole = qwen.all_to_all(
        tokens=4096.0, ep=16, nodes=2, transport="nccl", merge="none", nic_gbs=50.0, phase=Phase.F, combine=False
    )
    parts = exchange_of(whole, qwen.network, 50.0, fan_out=False)
    assert parts.moving_s + parts.alpha_s == pytest.approx(whole.seconds)
    assert parts.alpha_s == pytest.approx(qwen.calibration.rates.nic_alpha_us * 1e-6)
    assert parts.near_alpha_s == pytest.approx(qwen.calibration.rates.nvlink_alpha_us * 1e-6)
