from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.cost import MERGES, CostModel, Transfer, load_calibration
from disagmoe.ops import Phase
from disagmoe.specs import Workload, cluster_from_mapping, load_cluster, load_model
from tests.cost.reference import costs
from tests.cost.shapes import model_with

BF16 = 2
SEQ = 4096
HIDDEN = 4096
TOKEN_BYTES = SEQ * HIDDEN * BF16
QWEN3 = costs("h800")


@dataclass(frozen=True)
class Group:
    gpus: int
    nodes: int
    nic_gbs: float = 50.0


TWO_NODES = Group(16, 2)


def exchange(
    merge: str,
    *,
    model: CostModel = QWEN3,
    tokens: float = SEQ,
    ep: int = 16,
    nodes: int = 2,
    nic_gbs: float = 50.0,
    factor: float = 1.0,
) -> Transfer:
    return model.all_to_all(
        tokens=tokens,
        ep=ep,
        nodes=nodes,
        transport="deepep",
        merge=merge,
        nic_gbs=nic_gbs,
        phase=Phase.F,
        combine=False,
        volume_factor=factor,
    )


def m2n(
    merge: str,
    *,
    model: CostModel = QWEN3,
    tokens: float = SEQ,
    senders: Group = TWO_NODES,
    receivers: Group = TWO_NODES,
    copies: str = "experts",
    phase: Phase = Phase.F,
    combine: bool = False,
) -> Transfer:
    return model.m2n(
        tokens=tokens,
        senders=senders,
        receivers=receivers,
        copies=copies,
        transport="m2n_rdma",
        merge=merge,
        phase=phase,
        combine=combine,
    )


def test_unmerged_all_to_all_volume() -> None:
    # k copies, (W - 1) / W of them leave the rank, (n - 1) / n of them the node.
    transfer = exchange("none")
    assert transfer.nic_bytes == pytest.approx(8 * TOKEN_BYTES / 2)
    assert transfer.nic_bytes + transfer.nvlink_bytes == pytest.approx(8 * TOKEN_BYTES * 15 / 16)
    rates = QWEN3.calibration.rates
    expected = transfer.nic_bytes / (50e9 * rates.nic_efficiency) + rates.nic_alpha_us * 1e-6
    assert transfer.seconds == pytest.approx(expected)
    assert transfer.link == 0


def test_merged_per_node_volume() -> None:
    transfer = exchange("node")
    assert transfer.nic_bytes == pytest.approx(QWEN3.distinct(2) / 2 * TOKEN_BYTES)
    assert transfer.nvlink_bytes == pytest.approx(QWEN3.distinct(16) * TOKEN_BYTES)
    # On an H800 the fan-out, not the NIC, sets the time.
    rates = QWEN3.calibration.rates
    expected = transfer.nvlink_bytes / (200e9 * rates.nvlink_efficiency) + rates.nic_alpha_us * 1e-6
    assert transfer.seconds == pytest.approx(expected)


def test_merged_per_rank_volume() -> None:
    transfer = exchange("rank")
    assert transfer.nic_bytes == pytest.approx(QWEN3.distinct(16) / 2 * TOKEN_BYTES)
    assert transfer.nvlink_bytes == pytest.approx(QWEN3.distinct(16) * 7 / 16 * TOKEN_BYTES)


def test_inside_one_node_nothing_touches_a_nic() -> None:
    transfer = exchange("none", ep=8, nodes=1)
    assert (transfer.nic_bytes, transfer.link) == (0.0, 1)
    assert transfer.nvlink_bytes == pytest.approx(8 * TOKEN_BYTES * 7 / 8)
    rates = QWEN3.calibration.rates
    expected = transfer.nvlink_bytes / (200e9 * rates.nvlink_efficiency) + rates.nvlink_alpha_us * 1e-6
    assert transfer.seconds == pytest.approx(expected)


@pytest.mark.parametrize("ep", [1, 2, 8, 16])
def test_a_rank_receives_the_same_rows_whatever_ep(ep: int) -> None:
    """Dispatch does not thin the tokens: 32,768 rows of Qwen3 at 4K, own ones included (Megatron-LM pull 6782)."""
    nodes = max(1, ep // 8)
    transfer = exchange("none", ep=ep, nodes=nodes)
    own = 8 / ep * TOKEN_BYTES
    assert (transfer.nic_bytes + transfer.nvlink_bytes + own) / (HIDDEN * BF16) == pytest.approx(32768)


@pytest.mark.parametrize(("experts_on", "rows"), [(2, 65536), (4, 32768)])
def test_rows_of_an_expert_gpu_depend_on_the_ratio_of_the_pools(experts_on: int, rows: int) -> None:
    combine = m2n("none", senders=Group(4, 4), receivers=Group(experts_on, 2), combine=True)
    assert combine.nic_bytes / (HIDDEN * BF16) == pytest.approx(rows)


@pytest.mark.parametrize(
    ("merge", "copies"), [("none", 8.0), ("rank", QWEN3.distinct(16)), ("node", QWEN3.distinct(2))]
)
def test_m2n_sends_every_copy_over_the_nic(merge: str, copies: float) -> None:
    transfer = m2n(merge)
    assert transfer.nic_bytes == pytest.approx(copies * TOKEN_BYTES)
    assert transfer.link == 0
    assert (transfer.nvlink_bytes > 0) == (merge == "node")


def test_m2n_directions() -> None:
    """To the experts: forward dispatch and backward combine; back: the other two."""

    def carry(phase: Phase, combine: bool) -> Transfer:
        return m2n("node", senders=TWO_NODES, receivers=Group(8, 1), phase=phase, combine=combine)

    there, back = carry(Phase.F, combine=False).nic_bytes, carry(Phase.F, combine=True).nic_bytes
    assert there == pytest.approx(TOKEN_BYTES)  # one node: one copy
    assert back == pytest.approx(2 * TOKEN_BYTES)  # twice as many attention GPUs as expert GPUs
    for phase in (Phase.I, Phase.B):
        assert carry(phase, combine=False).nic_bytes == back
        assert carry(phase, combine=True).nic_bytes == there
    assert carry(Phase.R, combine=False).nic_bytes == there
    assert carry(Phase.F, combine=False).seconds == carry(Phase.F, combine=True).seconds


def test_m2n_is_as_slow_as_its_slower_end() -> None:
    rates = QWEN3.calibration.rates
    for senders, receivers, bound in (
        (Group(16, 2, 25.0), Group(16, 2, 50.0), 25.0),
        (Group(16, 2, 50.0), Group(16, 2, 25.0), 25.0),
        (Group(16, 2, 50.0), Group(32, 4, 50.0), 50.0),
    ):
        transfer = m2n("none", senders=senders, receivers=receivers)
        expected = 8 * TOKEN_BYTES / (bound * 1e9 * rates.nic_efficiency) + rates.nic_alpha_us * 1e-6
        assert transfer.seconds == pytest.approx(expected)


def test_dense_layers_send_one_copy() -> None:
    transfer = m2n("none", copies="one")
    assert transfer.nic_bytes == pytest.approx(TOKEN_BYTES)
    assert transfer.nvlink_bytes == 0.0


def test_skew_slows_the_fullest_unit_and_merging_caps_it() -> None:
    skewed = costs("h800", skew=1.5)
    assert m2n("none", model=skewed).seconds > 1.4 * m2n("none").seconds
    # A node receives at most one copy of every token: 2 instead of 1.99 rows over two nodes.
    slow, even = exchange("node", factor=1.5).nic_bytes, exchange("node").nic_bytes
    assert even < slow <= TOKEN_BYTES
    padded = exchange("none", factor=1.5)
    assert padded.nic_bytes == pytest.approx(1.5 * exchange("none").nic_bytes)


def test_spine_oversubscription_divides_what_crosses_nodes() -> None:
    cluster = replace(load_cluster("h800_128"), spine_oversubscription=4.0)
    spine = CostModel(QWEN3.model, cluster, QWEN3.calibration, QWEN3.workload)
    alpha = QWEN3.calibration.rates.nic_alpha_us * 1e-6
    slow, fast = exchange("none", model=spine).seconds - alpha, exchange("none").seconds - alpha
    assert slow == pytest.approx(4 * fast)
    inside = exchange("none", model=spine, ep=8, nodes=1)
    assert inside.seconds == exchange("none", ep=8, nodes=1).seconds


def test_rows_times_hidden_beyond_32_bits() -> None:
    wide = CostModel(model_with(hidden=7168), QWEN3.cluster, QWEN3.calibration, QWEN3.workload)
    assert m2n("none", model=wide, tokens=38000).nic_bytes == 2 * 2_179_072_000
    assert m2n("none", model=wide, tokens=65536).nic_bytes == 7_516_192_768


def test_nics_per_gpu_of_mixed_nodes() -> None:
    groups = [
        {"count": 1, "gpus": 8, "nics": 4, "nic_gbit": 400},
        {"count": 1, "gpus": 4, "nics": 4, "nic_gbit": 400},
        {"count": 1, "gpus": 4, "nics": 2, "nic_gbit": 400},
    ]
    mixed = cluster_from_mapping({"name": "mixed", "device": "H100", "groups": groups, "calibration": "h100"})
    model = CostModel(load_model("qwen3"), mixed, load_calibration("h100"), Workload(seq=SEQ, global_batch=16))
    rates = [mixed.nic_gbs_per_gpu([node]) for node in range(3)]
    assert rates == [25.0, 50.0, 25.0]
    alpha = model.calibration.rates.nic_alpha_us * 1e-6
    times = [model.p2p(tokens=SEQ, nic_gbs=rate, inter_node=True).seconds - alpha for rate in rates]
    assert times[0] == times[2] == pytest.approx(2 * times[1])
    # A group that spans the first two nodes runs at its slowest member's rate.
    slowest = mixed.nic_gbs_per_gpu([0, 1])
    group = exchange("none", model=model, ep=12, nodes=2, nic_gbs=slowest).seconds
    assert group > exchange("none", model=model, ep=12, nodes=2, nic_gbs=50.0).seconds


def test_p2p() -> None:
    rates = QWEN3.calibration.rates
    over_nic = QWEN3.p2p(tokens=SEQ, nic_gbs=50.0, inter_node=True)
    assert over_nic.nic_bytes == TOKEN_BYTES
    assert over_nic.seconds == pytest.approx(TOKEN_BYTES / (50e9 * rates.nic_efficiency) + rates.nic_alpha_us * 1e-6)
    inside = QWEN3.p2p(tokens=SEQ, nic_gbs=50.0, inter_node=False)
    assert (inside.nic_bytes, inside.nvlink_bytes, inside.link) == (0.0, TOKEN_BYTES, 1)


def test_ring_collectives() -> None:
    rates = QWEN3.calibration.rates
    one_node = QWEN3.all_gather(nbytes=8e9, ranks=8, nodes=1, nic_gbs=50.0)
    alpha = rates.nvlink_alpha_us * 1e-6
    assert one_node.seconds == pytest.approx(7e9 / (200e9 * rates.ring_nvlink_efficiency) + alpha)
    assert one_node.link == 1
    # One rank per node: every byte crosses its NIC.
    spread = QWEN3.reduce_scatter(nbytes=8e9, ranks=4, nodes=4, nic_gbs=50.0)
    assert spread.nic_bytes == pytest.approx(6e9)
    assert spread.seconds == pytest.approx(6e9 / (50e9 * rates.ring_nic_efficiency) + rates.nic_alpha_us * 1e-6)
    # Eight ranks per node: eight rings, each through one NIC.
    wide = QWEN3.reduce_scatter(nbytes=8e9, ranks=16, nodes=2, nic_gbs=50.0)
    assert wide.nic_bytes == pytest.approx(7.5e9 / 8)
    twice = QWEN3.all_reduce(nbytes=8e9, ranks=16, nodes=2, nic_gbs=50.0)
    assert twice.seconds == pytest.approx(2 * wide.seconds)
    assert QWEN3.all_reduce(nbytes=8e9, ranks=1, nodes=1, nic_gbs=50.0) == Transfer(0.0, 0.0, 0.0, 1)


@given(
    merge=st.sampled_from(MERGES),
    tokens=st.floats(1.0, 1e6),
    more=st.floats(1.0, 4.0),
    log_ep=st.integers(0, 6),
    log_local=st.integers(0, 3),
    factor=st.floats(1.0, 4.0),
)
def test_exchange_is_positive_monotonic_and_below_line_rate(
    merge: str, tokens: float, more: float, log_ep: int, log_local: int, factor: float
) -> None:
    ep = 1 << log_ep
    nodes = max(1, ep >> log_local)
    less = exchange(merge, tokens=tokens, ep=ep, nodes=nodes, factor=factor)
    greater = exchange(merge, tokens=tokens * more, ep=ep, nodes=nodes, factor=factor)
    assert less.seconds <= greater.seconds
    for transfer in (less, greater):
        if transfer.nic_bytes + transfer.nvlink_bytes > 0.0:
            assert transfer.seconds > 0.0
            assert transfer.nic_bytes / transfer.seconds < 50e9
            assert transfer.nvlink_bytes / transfer.seconds < 200e9
    unmerged = exchange("none", tokens=tokens, ep=ep, nodes=nodes, factor=factor)
    assert less.nic_bytes <= unmerged.nic_bytes * (1 + 1e-12)


@given(
    tokens=st.floats(1.0, 1e6),
    attention=st.sampled_from([Group(8, 1), Group(16, 2), Group(32, 4), Group(24, 3, 25.0)]),
    experts=st.sampled_from([Group(8, 1), Group(16, 2), Group(10, 2, 80.0), Group(64, 8)]),
    combine=st.booleans(),
)
def test_m2n_merging_never_costs_nic_bytes(tokens: float, attention: Group, experts: Group, combine: bool) -> None:
    by_merge = {
        merge: m2n(merge, tokens=tokens, senders=attention, receivers=experts, combine=combine) for merge in MERGES
    }
    assert by_merge["node"].nic_bytes <= by_merge["rank"].nic_bytes <= by_merge["none"].nic_bytes
    assert by_merge["rank"].seconds <= by_merge["none"].seconds
    sender = experts if combine else attention
    for transfer in by_merge.values():
        assert 0.0 < transfer.nic_bytes / transfer.seconds < sender.nic_gbs * 1e9
        assert transfer.nvlink_bytes / transfer.seconds < 200e9


def test_rates_above_the_line_are_refused() -> None:
    for name in ("nvlink_efficiency", "ring_nvlink_efficiency"):
        with pytest.raises(ValueError, match="exceeds the line rate 200"):
            CostModel(QWEN3.model, QWEN3.cluster, QWEN3.calibration.with_rates("x", **{name: 1.1}), QWEN3.workload)
    fast = CostModel(QWEN3.model, QWEN3.cluster, QWEN3.calibration.with_rates("x", nic_efficiency=1.1), QWEN3.workload)
    with pytest.raises(ValueError, match=r"NIC: effective 55.0 GB/s exceeds the line rate 50.0"):
        exchange("none", model=fast)


def test_user_errors_are_one_clear_line() -> None:
    with pytest.raises(ValueError, match=r"unknown merge 'per_pod'; known: none, rank, node"):
        exchange("per_pod")
    with pytest.raises(ValueError, match="unknown copies 'two'"):
        m2n("none", copies="two")
    with pytest.raises(ValueError, match="16 expert-parallel ranks cannot span 32 nodes"):
        exchange("none", nodes=32)
    with pytest.raises(ValueError, match="unknown transport 'tcp'; known: nccl, deepep, m2n_rdma"):
        QWEN3.contention("tcp")
    with pytest.raises(ValueError, match="needs NIC bandwidth above 0"):
        exchange("none", nic_gbs=0.0)
    with pytest.raises(ValueError, match=r"at least 1, got 0\.5"):
        exchange("none", factor=0.5)
