"""Combined 1F1B: Megatron's warm-up + 1, closed form and its conditions, the deadlock without the + 1."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Kind, Phase
from disagmoe.plan.combined import (
    combined_orders,
    combined_program,
    combined_stage_program,
    combined_warmup,
    merged,
    ring_stages,
)
from disagmoe.plan.dependencies import PlanError
from disagmoe.plan.orders import grouped_table
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.units import peak_in_flight, unit_program, unit_seconds
from disagmoe.plan.verify import verify
from disagmoe.simulator import DeadlockError, simulate
from tests.plan.unit_loops import makespan, units


def step_s(program: Program, forward: float, backward: float, pair: float) -> float:
    return simulate(program, Pricing.ideal(unit_seconds(program, forward=forward, backward=backward, pair=pair))).step_s


def closed_form(p: int, v: int, m: int, forward: float, backward: float, pair: float) -> float:
    """(p-1)(F+B)/v + [w(F+B) + (mv-w)FB]/v, w = (v-1)p + 1, with F, B and FB of one chunk."""
    w = (v - 1) * p + 1
    return (p - 1) * (forward + backward) + w * (forward + backward) + (m * v - w) * pair


def test_megatron_gate_p4_v2() -> None:
    """Per rank and micro-batch F = 1, B = 2, FB = 2.4: a chunk takes half of each."""
    program = combined_stage_program(4, 2, 8)
    verify(program)
    assert step_s(program, 0.5, 1.0, 1.2) == pytest.approx(25.2, abs=1e-12)
    assert step_s(program, 0.5, 1.0, 1.5) == 28.5  # FB = F + B: as without overlap
    assert [combined_warmup(4, 2, r, 4, 16) for r in range(4)] == [11, 9, 7, 5]
    orders = combined_orders(4, 2, 8)
    assert [int(o.paired.argmax()) for o in orders] == [11, 9, 7, 5]
    assert [int(o.paired.sum()) for o in orders] == [16 - w for w in (11, 9, 7, 5)]
    assert [peak_in_flight(o) for o in orders] == [12, 10, 8, 6]


@pytest.mark.parametrize(("v", "wanted"), [(2, 181.2), (4, 172.2), (6, 169.2), (8, 167.7)])
def test_step_at_p16_n64(v: int, wanted: float) -> None:
    """F = 1, B = 2, FB = 2.4 per rank and micro-batch; ideal 64 x 2.4 = 153.6."""
    assert step_s(combined_stage_program(16, v, 64), 1 / v, 2 / v, 2.4 / v) == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=200)
@given(
    st.integers(1, 8), st.integers(1, 5), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(0, 12)
)
def test_closed_form(p: int, v: int, rounds: int, forward: int, backward: int, more: int) -> None:
    """Exact where m is a multiple of p, groups have p, and a pair takes at least the longer of its parts."""
    pair = max(forward, backward) + more
    m = rounds * p
    assert step_s(combined_stage_program(p, v, m), forward, backward, pair) == closed_form(
        p, v, m, forward, backward, pair
    )


@pytest.mark.parametrize(
    ("condition", "m", "group", "pair", "wanted"),
    [
        ("m mod p = 0", 6, 4, 12, 210),
        ("groups of p", 16, 6, 12, 450),
        ("FB >= max(F, B)", 8, 4, 8, 214),
    ],
)
def test_closed_form_fails_without(condition: str, m: int, group: int, pair: int, wanted: int) -> None:
    """Chunk times F = 5, B = 10 on p = 4, v = 2: each condition alone is missed, and the formula fails."""
    found = step_s(combined_stage_program(4, 2, m, group), 5, 10, pair)
    plain = [units(o, w, ring_stages(4, 2)) for w, o in enumerate(combined_orders(4, 2, m, group))]
    reference = makespan(plain, 8, lambda u: pair if len(u) == 2 else {"F": 5, "B": 10}[u[0][0]])
    assert found == wanted == reference, condition
    assert found > closed_form(4, 2, m, 5, 10, pair)
    assert step_s(combined_stage_program(4, 2, 8), 5, 10, 12) == closed_form(4, 2, 8, 5, 10, 12)


def unshifted(p: int, v: int, m: int) -> Program:
    """Pairs with the plain interleaved warm-up, one forward less."""
    chunk, microbatch = grouped_table(v, [p] * (m // p))
    orders = [merged(chunk, microbatch, v, 2 * (p - r - 1) + (v - 1) * p) for r in range(p)]
    return unit_program(orders, ring_stages(p, v), m)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (2, 2, 4), (3, 3, 9), (8, 4, 16)])
def test_without_the_extra_forward_it_deadlocks(p: int, v: int, m: int) -> None:
    program = unshifted(p, v, m)
    with pytest.raises(DeadlockError, match=r"deadlock, \d+ of \d+ operations left"):
        step_s(program, 1.0, 2.0, 2.4)
    last = p * v - 1
    with pytest.raises(PlanError, match=rf"pair \d+ \(S{last}F0@w{p - 1} S{last}B0@w{p - 1}\) .* same micro-batch"):
        verify(program)


def test_one_rank_is_the_path_without_pipelining() -> None:
    """F_0, then (F_1 beside B_0), (F_2 beside B_1), then the last B."""
    (order,) = combined_orders(1, 1, 3)
    assert units(order, 0, ring_stages(1, 1)) == [
        (("F", 0, 0, 0),),
        (("F", 0, 1, 0), ("B", 0, 0, 0)),
        (("F", 0, 2, 0), ("B", 0, 1, 0)),
        (("B", 0, 2, 0),),
    ]


@settings(max_examples=100)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20), st.integers(0, 5), st.integers(1, 9))
def test_any_shape_runs_as_the_reference(p: int, v: int, m: int, more: int, pair: int) -> None:
    program = combined_stage_program(p, v, m, p + more)
    verify(program)
    orders = combined_orders(p, v, m, p + more)
    plain = [units(o, w, ring_stages(p, v)) for w, o in enumerate(orders)]
    for w, order in enumerate(plain):
        done = Counter(action[:3] for unit in order for action in unit)
        assert done == Counter((x, c * p + w, b) for x in "FB" for c in range(v) for b in range(m))
    reference = makespan(plain, p * v, lambda u: pair if len(u) == 2 else {"F": 3, "B": 7}[u[0][0]])
    assert reference == step_s(program, 3, 7, pair)


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 9),
    st.lists(st.integers(1, 3), min_size=12, max_size=12),
    st.integers(0, 2),
)
def test_layer_programs_are_sound(p: int, v: int, m: int, counts: list[int], dense: int) -> None:
    """verify passes, everything runs, and compute alone takes what it would without pairs."""
    bounds = np.concatenate(([0], np.cumsum(counts[: p * v])))
    stages = [list(range(a, b)) for a, b in pairwise(bounds.tolist())]
    moe = [layer >= dense for layer in range(int(bounds[-1]))]
    program = combined_program(p=p, v=v, m=m, group=None, stage_layers=stages, moe=moe)
    verify(program)
    work = np.isin(program.kind, (Kind.ATTN, Kind.FFN))
    seconds = np.where(work, np.where(program.phase == Phase.F, 1.0, 2.0), 0.0)
    seconds = np.where(work & np.isin(program.phase, (Phase.I, Phase.W)), 1.0, seconds)
    timeline = simulate(program, Pricing.ideal(seconds))
    busy = np.bincount(program.worker, weights=seconds, minlength=p)
    np.testing.assert_array_equal(busy, [m * 6 * sum(len(stages[c * p + r]) for c in range(v)) for r in range(p)])
    assert timeline.step_s >= busy.max()


def test_errors_name_the_rule() -> None:
    with pytest.raises(ValueError, match=r"micro-batches \(m\) = 0: must be at least 1"):
        combined_orders(4, 2, 0)
    with pytest.raises(ValueError, match=r"group size 3 .* at least 4"):
        combined_orders(4, 2, 8, 3)
    with pytest.raises(ValueError, match="stage_layers has 3 stages; 4 virtual stages are needed"):
        combined_program(p=2, v=2, m=4, group=None, stage_layers=[[0], [1], [2]], moe=[True] * 3)
    with pytest.raises(ValueError, match="leave a stage empty"):
        combined_program(p=2, v=1, m=4, group=None, stage_layers=[[0], []], moe=[True])
    with pytest.raises(ValueError, match=r"layers 0\.\.1 once each, in order"):
        combined_program(p=2, v=1, m=4, group=None, stage_layers=[[1], [0]], moe=[True] * 2)
