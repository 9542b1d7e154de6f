"""NICs belong to nodes: what a node can give, and where pools go."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.allocator.nodes import MODES, NodeUse, Placer, node_kinds, node_uses, rate_levels
from disagmoe.specs import NodeGroup
from tests.allocator.instances import Instance, cluster_of, every_division, instances


def rates_at_work(gpus: int, nics: int) -> tuple[float, ...]:
    kinds = node_kinds(cluster_of(NodeGroup(2, gpus, nics, 400.0)))
    return rate_levels(node_uses(kinds))[0]


def test_nics_per_gpu() -> None:
    # 8 GPUs / 4 NICs, 4 / 4, 4 / 2 at 50 GB/s a NIC: 25, 50, 25 where every GPU works; fewer GPUs share as many NICs.
    assert min(rates_at_work(8, 4)) == 25.0
    assert min(rates_at_work(4, 4)) == 50.0
    assert rates_at_work(4, 2) == (25.0, float(Fraction(100, 3)), 50.0, 100.0)


def test_order_of_nodes_does_not_matter() -> None:
    a, b, c = NodeGroup(2, 8, 8, 400.0), NodeGroup(1, 4, 2, 400.0), NodeGroup(1, 8, 8, 400.0)
    for mode in MODES:
        assert node_kinds(cluster_of(a, b, c), mode) == node_kinds(cluster_of(c, b, a), mode)
    with pytest.raises(ValueError, match="mode 'some'"):
        node_kinds(cluster_of(a), "some")


def test_equal_nics_halves_every_kind() -> None:
    kinds = node_kinds(cluster_of(NodeGroup(4, 8, 8, 400.0), NodeGroup(3, 4, 2, 400.0)), "equal_nics")
    # The odd node of the second kind is nobody's.
    assert [(k.gpus, k.pools, k.count) for k in kinds] == [(8, "A", 2), (8, "F", 2), (4, "A", 1), (4, "F", 1)]


def test_a_shared_node_divides_its_nics() -> None:
    kinds = node_kinds(cluster_of(NodeGroup(2, 4, 3, 400.0)), "shared_nodes")
    shared = [use for use in node_uses(kinds, "shared_nodes") if min(use.gpus) > 0]
    assert {use.nics for use in shared} == {(1, 2), (2, 1)}
    assert {use.gpus for use in shared} == {(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)}
    for use in shared:
        assert use.rates == tuple(float(n * 50 / Fraction(g)) for n, g in zip(use.nics, use.gpus, strict=True))


def test_a_single_nic_is_shared_by_gpu() -> None:
    # The "NIC" of 8 GB/s that eight GPUs share: 1 GB/s each, whatever the split.
    kinds = node_kinds(cluster_of(NodeGroup(1, 8, 1, 64.0)))
    shared = [use for use in node_uses(kinds) if min(use.gpus) > 0]
    assert {use.rates for use in shared} == {(1.0, 1.0)}
    assert max(sum(use.nics) for use in shared) == 1


@given(instances(), st.data())
def test_placer_finds_a_place_wherever_there_is_one(instance: Instance, data: st.DataObject) -> None:
    first, second = instance.model.levels
    if not (first and second):
        return
    rates = (data.draw(st.sampled_from(first)), data.draw(st.sampled_from(second)))
    wanted = (data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8)))
    expected = any(
        a == wanted[0] and f == wanted[1] and rate_a >= rates[0] and rate_f >= rates[1]
        for (a, rate_a), (f, rate_f) in every_division(instance)
    )
    placer = Placer(instance.model.kinds, instance.model.uses)
    placed = placer.place(wanted, rates)
    assert (placed is not None) == expected
    assert (placer.frontier(rates, wanted[0])[wanted[0]] >= wanted[1]) == expected
    if placed is not None:
        used: list[NodeUse] = [use for use in placed if use is not None]
        assert len(placed) == sum(kind.count for kind in instance.model.kinds)
        assert tuple(sum(use.gpus[pool] for use in used) for pool in (0, 1)) == wanted
        for use in used:
            assert sum(use.nics) <= instance.model.kinds[use.kind].nics
            assert all(not g or r >= least for g, r, least in zip(use.gpus, use.rates, rates, strict=True))


def test_later_nodes_stay_idle() -> None:
    kinds = node_kinds(cluster_of(NodeGroup(4, 8, 8, 400.0)))
    placed = Placer(kinds, node_uses(kinds)).place((10, 6), (50.0, 50.0))
    assert placed is not None
    assert [None if use is None else use.gpus for use in placed] == [(2, 0), (8, 0), (0, 6), None] or [
        None if use is None else sum(use.gpus) for use in placed
    ][3] is None
    spread = Placer(kinds, node_uses(kinds)).place((10, 6), (80.0, 50.0))
    assert spread is not None
    # At 80 GB/s a node holds 5 attention GPUs.
    assert sorted(use.gpus[0] for use in spread if use is not None and use.gpus[0]) == [5, 5]
