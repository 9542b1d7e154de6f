"""Schedules whose step time is known in closed form, without contention (all factors 1)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program, Row
from disagmoe.simulator import simulate
from disagmoe.timeline.metrics import worker_metrics
from disagmoe.timeline.timeline import Timeline

Step = tuple[Phase, int, int]  # phase, chunk, micro-batch

F, B = Phase.F, Phase.B
times = st.floats(0.01, 10.0)


def stages(orders: list[list[Step]], v: int, m: int, forward_s: float, backward_s: float) -> Timeline:
    """Simulate a stage-level order per rank; a chunk takes forward_s or backward_s."""
    p = len(orders)
    rows = [
        Row(rank, Stream.COMPUTE, Op(Kind.STAGE, phase, chunk * p + rank, microbatch))
        for rank, order in enumerate(orders)
        for phase, chunk, microbatch in order
    ]
    program = Program.from_rows(rows, n_workers=p, n_layers=p * v, n_microbatches=m)
    duration = np.where(program.phase == int(F), forward_s, backward_s)
    return simulate(program, Pricing.ideal(duration))


def one_f_one_b(p: int, m: int) -> list[list[Step]]:
    """Classic 1F1B: p - rank - 1 forwards ahead, then one forward and one backward in turn."""
    orders = []
    for rank in range(p):
        ahead = min(p - rank - 1, m)
        order: list[Step] = [(F, 0, i) for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                order.append((F, 0, ahead + i))
            order.append((B, 0, i))
        orders.append(order)
    return orders


def interleaved(p: int, v: int, m: int) -> list[list[Step]]:
    """Megatron's interleaved 1F1B with groups of p micro-batches (m divisible by p)."""
    table = [(c, g + i) for g in range(0, m, p) for c in range(v) for i in range(p)]
    orders = []
    for rank in range(p):
        ahead = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        order: list[Step] = [(F, c, i) for c, i in table[:ahead]]
        for j in range(m * v):
            if ahead + j < m * v:
                order.append((F, *table[ahead + j]))
            order.append((B, v - 1 - table[j][0], table[j][1]))
        orders.append(order)
    return orders


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20), times, times)
def test_one_f_one_b(p: int, m: int, forward_s: float, backward_s: float) -> None:
    if m < p:
        m += p - 1
    step = stages(one_f_one_b(p, m), 1, m, forward_s, backward_s).step_s
    assert step == pytest.approx((m + p - 1) * (forward_s + backward_s), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), times, times)
def test_interleaved(p: int, v: int, groups: int, forward_s: float, backward_s: float) -> None:
    """Bubble (p - 1)(F + B) / v on every rank, with F and B the times of all v chunks."""
    m = p * groups
    timeline = stages(interleaved(p, v, m), v, m, forward_s / v, backward_s / v)
    bubble = (p - 1) * (forward_s + backward_s) / v
    assert timeline.step_s == pytest.approx(m * (forward_s + backward_s) + bubble, rel=1e-12)
    for metrics in worker_metrics(timeline):
        assert metrics.bubble_s == pytest.approx(bubble, rel=1e-9, abs=1e-9)


def test_interleaved_published_case() -> None:
    """p=4, v=2, m=8, F=1, B=2: 28.5."""
    assert stages(interleaved(4, 2, 8), 2, 8, 0.5, 1.0).step_s == 28.5


def chunked_layer(d: int, dispatch_s: float, experts_s: float, combine_s: float) -> Timeline:
    """Tutel's overlap: all dispatch chunks, then all combine chunks on one stream; experts on another."""
    rows = [Row(0, Stream.COLL, Op(Kind.DISPATCH, F, 0, 0, c)) for c in range(d)]
    rows += [Row(0, Stream.COLL, Op(Kind.COMBINE, F, 0, 0, c)) for c in range(d)]
    rows += [Row(0, Stream.COMPUTE, Op(Kind.FFN, F, 0, 0, c)) for c in range(d)]
    program = Program.from_rows(rows, n_workers=1, n_layers=1, n_microbatches=1, n_chunks=d)
    seconds = {Kind.DISPATCH: dispatch_s, Kind.FFN: experts_s, Kind.COMBINE: combine_s}
    return simulate(program, Pricing.ideal(np.array([seconds[Kind(k)] for k in program.kind])))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 32), times, times, times)
def test_chunked_dispatch_experts_combine(d: int, dispatch_s: float, experts_s: float, combine_s: float) -> None:
    timeline = chunked_layer(d, dispatch_s, experts_s, combine_s)
    expected = max(
        d * (dispatch_s + combine_s),
        dispatch_s + experts_s + d * combine_s,
        dispatch_s + d * experts_s + combine_s,
        d * dispatch_s + experts_s + combine_s,
    )
    assert timeline.step_s == pytest.approx(expected, rel=1e-12)
    (metrics,) = worker_metrics(timeline)
    assert metrics.stall_s == pytest.approx(expected - d * experts_s, rel=1e-9, abs=1e-9 * expected)


def test_two_equal_chunks_hide_half_of_the_communication() -> None:
    """d=2 and t_D = t_C = t_E = c: T = 2c with c of the 2c of communication exposed."""
    c = 3.0
    timeline = chunked_layer(2, c / 2, c / 2, c / 2)
    (metrics,) = worker_metrics(timeline)
    assert timeline.step_s == 2 * c
    assert (metrics.exposed_s, metrics.overlapped_s, metrics.bubble_s) == (c, c, 0.0)
    assert metrics.exposed_by_kind_s == {"dispatch": c / 2, "combine": c / 2, "p2p": 0.0, "grad_sync": 0.0}
