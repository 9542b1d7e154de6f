"""Rings with any map of layers to groups: balanced maps, unequal depths, sound Programs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.af_mapped import Clock, balanced_groups, mapped_program
from disagmoe.plan.af_pipe import ORDERS, af_pipe_program
from disagmoe.plan.memory_timeline import in_flight
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.split_backward import split_backward
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate


def test_layers_of_one_kind_stay_where_the_paper_has_them() -> None:
    for groups, layers in ((1, 5), (2, 7), (4, 6), (3, 9)):
        assert balanced_groups([1.0] * layers, groups) == tuple(layer % groups for layer in range(layers))


def test_alternating_layers_are_spread_over_even_groups() -> None:
    """Every second layer is heavy: modulo puts all of them on half of the groups."""
    loads = [1.0, 3.0] * 6
    modulo = [sum(loads[g::4]) for g in range(4)]
    groups = balanced_groups(loads, 4)
    held = [sum(load for load, g in zip(loads, groups, strict=True) if g == group) for group in range(4)]
    assert max(modulo) == 9.0 and sum(loads) / 4 == 6.0
    assert max(held) <= 7.0
    for first in range(0, 12, 4):
        assert sorted(groups[first : first + 4]) == [0, 1, 2, 3]


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=12), st.integers(1, 4))
def test_balanced_is_never_worse_than_the_worst_round_by_round_choice(loads: list[float], groups: int) -> None:
    found = balanced_groups(loads, groups)
    held = [sum(load for load, g in zip(loads, found, strict=True) if g == group) for group in range(groups)]
    # Heaviest to least loaded: the spread of the groups never exceeds the heaviest layer.
    assert max(held) - min(held) <= max(loads) + 1e-9
    for first in range(0, len(loads), groups):
        part = found[first : first + groups]
        assert len(set(part)) == len(part)


def maps(p_a: int, p_f: int, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(layer % p_a for layer in range(layers)), tuple(p_a + layer % p_f for layer in range(layers))


@settings(max_examples=60, deadline=None)
@given(
    p_a=st.integers(1, 4),
    p_f=st.integers(1, 4),
    more=st.integers(0, 6),
    m=st.integers(1, 9),
    order=st.sampled_from(ORDERS),
    head=st.sampled_from(["last_f", "spread"]),
    again=st.sampled_from([(), (Kind.ATTN,), (Kind.ATTN, Kind.FFN)]),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_any_map_gives_a_sound_program(
    p_a: int,
    p_f: int,
    more: int,
    m: int,
    order: str,
    head: str,
    again: tuple[Kind, ...],
    seed: int,
    data: st.DataObject,
) -> None:
    layers = max(p_a, p_f) + more
    attn, ffn = maps(p_a, p_f, layers)
    attn = tuple(data.draw(st.permutations(attn)))
    depth = data.draw(st.sampled_from(sorted({p_a, p_f})))
    group = data.draw(st.integers(2 * depth, 4 * depth))
    try:
        program = mapped_program(attn=attn, ffn=ffn, m=m, clock=Clock(depth, group, order), head=head, recompute=again)
    except ValueError:  # an (order, group) pair that would deadlock in the paper's ring too
        with pytest.raises(ValueError, match="wait for each other"):
            af_pipe_program(p=depth, layers=layers, m=m, group=group, order=order)
        return
    verify(program, recompute=again)
    rng = np.random.default_rng(seed)
    seconds = Pricing.ideal(rng.uniform(0.5, 1.5, len(Kind))[program.kind])
    assert simulate(program, seconds).step_s > 0.0
    verify(split_backward(program, 1), recompute=again)
    # Attention of every layer is where the map says.
    for layer, worker in itertools.product(range(layers), range(program.n_workers)):
        rows = (program.kind == int(Kind.ATTN)) & (program.layer == layer) & (program.worker == worker)
        assert rows.any() == (attn[layer] == worker)


def compute_rows(program: Program, worker: int) -> list[tuple[int, ...]]:
    rows = program.stream_rows(worker, Stream.COMPUTE)
    return [
        (int(program.kind[r]), int(program.phase[r]), int(program.layer[r]), int(program.microbatch[r])) for r in rows
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_the_papers_map_holds_about_what_the_papers_order_holds(order: str) -> None:
    attn, ffn = maps(2, 2, 8)
    mapped = mapped_program(attn=attn, ffn=ffn, m=12, clock=Clock(2, 4, order))
    plain = af_pipe_program(p=2, layers=8, m=12, group=4, order=order)
    assert sorted(compute_rows(mapped, 0)) == sorted(compute_rows(plain, 0))
    more = np.array(in_flight(mapped)) - np.array(in_flight(plain))
    assert abs(more).max() <= 4


def test_half_as_deep_attention_works_twice_as_much_per_group() -> None:
    attn, ffn = maps(1, 2, 6)
    program = mapped_program(attn=attn, ffn=ffn, m=4, clock=Clock(2, 4, "comm_stage"))
    forward = (program.kind == int(Kind.ATTN)) & (program.phase == int(Phase.F))
    assert np.bincount(program.worker[forward], minlength=3).tolist() == [24, 0, 0]
    experts = (program.kind == int(Kind.FFN)) & (program.phase == int(Phase.F))
    assert np.bincount(program.worker[experts], minlength=3).tolist() == [0, 12, 12]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head": "next_a"}, "next_a"),
        ({"attn": (0, 2)}, "without gaps"),
        ({"attn": (0,)}, "maps of 1 and 2 layers"),
        ({"ffn": (2, 2)}, "without gaps"),
        ({"recompute": (Kind.ATTN, Kind.DISPATCH, Kind.FFN)}, "recompute_tokens=keep"),
    ],
)
def test_what_is_not_a_ring_is_refused(changes: dict[str, object], text: str) -> None:
    given_: dict[str, object] = {"attn": (0, 0), "ffn": (1, 1), "m": 2, "clock": Clock(1, 2, "megatron"), **changes}
    with pytest.raises(ValueError, match=text):
        mapped_program(**given_)  # type: ignore[arg-type]
