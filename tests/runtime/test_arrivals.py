"""Arrival groups: whose tokens come when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.cost.comet import TileSplit, tile_split
from disagmoe.runtime.arrivals import arrival_groups, sources_of


def test_on_one_node_step_j_is_a_shift_by_j() -> None:
    groups = arrival_groups(tile_split(4, 1, 64), (4, 5, 6, 7), dict.fromkeys(range(4, 8), 0))
    for shift, group in enumerate(groups):
        assert group == {(4 + i, 4 + (i + shift) % 4) for i in range(4)}


def test_the_own_node_comes_before_the_others() -> None:
    nodes = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    assert sources_of(3, range(6), nodes) == [3, 2, 0, 1, 4, 5]  # node 1 gets from node 0 before node 2
    assert sources_of(2, range(6), nodes) == [2, 3, 0, 1, 4, 5]  # far sources in the same order as its neighbour


@given(st.integers(1, 4), st.integers(1, 6))
def test_every_pair_is_in_one_group_of_the_size_that_the_tiles_say(node_count: int, per_node: int) -> None:
    ranks = range(node_count * per_node)
    split = tile_split(len(ranks), node_count, 64)
    groups = arrival_groups(split, ranks, {rank: rank // per_node for rank in ranks})
    assert sorted(pair for group in groups for pair in group) == [(a, b) for a in ranks for b in ranks]
    sizes = (1, *split.near, *split.far)
    for size, group in zip(sizes, groups, strict=True):
        assert all(sum(holder == rank for _, holder in group) == size for rank in ranks)


def test_tiles_for_other_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="tiles for 3 expert-parallel ranks cannot serve 2"):
        arrival_groups(TileSplit((1, 1), (), 8), (0, 1), {0: 0, 1: 0})
