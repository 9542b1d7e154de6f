"""Dealing layers to virtual stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.plan.split import split_layers


def loads(stages: tuple[tuple[int, ...], ...], p: int) -> list[int]:
    return [sum(len(s) for s in stages[r::p]) for r in range(p)]


@given(p=st.integers(1, 8), v=st.integers(1, 8), extra=st.integers(0, 60), head=st.floats(0.0, 6.0))
def test_every_layer_once_in_order_and_no_empty_stage(p: int, v: int, extra: int, head: float) -> None:
    layers = p * v + extra
    stages = split_layers(layers, p, v, head_load=head)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert len(stages) == p * v
    assert min(len(stage) for stage in stages) >= 1


@given(p=st.integers(1, 8), v=st.integers(1, 6), extra=st.integers(0, 60))
def test_ranks_without_head_differ_by_one_layer_at_most(p: int, v: int, extra: int) -> None:
    per_rank = loads(split_layers(p * v + extra, p, v), p)
    assert max(per_rank) - min(per_rank) <= 1


def test_head_takes_layers_from_the_last_rank() -> None:
    # 32 layers + a head worth 4 = 36 units on 4 ranks: 9 each, so the last rank gets 5 layers.
    assert loads(split_layers(32, 4, 2, head_load=4.0), 4) == [9, 9, 9, 5]


def test_stages_of_a_rank_are_near_equal() -> None:
    stages = split_layers(94, 8, 3)
    assert {len(s) for s in stages} == {3, 4}


def test_too_few_layers_name_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"7 layers cannot fill pp 4 x virtual 2 = 8 stages"):
        split_layers(7, 4, 2)
