"""What stays on NVLink where attention and experts share nodes: bytes counted token by token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import pytest

from disagmoe.cost.model import CostModel
from disagmoe.cost.network import Transfer
from disagmoe.ops import Phase
from tests.problems import problem

ROW = 64 * 2
"""Bytes of a row of the tiny model: hidden 64, bf16."""
TOKENS = 1000.0


@dataclass(frozen=True)
class Group:
    gpus: int
    nodes: int
    nic_gbs: float = 50.0


def costs(skew: float = 1.0) -> CostModel:
    return problem("tiny", transport="m2n_rdma", merge="node", skew=skew).costs


def dispatch(
    model: CostModel,
    merge: str,
    local: float,
    attention: Group,
    experts: Group,
    copies: str = "experts",
    combine: bool = False,
) -> Transfer:
    return model.m2n(
        tokens=TOKENS,
        senders=attention,
        receivers=experts,
        copies=copies,
        transport="m2n_rdma",
        merge=merge,
        phase=Phase.F,
        combine=combine,
        local=local,
    )


def counted(merge: str, ranks: int, nodes: int) -> tuple[float, float]:
    """Mean rows per token over the NIC and from GPU to GPU inside the node, over all routes and sending nodes.

    The tiny model sends a token to 2 of 8 experts, which lie in blocks on the ranks.
    """
    over_nic = inside = 0
    routes = list(combinations(range(8), 2))
    for route in routes:
        to = [expert * ranks // 8 for expert in route]
        for home in range(nodes):
            copies = to if merge == "none" else sorted(set(to))
            near = [rank for rank in copies if rank * nodes // ranks == home]
            far = [rank for rank in copies if rank * nodes // ranks != home]
            over_nic += len({rank * nodes // ranks for rank in far}) if merge == "node" else len(far)
            inside += len(near)
    return over_nic / len(routes) / nodes, inside / len(routes) / nodes


@pytest.mark.parametrize("merge", ["none", "rank", "node"])
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (8, 2), (8, 4), (4, 4), (8, 1)])
def test_bytes_are_those_counted_token_by_token(merge: str, ranks: int, nodes: int) -> None:
    """As many attention as expert GPUs, so both ends of a NIC see the same bytes."""
    over_nic, inside = counted(merge, ranks, nodes)
    transfer = dispatch(costs(), merge, 1.0 / nodes, Group(ranks, nodes), Group(ranks, nodes))
    assert transfer.nic_bytes == pytest.approx(TOKENS * ROW * over_nic, rel=1e-12)
    arriving = inside
    if merge == "node":  # what comes over a NIC is handed out on its node: every rank's copy crosses NVLink
        arriving = counted("rank", ranks, 1)[1]
    assert transfer.nvlink_bytes == pytest.approx(TOKENS * ROW * arriving, rel=1e-12)
    assert transfer.link == (1 if nodes == 1 else 0)


def test_by_hand() -> None:
    """Two nodes with two A- and two F-GPUs each: half of the two copies leave the node."""
    transfer = dispatch(costs(), "none", 0.5, Group(4, 2), Group(4, 2))
    assert transfer.nic_bytes == TOKENS * ROW
    # Both experts on one rank: 4 of 28 pairs; on one node: 12 of 28.
    transfer = dispatch(costs(), "rank", 0.5, Group(4, 2), Group(4, 2))
    assert transfer.nic_bytes == pytest.approx(TOKENS * ROW * (2 - 4 / 28) / 2)
    transfer = dispatch(costs(), "node", 0.5, Group(4, 2), Group(4, 2))
    assert transfer.nic_bytes == pytest.approx(TOKENS * ROW * (2 - 12 / 28) / 2)


@pytest.mark.parametrize("merge", ["none", "rank", "node"])
def test_on_one_node_no_nic_is_used_at_either_end(merge: str) -> None:
    model = costs()
    rates = model.calibration.rates
    slow = Group(2, 1, nic_gbs=1e-6)
    transfer = dispatch(model, merge, 1.0, slow, Group(6, 1, nic_gbs=1e-6))
    assert (transfer.nic_bytes, transfer.link) == (0.0, 1)
    # Two senders put out what six receivers take in: the senders' NVLink is the slower one.
    copies = (
        2.0 if merge == "none" else 2 - 2 / 28
    )  # blocks of 2, 1, 1, 2, 1, 1 experts: a pair shares a rank in 2 of 28
    expected = TOKENS * ROW * copies / (200e9 * rates.nvlink_efficiency) + rates.nvlink_alpha_us * 1e-6
    assert transfer.seconds == pytest.approx(expected, rel=1e-9)


def test_both_directions_move_the_same() -> None:
    model = costs()
    there = dispatch(model, "node", 0.5, Group(4, 2), Group(8, 2))
    back = dispatch(model, "node", 0.5, Group(4, 2), Group(8, 2), combine=True)
    assert back.seconds == there.seconds
    # Half as many tokens per expert GPU as per attention GPU.
    assert back.nic_bytes == pytest.approx(there.nic_bytes / 2)


def test_apart_is_the_default() -> None:
    model = costs()
    apart = dispatch(model, "node", 0.0, Group(4, 2), Group(4, 2))
    plain = model.m2n(
        tokens=TOKENS, senders=Group(4, 2), receivers=Group(4, 2), copies="experts", transport="m2n_rdma",
        merge="node", phase=Phase.F, combine=False,
    )  # fmt: skip
    assert plain == apart
    assert apart.nic_bytes == pytest.approx(2 * dispatch(model, "node", 0.5, Group(4, 2), Group(4, 2)).nic_bytes)


def test_dense_rows_whose_home_is_near_stay_near() -> None:
    transfer = dispatch(costs(), "node", 1.0, Group(4, 2), Group(4, 2), copies="one")
    assert (transfer.nic_bytes, transfer.nvlink_bytes) == (0.0, TOKENS * ROW)


@pytest.mark.parametrize("local", [-0.1, 1.1])
def test_a_share_is_a_share(local: float) -> None:
    with pytest.raises(ValueError, match="local is a share of the receivers, from 0 to 1"):
        dispatch(costs(), "node", local, Group(4, 2), Group(4, 2))
