"""Dealing layers to virtual stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.plan.split import interleaved_ranks, split_layers


def rank_loads(
    stages: tuple[tuple[int, ...], ...], loads: list[float], ranks: tuple[int, ...], head: float = 0.0
) -> list[float]:
    total = [0.0] * (max(ranks) + 1)
    for stage, rank in zip(stages, ranks, strict=True):
        total[rank] += sum(loads[layer] for layer in stage)
    total[ranks[-1]] += head
    return total


def best_possible(loads: list[float], ranks: tuple[int, ...], head: float) -> float:
    """Exhaustive search over all cut points."""
    n = len(loads)
    best = float("inf")
    for cuts in combinations(range(1, n), len(ranks) - 1):
        bounds = [0, *cuts, n]
        stages = tuple(tuple(range(a, b)) for a, b in pairwise(bounds))
        best = min(best, max(rank_loads(stages, loads, ranks, head)))
    return best


@given(p=st.integers(1, 8), v=st.integers(1, 8), extra=st.integers(0, 60), head=st.floats(0.0, 6.0))
def test_every_layer_once_in_order_and_no_empty_stage(p: int, v: int, extra: int, head: float) -> None:
    layers = p * v + extra
    stages = split_layers([1.0] * layers, interleaved_ranks(p, v), head_load=head)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert len(stages) == p * v
    assert min(len(stage) for stage in stages) >= 1


@given(p=st.integers(1, 8), v=st.integers(1, 6), extra=st.integers(0, 60))
def test_ranks_without_head_differ_by_one_layer_at_most(p: int, v: int, extra: int) -> None:
    ranks = interleaved_ranks(p, v)
    loads = [1.0] * (p * v + extra)
    per_rank = rank_loads(split_layers(loads, ranks), loads, ranks)
    assert max(per_rank) - min(per_rank) <= 1


def test_head_takes_layers_from_the_last_rank() -> None:
    # 32 layers + a head worth 4 = 36 units on 4 ranks: 9 each, so the last rank gets 5 layers.
    ranks = interleaved_ranks(4, 2)
    stages = split_layers([1.0] * 32, ranks, head_load=4.0)
    assert rank_loads(stages, [1.0] * 32, ranks) == [9, 9, 9, 5]


def test_stages_of_a_rank_are_near_equal() -> None:
    assert {len(s) for s in split_layers([1.0] * 94, interleaved_ranks(8, 3))} == {3, 4}


def test_alternating_layers_do_not_pile_up_on_one_rank() -> None:
    # One layer per stage, windowed (1) and full (3) alternating, p even: the full ones would all land on odd ranks.
    loads = [1.0, 3.0] * 6
    ranks = interleaved_ranks(2, 3)
    assert max(rank_loads(split_layers(loads, ranks), loads, ranks)) == best_possible(loads, ranks, 0.0)


@settings(max_examples=200, deadline=None)
@given(
    loads=st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0, 4.0]), min_size=6, max_size=10),
    shape=st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3)]),
    head=st.floats(0.0, 4.0),
)
def test_close_to_exhaustive_search(loads: list[float], shape: tuple[int, int], head: float) -> None:
    ranks = interleaved_ranks(*shape)
    found = max(rank_loads(split_layers(loads, ranks, head_load=head), loads, ranks, head))
    assert found <= best_possible(loads, ranks, head) + max(loads)


def test_a_bidirectional_pipeline_balances_the_two_stages_of_a_rank() -> None:
    # DualPipe: stage s and stage 3 - s share a rank; the head (4) belongs to the pair (0, 3).
    ranks = (0, 1, 1, 0)
    loads = [1.0] * 20
    stages = split_layers(loads, ranks, head_load=4.0)
    assert rank_loads(stages, loads, ranks, 4.0) == [12.0, 12.0]


def test_too_few_layers_name_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"7 layers cannot fill 8 virtual stages"):
        split_layers([1.0] * 7, interleaved_ranks(4, 2))
