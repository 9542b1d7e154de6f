"""Edges between rows of equal key, against plain loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.plan.edges import compress_edges, join, link, sort_order

FAR = 1 << 40  # keys this far apart are too many to count

keys = st.lists(st.sampled_from([-3, 0, 1, 2, 7, FAR]), max_size=12)


@given(keys, keys)
def test_join_is_every_pair_of_equal_keys(first: list[int], second: list[int]) -> None:
    src, dst = np.arange(len(first)), 100 + np.arange(len(second))
    found = join(src, np.array(first, dtype=np.int64), dst, np.array(second, dtype=np.int64))
    pairs = [(i, 100 + j) for j, b in enumerate(second) for i, a in enumerate(first) if a == b]
    assert list(zip(*(side.tolist() for side in found), strict=True)) == pairs


members = st.lists(st.tuples(st.sampled_from([0, 1, 5, FAR]), st.integers(-1, 3)), max_size=12)


@given(members, members)
def test_link_is_chunk_by_chunk_where_counts_agree_and_all_to_all_elsewhere(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    nodes = [*first, *second]
    chunk = np.array([c for _, c in nodes], dtype=np.int64)
    group = np.array([g for g, _ in nodes], dtype=np.int64)
    src, dst = np.arange(len(first)), np.arange(len(first), len(nodes))
    found = link(src, group[src], dst, group[dst], chunk)

    def chunks(side: list[tuple[int, int]], wanted: int) -> list[int]:
        return sorted({c for g, c in side if g == wanted})

    expected = set()
    for i, (a, c) in enumerate(first):
        for j, (b, d) in enumerate(second):
            if a == b:
                mine, theirs = chunks(first, a), chunks(second, b)
                if len(mine) != len(theirs) or mine.index(c) == theirs.index(d):
                    expected.add((i, len(first) + j))
    assert set(zip(*(side.tolist() for side in found), strict=True)) == expected
    assert len(found[0]) == len(expected)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_edges_are_kept_once_in_order(edges: list[tuple[int, int]]) -> None:
    src, dst = (np.array([e[side] for e in edges], dtype=np.int64) for side in (0, 1))
    succ_ptr, succ, indegree = compress_edges(src, dst, 6)
    kept = sorted(set(edges))
    assert [(i, int(j)) for i in range(6) for j in succ[succ_ptr[i] : succ_ptr[i + 1]]] == kept
    assert indegree.tolist() == [sum(b == node for _, b in kept) for node in range(6)]


@given(keys)
def test_order_is_that_of_a_stable_sort(values: list[int]) -> None:
    assert sort_order(np.array(values, dtype=np.int64)).tolist() == sorted(range(len(values)), key=values.__getitem__)
