"""AF-Pipe: placement, completeness, freedom from deadlock over the whole space, makespans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.kernels import record_transfers
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.af_pipe import ORDERS, af_orders, af_pipe_program, in_flight
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.verify import PlanError, verify
from disagmoe.simulator import simulate
from tests.plan.event_loops import AfOp, actions, af_chain, af_run, af_streams

Shape = tuple[int, int, int, int, str]  # p, layers, micro-batches, group, order


def build(shape: Shape) -> Program:
    p, layers, m, group, order = shape
    return af_pipe_program(p=p, layers=layers, m=m, group=group, order=order)


def space() -> Iterator[Shape]:
    """Every different Program with p <= 6, L <= 24, n <= 40.

    Group sizes that cut the micro-batches alike give one Program where there are
    several chunks (the number of groups decides the cut), and one with a single
    chunk unless transfers have slots of their own.
    """
    for p in range(1, 7):
        for m in range(1, 41):
            sizes = range(4 * p, 2 * p - 1, -1)
            cuts = {max(1, min(-(-m // group), m // (2 * p))): group for group in sizes}
            for layers in range(1, 25):
                yield from ((p, layers, m, group, "megatron") for group in cuts.values())
                yield from ((p, layers, m, group, "comm_stage") for group in (sizes if layers <= p else cuts.values()))


shapes = st.integers(1, 6).flatmap(
    lambda p: st.tuples(
        st.just(p), st.integers(1, 24), st.integers(1, 40), st.integers(2 * p, 4 * p), st.sampled_from(ORDERS)
    )
)


def seconds(transfer: float, head: float = 0.0, reduction: float | None = None):
    """Forward 1, backward 2, every transfer `transfer`, the reduction before the head `reduction`."""

    def of(op: AfOp) -> float:
        kind, phase, _, _ = op
        twice = 2.0 if phase == Phase.B else 1.0
        return {Kind.ATTN: twice, Kind.FFN: twice, Kind.HEAD: head * twice, Kind.EMBED: 0.0}.get(kind, transfer)

    return of


def ratio(shape: Shape, transfer: float) -> float:
    """Makespan divided by the compute time of the busiest worker, by the reference loop."""
    p, layers, m, _, _ = shape
    price = seconds(transfer)

    def of(op: AfOp) -> float:  # the in-group reduction after the last layer is no transfer
        return 0.0 if op[0] == Kind.COMBINE and op[2] == layers - 1 else price(op)

    end = af_run(af_streams(build(shape)), layers, m, of)
    assert end is not None
    return max(end.values()) / (3.0 * m * -(-layers // p))


@given(shapes)
@settings(max_examples=40, deadline=None)
def test_every_operation_once_on_its_worker(shape: Shape) -> None:
    p, layers, m, _, _ = shape
    streams = af_streams(build(shape))
    found = Counter((w, s, op) for (w, s), ops in streams.items() for op in ops)
    wanted: Counter[tuple[int, Stream, AfOp]] = Counter()
    for op in (op for b in range(m) for op in af_chain(layers, b)):
        kind, phase, layer, _ = op
        if kind in (Kind.ATTN, Kind.FFN):
            wanted[layer % p + (p if kind == Kind.FFN else 0), Stream.COMPUTE, op] += 1
        elif kind in (Kind.EMBED, Kind.HEAD):
            wanted[0 if kind == Kind.EMBED else p + (layers - 1) % p, Stream.COMPUTE, op] += 1
        elif kind == Kind.COMBINE and layer == layers - 1:
            wanted[p + layer % p, Stream.COLL, op] += 1
        else:
            ends = [layer % p, p + layer % p] if kind == Kind.DISPATCH else [p + layer % p, (layer + 1) % p]
            sender, receiver = ends if phase == Phase.F else ends[::-1]
            wanted[sender, Stream.SEND, op] += 1
            wanted[receiver, Stream.RECV, op] += 1
    assert found == wanted


@given(shapes)
@settings(max_examples=25, deadline=None)
def test_reference_loop_and_simulator_agree(shape: Shape) -> None:
    """No shape deadlocks, and both loops find the same end of the last micro-batch."""
    _, layers, m, _, _ = shape
    program = build(shape)
    price = seconds(0.75, head=1.5)
    end = af_run(af_streams(program), layers, m, price)
    assert end is not None
    durations = np.array(
        [
            price((r.op.kind, r.op.phase, r.op.layer, r.op.microbatch)) if r.op.microbatch >= 0 else 0.0
            for r in program.rows()
        ]
    )
    # On a link of its own, as the reference loop knows no sharing: the reduction before the head.
    pricing = replace(Pricing.ideal(durations), link=(program.stream == Stream.COLL).astype(np.int8))
    assert simulate(program, pricing).step_s == pytest.approx(max(end.values()), abs=1e-9)


def test_sample_of_the_space_verifies() -> None:
    """Every 53rd shape, in which every p, L and n occurs; the slow test takes them all."""
    checked = [shape for i, shape in enumerate(space()) if i % 53 == 0]
    for shape in checked:
        verify(build(shape))
    assert len(checked) == 540
    assert {s[0] for s in checked} == set(range(1, 7))
    assert {s[1] for s in checked} == set(range(1, 25))
    assert {s[2] for s in checked} == set(range(1, 41))


@pytest.mark.slow
def test_whole_space_verifies() -> None:
    count = 0
    for shape in space():
        verify(build(shape))
        count += 1
    assert count == 28618


def test_production_and_consumption_order_deadlocks() -> None:
    """Why transfers have a common order: sent as produced and received as consumed, groups above 2p hang."""
    shape = (2, 4, 16, 8, "megatron")
    streams = af_streams(build(shape))
    after: dict[AfOp, AfOp] = {}
    for b in range(16):
        chain = af_chain(4, b)
        after.update(pairwise(chain))
    before = {op: previous for previous, op in after.items()}
    for worker in range(4):
        at = {op: i for i, op in enumerate(streams[worker, Stream.COMPUTE])}
        streams[worker, Stream.SEND].sort(key=lambda op, at=at: at[before[op]])
        streams[worker, Stream.RECV].sort(key=lambda op, at=at: at[after[op]])
    assert af_run(streams, 4, 16, seconds(0.5)) is None


def test_recording_reports_orders_that_wait_for_each_other() -> None:
    """Two workers, two micro-batches, chain 0 -> 1 -> 0: worker 1 wants b = 1 first, worker 0 finishes b = 0 first."""
    home = np.array([0, 1, 0])
    first = np.array([0, 4, 6])
    step = np.array([0, 2, 0, 2, 1, 1])
    sent, left = record_transfers(first, step, np.array([0, 0, 1, 1, 0, 1]), home, 2)
    assert left == 0
    assert sent.tolist() == [[1, 6], [3, 8], [-1, -1]]  # b = 0: run 0, send 1, run 2, send 3, run 4; then b = 1
    _, left = record_transfers(first, step, np.array([0, 0, 1, 1, 1, 0]), home, 2)
    assert left == 5


def test_swapped_receive_is_found() -> None:
    program = build((2, 4, 8, 4, "megatron"))
    rows = program.stream_rows(2, Stream.RECV)
    first, second = [int(i) for i in rows if program.peer[i] == 0][:2]
    program.microbatch[[first, second]] = program.microbatch[[second, first]]
    program.layer[[first, second]] = program.layer[[second, first]]
    with pytest.raises(PlanError):
        verify(program)


@pytest.mark.parametrize(
    ("p", "layers", "m", "transfer", "padded", "own_stage"),
    [(2, 4, 16, 0.5, 1.35, 1.17), (2, 8, 32, 0.5, 1.18, 1.09), (4, 16, 32, 1.0, 1.37, 1.15)],
)
def test_makespans_of_the_study(p: int, layers: int, m: int, transfer: float, padded: float, own_stage: float) -> None:
    """Makespan over busiest worker, not above an independent study's for either order."""
    assert ratio((p, layers, m, 2 * p, "megatron"), transfer) <= padded
    assert ratio((p, layers, m, 4 * p, "comm_stage"), transfer) <= own_stage


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_free_transfers_give_the_interleaved_closed_form(p: int, v: int, rounds: int) -> None:
    """2p stages of v chunks each: m v (F+B) + (2p-1)(F+B) per chunk, with F = 1 and B = 2."""
    m = rounds * 2 * p
    end = af_run(af_streams(build((p, p * v, m, 2 * p, "megatron"))), p * v, m, seconds(0.0))
    assert end is not None
    assert max(end.values()) == 3 * m * v + 3 * (2 * p - 1)


def test_warm_up_of_both_orders() -> None:
    """2(R - position - 1) + (v-1)Ng with R = 2p slots, or 4p and positions 4g (A) and 4g + 2 (F)."""
    p, v, m, group = 3, 4, 24, 12

    def leading(order: str) -> list[int]:
        plain = [actions(o) for o in af_orders(p, v, m, group, order)]
        return [next(i for i, a in enumerate(o) if a[0] == "B") - 1 for o in plain]

    base = (v - 1) * group
    assert leading("megatron") == [base + 2 * (6 - at - 1) for at in (0, 2, 4, 1, 3, 5)]
    assert leading("comm_stage") == [base + 2 * (12 - at - 1) for at in (0, 4, 8, 2, 6, 10)]
    assert in_flight(p, v, m, group, "megatron") == tuple(w + 1 for w in leading("megatron"))


def test_head_runs_whole_and_between_the_passes() -> None:
    """Forward and backward of the head are neighbours; other work fills both reductions around it."""
    p, layers, m = 2, 8, 16
    streams = af_streams(build((p, layers, m, 4 * p, "comm_stage")))
    order = streams[p + (layers - 1) % p, Stream.COMPUTE]
    at = {op: i for i, op in enumerate(order)}
    for b in range(m):
        head = at[Kind.HEAD, Phase.F, -1, b]
        assert order[head + 1] == (Kind.HEAD, Phase.B, -1, b)
        assert at[Kind.FFN, Phase.F, layers - 1, b] < head - 1
        assert head + 2 < at[Kind.FFN, Phase.B, layers - 1, b]


def test_tail_of_every_worker() -> None:
    """L = 5, p = 2: A_0 holds 0, 2, 4 and the embedding, F_0 the same layers and the head."""
    program = build((2, 5, 8, 4, "megatron"))

    def sync(worker: int) -> list[tuple[Phase, int]]:
        ops = [program.op(int(i)) for i in program.stream_rows(worker, Stream.SYNC)]
        return [(o.phase, o.layer) for o in ops]

    for worker in (0, 2):
        assert sync(worker) == [(Phase.B, 4), (Phase.B, 2), (Phase.B, 0), (Phase.B, -1), (Phase.F, -1)]
    for worker in (1, 3):
        assert sync(worker) == [(Phase.B, 3), (Phase.B, 1), (Phase.F, -1)]
    assert all(program.kind[program.stream_rows(w, Stream.COMPUTE)[-1]] == Kind.OPTIM for w in range(4))


def test_equal_inputs_give_equal_programs() -> None:
    first, second = build((3, 11, 13, 9, "comm_stage")), build((3, 11, 13, 9, "comm_stage"))
    assert all(np.array_equal(a, b) for a, b in zip(vars(first).values(), vars(second).values(), strict=True))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 8, 8, 3, "megatron"), r"group size 3 with p = 2: allowed are 4 to 8"),
        ((2, 8, 8, 9, "megatron"), r"group size 9"),
        ((2, 8, 8, 4, "greedy"), r"order 'greedy' is unknown; allowed are megatron, comm_stage"),
        ((2, 0, 8, 4, "megatron"), r"at least 1 layer, not 0"),
        ((0, 8, 8, 4, "megatron"), r"at least 1"),
        ((2, 8, 0, 4, "megatron"), r"at least 1"),
    ],
)
def test_errors_name_the_rule(shape: Shape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(shape)
