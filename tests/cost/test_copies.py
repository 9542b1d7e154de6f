from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.cost.copies import copy_work, distinct_units


def brute_force(experts: int, top_k: int, units: int) -> float:
    """Mean distinct units over every possible choice; expert e lies on the unit of its near-equal block."""
    blocks = np.array_split(np.arange(experts), units)
    unit_of = {int(e): u for u, block in enumerate(blocks) for e in block}
    counts = [len({unit_of[e] for e in chosen}) for chosen in combinations(range(experts), top_k)]
    return float(np.mean(counts))


@pytest.mark.parametrize(
    ("experts", "top_k", "units"), [(8, 2, 4), (8, 3, 2), (10, 4, 4), (6, 2, 6), (5, 2, 8), (7, 7, 3)]
)
def test_uniform_routing_equals_enumeration(experts: int, top_k: int, units: int) -> None:
    assert distinct_units(experts, top_k, units) == pytest.approx(brute_force(experts, top_k, units), rel=1e-12)


@pytest.mark.parametrize(("nodes", "expected"), [(1, 1.0), (2, 1.971), (4, 3.143), (8, 4.0)])
def test_deepseek_v3_nodes(nodes: int, expected: float) -> None:
    # 8 groups, the best 4: n (1 - C(8 - 8/n, 4) / C(8, 4)).
    assert distinct_units(256, 8, nodes, 8, 4) == pytest.approx(expected, abs=5e-4)


def test_qwen3_over_sixteen_ranks_merges_little_per_rank_and_much_per_node() -> None:
    assert distinct_units(128, 8, 16) == pytest.approx(6.6, abs=0.05)
    assert distinct_units(128, 8, 2) == pytest.approx(1.99, abs=0.01)


def test_chosen_groups_are_hit() -> None:
    """Groups ranked by their best expert, as in DeepEP's own test: nearly all of the chosen ones get a copy."""
    scores = np.random.default_rng(0).random((4000, 8, 32))
    best = np.argsort(-scores.max(axis=2), axis=1)[:, :4]
    kept = np.full_like(scores, -1.0)
    for token, groups in enumerate(best):
        kept[token, groups] = scores[token, groups]
    experts = np.argsort(-kept.reshape(len(scores), -1), axis=1)[:, :8]
    measured = np.mean([len(set(row)) for row in (experts // 32).tolist()])
    assert measured == pytest.approx(distinct_units(256, 8, 8, 8, 4), rel=0.01)


@given(st.integers(1, 96), st.integers(1, 12), st.integers(1, 40))
def test_bounds(experts: int, top_k: int, units: int) -> None:
    if top_k <= experts:
        distinct = distinct_units(experts, top_k, units)
        assert 1.0 - 1e-12 <= distinct <= min(top_k, units, experts) + 1e-12


@given(st.integers(0, 3), st.integers(0, 6), st.integers(1, 8), st.integers(1, 8))
def test_group_limited_bounds(log_groups: int, log_units: int, topk_group: int, top_k: int) -> None:
    groups, units = 1 << log_groups, 1 << log_units
    if topk_group > groups or topk_group > top_k:
        return
    limited = distinct_units(256, top_k, units, groups, topk_group)
    assert 1.0 - 1e-12 <= limited <= min(top_k, units) + 1e-12


@pytest.mark.parametrize(("experts", "top_k", "units"), [(8, 9, 2), (8, 0, 2), (8, 2, 0)])
def test_impossible_routing_is_named(experts: int, top_k: int, units: int) -> None:
    with pytest.raises(ValueError, match=f"top-{top_k} of {experts} experts on {units} ranks"):
        distinct_units(experts, top_k, units)


def test_copies_that_kernels_handle() -> None:
    """Top-8 of 128 over 16 ranks: as they are, once per rank (16 x (1 - C(120, 8) / C(128, 8))), or in place."""
    per_rank = 16 * (1 - comb(120, 8) / comb(128, 8))
    none, rank, node = (copy_work(merge, 8, 16, per_rank) for merge in ("none", "rank", "node"))
    assert [(w.packed, w.returned) for w in (none, rank, node)] == [(8, 8), (per_rank, per_rank), (0, 1)]
    assert [w.received(1.0) for w in (none, rank, node)] == [8, per_rank, per_rank]
    # A rank receives a token once at most where copies are merged.
    assert [w.received(3.0) for w in (none, rank, node)] == [24, 16, 16]
