"""1F1B and interleaved orders: Megatron's rule, closed forms, any number of micro-batches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Phase
from disagmoe.plan.orders import groups, interleaved, one_f_one_b, peak_in_flight, stage_program, warmup
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from tests.plan.event_loops import Action, actions, stage_makespan


def leading_forwards(order: list[Action]) -> int:
    return next(i for i, (phase, _, _) in enumerate(order) if phase == "B")


def simulated(orders, p: int, v: int, m: int, forward: float, backward: float) -> float:
    """Makespan of the stage-level Program in the package's own simulator; it must also verify."""
    program = stage_program(orders, p, v, m)
    verify(program)
    return simulate(program, Pricing.ideal(np.where(program.phase == Phase.F, forward, backward))).step_s


def test_megatron_gate_p4_v2() -> None:
    """Per rank and micro-batch F = 1, B = 2, so a chunk takes half of each."""
    orders = interleaved(4, 2, 8)
    plain = [actions(o) for o in orders]
    # Forwards before the first backward: the warm-up and the first of the steady state.
    assert [leading_forwards(o) - 1 for o in plain] == [10, 8, 6, 4]
    assert [warmup(4, 2, r, 4, 16) for r in range(4)] == [10, 8, 6, 4]
    assert [peak_in_flight(o) for o in orders] == [11, 9, 7, 5]
    assert stage_makespan(plain, 2, 0.5, 1.0) == 28.5
    assert simulated(orders, 4, 2, 8, 0.5, 1.0) == 28.5


def test_megatron_table_of_the_first_group() -> None:
    order = actions(interleaved(2, 2, 4)[0])
    # Warm-up 2(p-1) + (v-1)p = 4, then forward and backward in turn.
    assert order[:9] == [
        ("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("F", 1, 1),
        ("F", 0, 2), ("B", 1, 0), ("F", 0, 3), ("B", 1, 1), ("F", 1, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("m", "in_flight"), [(8, [4, 3, 2, 1]), (2, [2, 2, 2, 1])])
def test_1f1b_activations_in_flight(m: int, in_flight: list[int]) -> None:
    assert [peak_in_flight(o) for o in one_f_one_b(4, m)] == in_flight


@pytest.mark.parametrize(("m", "makespan"), [(1, 12.0), (2, 15.0), (3, 18.0)])
def test_fewer_microbatches_than_stages(m: int, makespan: float) -> None:
    """(m + p - 1)(F + B) with p = 4, F = 1, B = 2."""
    orders = one_f_one_b(4, m)
    assert stage_makespan([actions(o) for o in orders], 1, 1.0, 2.0) == makespan
    assert simulated(orders, 4, 1, m, 1.0, 2.0) == makespan


@pytest.mark.parametrize("m", [4, 6, 8, 3])
def test_interleaved_runs_for_any_microbatch_count(m: int) -> None:
    orders = interleaved(4, 2, m)
    plain = [actions(o) for o in orders]
    for order in plain:
        assert Counter(order) == Counter((f, c, b) for f in "FB" for c in range(2) for b in range(m))
        assert all(order.index(("F", c, b)) < order.index(("B", c, b)) for c in range(2) for b in range(m))
    assert stage_makespan(plain, 2, 0.5, 1.0) is not None
    verify(stage_program(orders, 4, 2, m))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_closed_form_of_full_groups(p: int, v: int, rounds: int, forward: int, backward: int) -> None:
    """Step = m(F+B) + (p-1)(F+B)/v where m is a multiple of p; w_r + 1 chunks held."""
    m = rounds * p
    orders = interleaved(p, v, m)
    step = m * v * (forward + backward) + (p - 1) * (forward + backward)  # F, B here are those of a chunk
    assert stage_makespan([actions(o) for o in orders], v, forward, backward) == step
    assert simulated(orders, p, v, m, forward, backward) == step
    for r, order in enumerate(orders):
        wanted = 2 * (p - r - 1) + (v - 1) * p if v > 1 else p - r - 1
        assert peak_in_flight(order) == min(wanted + 1, m * v)


@given(st.integers(1, 8), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_closed_form_of_1f1b(p: int, m: int) -> None:
    orders = one_f_one_b(p, m)
    assert stage_makespan([actions(o) for o in orders], 1, 2.0, 5.0) == (m + p - 1) * 7.0
    assert [peak_in_flight(o) for o in orders] == [min(p - r, m) for r in range(p)]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 40), st.integers(0, 12))
@settings(max_examples=120, deadline=None)
def test_every_shape_runs_and_does_everything_once(p: int, v: int, m: int, more: int) -> None:
    orders = interleaved(p, v, m, p + more)
    plain = [actions(o) for o in orders]
    everything = Counter((f, c, b) for f in "FB" for c in range(v) for b in range(m))
    assert all(Counter(o) == everything for o in plain)
    makespan = stage_makespan(plain, v, 1.0, 2.0)
    assert makespan is not None
    assert makespan == simulated(orders, p, v, m, 1.0, 2.0)


def test_a_short_trailing_group_would_deadlock() -> None:
    """Why the groups are made near-equal: Megatron's literal table with groups of 4 and 1 hangs (p = 4, v = 3)."""
    table = [(c, b) for group in ([0, 1, 2, 3], [4]) for c in range(3) for b in group]
    forward = [("F", c, b) for c, b in table]
    backward = [("B", 2 - c, b) for c, b in table]
    plain = []
    for r in range(4):
        warm = 2 * (4 - r - 1) + 2 * 4
        steady = [x for pair in zip(forward[warm:], backward, strict=False) for x in pair]
        plain.append(forward[:warm] + steady + backward[len(forward) - warm :])
    assert stage_makespan(plain, 3, 1.0, 2.0) is None
    assert stage_makespan([actions(o) for o in interleaved(4, 3, 5)], 3, 1.0, 2.0) is not None


@pytest.mark.parametrize(
    ("m", "p", "group", "sizes"),
    [
        (8, 4, 4, (4, 4)),  # Megatron's rule
        (14, 4, 5, (5, 5, 4)),  # trailing group of at least p
        (10, 4, 4, (5, 5)),  # a trailing group of 2 < p: near-equal
        (13, 4, 6, (5, 4, 4)),  # ... and none above the group asked for where that is possible
        (3, 4, 4, (3,)),
        (5, 4, 8, (5,)),
    ],
)
def test_groups(m: int, p: int, group: int, sizes: tuple[int, ...]) -> None:
    assert groups(m, p, group) == sizes


@given(st.integers(1, 200), st.integers(1, 16), st.integers(0, 40))
def test_groups_rule(m: int, p: int, more: int) -> None:
    group = p + more
    sizes = groups(m, p, group)
    assert sum(sizes) == m
    assert min(sizes) >= min(m, p)
    if m % group == 0 or m % group >= p:
        assert set(sizes[:-1]) <= {group}
        assert sizes[-1] == (m % group or group)
    else:
        assert max(sizes) - min(sizes) <= 1
        assert m >= p or len(sizes) == 1


def test_errors_name_the_rule() -> None:
    with pytest.raises(ValueError, match=r"group size 3 .* 4 stages .* at least 4"):
        interleaved(4, 2, 8, 3)
    with pytest.raises(ValueError, match=r"micro-batches \(m\) = 0: must be at least 1"):
        one_f_one_b(4, 0)
    with pytest.raises(ValueError, match=r"virtual stages \(v\) = 0"):
        interleaved(4, 0, 8)


def test_stage_program_numbers_virtual_stages() -> None:
    program = stage_program(interleaved(2, 3, 4), 2, 3, 4)
    assert (program.n_workers, program.n_layers, program.n_microbatches, len(program)) == (2, 6, 4, 2 * 6 * 4)
    assert sorted(set(program.layer[program.worker == 1].tolist())) == [1, 3, 5]
