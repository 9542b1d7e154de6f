"""AF-Pipe: placement, completeness, freedom from deadlock over the whole space, makespans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.kernels import record_transfers
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.af_pipe import ORDERS, af_orders, af_pipe_program, group_sizes, most_held
from disagmoe.plan.af_ring import HEADS, head_workers
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.verify import PlanError, verify
from disagmoe.simulator import simulate
from tests.plan.event_loops import AfOp, actions, af_chain, af_needs, af_run, af_streams

Shape = tuple[int, int, int, int, str, str, int]  # p, layers, micro-batches, group, order, head, compute streams


def build(shape: Shape) -> Program:
    p, layers, m, group, order, head, streams = shape
    return af_pipe_program(p=p, layers=layers, m=m, group=group, order=order, head=head, compute_streams=streams)


def plain(p: int, layers: int, m: int, group: int, order: str) -> Shape:
    """The head on the last layer's F-group, one compute stream."""
    return p, layers, m, group, order, "last_f", 1


def space(p: int, layers: int, m: int) -> Iterator[Shape]:
    """Every different Program up to these sizes: all orders, heads and numbers of streams."""
    for a, b, c in product(range(1, p + 1), range(1, layers + 1), range(1, m + 1)):
        for group, order, head, streams in product(group_sizes(a, b, c), ORDERS, HEADS, (1, 2)):
            if (head, a) != ("spread", 1):  # the same as last_f
                yield a, b, c, group, order, head, streams


shapes = st.integers(1, 6).flatmap(
    lambda p: st.tuples(
        st.just(p),
        st.integers(1, 24),
        st.integers(1, 40),
        st.integers(2 * p, 4 * p),
        st.sampled_from(ORDERS),
        st.sampled_from(HEADS),
        st.sampled_from((1, 2)),
    )
)


def seconds(transfer: float, head: float = 0.0) -> Callable[[AfOp], float]:
    """Forward 1, backward 2, every transfer `transfer`, the head `head` forward."""

    def of(op: AfOp) -> float:
        kind, phase, _, _, _ = op
        twice = 2.0 if phase == Phase.B else 1.0
        return {Kind.ATTN: twice, Kind.FFN: twice, Kind.HEAD: head * twice, Kind.EMBED: 0.0}.get(kind, transfer)

    return of


def run(shape: Shape, price: Callable[[AfOp], float]) -> dict[AfOp, float] | None:
    p, layers, m, _, _, head, _ = shape
    program = build(shape)
    return af_run(af_streams(program), af_needs(p, layers, head, m), price, program.in_flight)


def ratio(shape: Shape, transfer: float) -> float:
    """Makespan divided by the compute time of the busiest worker, by the reference loop."""
    p, layers, m = shape[:3]
    price = seconds(transfer)

    def of(op: AfOp) -> float:  # the in-group reduction after the last layer is no transfer
        return 0.0 if op[0] == Kind.COMBINE and op[2] == layers - 1 else price(op)

    end = run(shape, of)
    assert end is not None
    return max(end.values()) / (3.0 * m * -(-layers // p))


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_every_operation_once_on_its_worker(shape: Shape) -> None:
    p, layers, m, _, _, head, streams = shape
    found = Counter((w, s, op) for (w, s), ops in af_streams(build(shape)).items() for op in ops)
    wanted: Counter[tuple[int, Stream, AfOp]] = Counter()
    compute = {Phase.F: Stream.COMPUTE, Phase.B: Stream.COMPUTE_B if streams == 2 else Stream.COMPUTE}
    last = (layers - 1) % p
    spread = head == "spread" and p > 1
    for op in (op for b in range(m) for op in af_chain(layers, b)):
        kind, phase, layer, b, _ = op
        if kind in (Kind.ATTN, Kind.FFN):
            wanted[layer % p + (p if kind == Kind.FFN else 0), compute[phase], op] += 1
        elif kind == Kind.EMBED:
            wanted[0, compute[phase], op] += 1
        elif kind == Kind.HEAD and spread:
            for g in range(p):
                wanted[p + g, compute[phase], (kind, phase, layer, b, g)] += 1
                if g != last:  # from the F-group before it in the ring, and back there
                    ends = [p + (g - 1) % p, p + g]
                    sender, receiver = ends if phase == Phase.F else ends[::-1]
                    wanted[sender, Stream.SEND, (Kind.P2P, phase, layers - 1, b, g)] += 1
                    wanted[receiver, Stream.RECV, (Kind.P2P, phase, layers - 1, b, g)] += 1
        elif kind == Kind.HEAD:
            wanted[layers % p if head == "next_a" else p + last, compute[phase], op] += 1
        elif kind == Kind.COMBINE and layer == layers - 1 and head != "next_a":
            wanted[p + last, Stream.COLL, op] += 1
        else:
            ends = [layer % p, p + layer % p] if kind == Kind.DISPATCH else [p + layer % p, (layer + 1) % p]
            sender, receiver = ends if phase == Phase.F else ends[::-1]
            wanted[sender, Stream.SEND, op] += 1
            wanted[receiver, Stream.RECV, op] += 1
    assert found == wanted


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_reference_loop_and_simulator_agree(shape: Shape) -> None:
    """No shape deadlocks, and both loops find the same end of the last micro-batch."""
    program = build(shape)
    price = seconds(0.75, head=1.5)
    end = run(shape, price)
    assert end is not None
    if shape[6] == 2:  # the reference lets streams run beside each other at full speed
        return
    durations = np.array([price(tuple(r.op)[:5]) if r.op.microbatch >= 0 else 0.0 for r in program.rows()])  # type: ignore[arg-type]
    # On a link of its own, as the reference loop knows no sharing: the reduction before the head.
    pricing = replace(Pricing.ideal(durations), link=(program.stream == Stream.COLL).astype(np.int8))
    assert simulate(program, pricing).step_s == pytest.approx(max(end.values()), abs=1e-9)


def test_sample_of_the_small_space_verifies() -> None:
    """Every 11th shape with p <= 4, L <= 12, n <= 16, in which all heads, orders and streams meet."""
    checked = [shape for i, shape in enumerate(space(4, 12, 16)) if i % 11 == 0]
    for shape in checked:
        verify(build(shape))
    assert len(checked) == 1361
    assert {s[:2] for s in checked} == set(product(range(1, 5), range(1, 13)))
    assert {s[4:] for s in checked} == set(product(ORDERS, HEADS, (1, 2)))


@pytest.mark.slow
def test_small_space_verifies() -> None:
    for shape in space(4, 12, 16):
        verify(build(shape))


@pytest.mark.slow
def test_sample_of_the_large_space_verifies() -> None:
    """Every 17th shape with p <= 6, L <= 24, n <= 40."""
    checked = [shape for i, shape in enumerate(space(6, 24, 40)) if i % 17 == 0]
    for shape in checked:
        verify(build(shape))
    assert len(checked) > 5000


def test_production_and_consumption_order_deadlocks() -> None:
    """Why transfers have a common order: sent as produced and received as consumed, groups above 2p hang."""
    shape = plain(2, 4, 16, 8, "megatron")
    streams, needs = af_streams(build(shape)), af_needs(2, 4, "last_f", 16)
    after = {before: op for op, wanted in needs.items() for before in wanted}
    for worker in range(4):
        at = {op: i for i, op in enumerate(streams[worker, Stream.COMPUTE])}
        for stream, neighbour in (
            (Stream.SEND, {op: wanted[0] for op, wanted in needs.items() if wanted}),
            (Stream.RECV, after),
        ):
            ordered = sorted((at[neighbour[op]], op) for op in streams[worker, stream])
            streams[worker, stream] = [op for _, op in ordered]
    assert af_run(streams, needs, seconds(0.5)) is None


def test_recording_reports_orders_that_wait_for_each_other() -> None:
    """Two workers, two micro-batches, chain 0 -> 1 -> 0: worker 1 wants b = 1 first, worker 0 finishes b = 0 first."""
    home, sends = np.array([0, 1, 0]), np.array([True, True, False])
    first = np.array([0, 4, 6])
    step = np.array([0, 2, 0, 2, 1, 1])
    sent, left = record_transfers(first, step, np.array([0, 0, 1, 1, 0, 1]), home, sends, 2)
    assert left == 0
    assert sent.tolist() == [[1, 6], [3, 8], [-1, -1]]  # b = 0: run 0, send 1, run 2, send 3, run 4; then b = 1
    _, left = record_transfers(first, step, np.array([0, 0, 1, 1, 1, 0]), home, sends, 2)
    assert left == 5


def test_swapped_receive_is_found() -> None:
    program = build(plain(2, 4, 8, 4, "megatron"))
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
    assert ratio(plain(p, layers, m, 2 * p, "megatron"), transfer) <= padded
    assert ratio(plain(p, layers, m, 4 * p, "comm_stage"), transfer) <= own_stage


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_free_transfers_give_the_interleaved_closed_form(p: int, v: int, rounds: int) -> None:
    """2p stages of v chunks each: m v (F+B) + (2p-1)(F+B) per chunk, with F = 1 and B = 2."""
    m = rounds * 2 * p
    end = run(plain(p, p * v, m, 2 * p, "megatron"), seconds(0.0))
    assert end is not None
    assert max(end.values()) == 3 * m * v + 3 * (2 * p - 1)


def test_warm_up_of_both_orders() -> None:
    """2(R - position - 1) + (v-1)Ng with R = 2p slots, or 4p and positions 4g (A) and 4g + 2 (F)."""
    p, v, m, group = 3, 4, 24, 12

    def leading(order: str) -> list[int]:
        orders = [actions(o) for o in af_orders(p, v, m, group, order)]
        return [next(i for i, a in enumerate(o) if a[0] == "B") - 1 for o in orders]

    base = (v - 1) * group
    assert leading("megatron") == [base + 2 * (6 - at - 1) for at in (0, 2, 4, 1, 3, 5)]
    assert leading("comm_stage") == [base + 2 * (12 - at - 1) for at in (0, 4, 8, 2, 6, 10)]
    bounds = build((p, p * v, m, group, "megatron", "last_f", 2)).in_flight
    assert bounds == tuple(w + 1 for w in leading("megatron"))


@pytest.mark.parametrize(
    ("p", "layers", "m", "groups"),
    [(4, 94, 32, (16, 15, 10)), (4, 94, 16, (16, 15)), (1, 28, 8, (4, 3, 2)), (4, 3, 9, (16, 12, 8))],
)
def test_group_sizes_are_those_that_cut_the_micro_batches_differently(
    p: int, layers: int, m: int, groups: tuple[int, ...]
) -> None:
    """32 micro-batches in groups of at most 16, 15 or 10: 2, 3 or 4 of them; 16 in one or two."""
    assert group_sizes(p, layers, m) == groups


def test_head_runs_whole_and_between_the_passes() -> None:
    """Forward and backward of the head are neighbours; other work fills both reductions around it."""
    p, layers, m = 2, 8, 16
    streams = af_streams(build(plain(p, layers, m, 4 * p, "comm_stage")))
    order = streams[p + (layers - 1) % p, Stream.COMPUTE]
    at = {op: i for i, op in enumerate(order)}
    for b in range(m):
        head = at[Kind.HEAD, Phase.F, -1, b, 0]
        assert order[head + 1] == (Kind.HEAD, Phase.B, -1, b, 0)
        assert at[Kind.FFN, Phase.F, layers - 1, b, 0] < head - 1
        assert head + 2 < at[Kind.FFN, Phase.B, layers - 1, b, 0]


@pytest.mark.parametrize("head", HEADS)
def test_tail_of_every_worker(head: str) -> None:
    """L = 5, p = 2: A_0 holds 0, 2, 4 and the embedding, F_0 the same layers; workers of the head have one more."""
    program = build((2, 5, 8, 4, "megatron", head, 2))

    def sync(worker: int) -> list[tuple[Phase, int]]:
        ops = [program.op(int(i)) for i in program.stream_rows(worker, Stream.SYNC)]
        return [(o.phase, o.layer) for o in ops]

    ends = {"last_f": {0, 2}, "next_a": {0, 1}, "spread": {0, 2, 3}}[head]
    for worker in range(4):
        own = [4, 2, 0] if worker % 2 == 0 else [3, 1]
        own += [-1] if worker in ends else []
        assert sync(worker) == [*((Phase.B, layer) for layer in own), (Phase.F, -1)]
    assert all(program.kind[program.stream_rows(w, Stream.COMPUTE)[-1]] == Kind.OPTIM for w in range(4))


def test_where_the_head_is() -> None:
    """94 layers on p = 4: the last is on group 1, one more would be on group 2."""
    assert head_workers(4, 94, "last_f") == (5,)
    assert head_workers(4, 94, "next_a") == (2,)
    assert head_workers(4, 94, "spread") == (4, 5, 6, 7)
    assert head_workers(1, 94, "spread") == head_workers(1, 94, "last_f") == (1,)


def test_equal_inputs_give_equal_programs() -> None:
    shape = (3, 11, 13, 9, "comm_stage", "spread", 2)
    first, second = build(shape), build(shape)
    assert all(np.array_equal(a, b) for a, b in zip(vars(first).values(), vars(second).values(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 3}, r"group size 3 with p = 2: allowed are 4 to 8"),
        ({"group": 9}, r"group size 9"),
        ({"order": "greedy"}, r"order 'greedy' is unknown; allowed are megatron, comm_stage"),
        ({"layers": 0}, r"at least 1 layer, not 0"),
        ({"p": 0}, r"at least 1"),
        ({"m": 0}, r"at least 1"),
        ({"head": "first_a"}, r"head 'first_a' is unknown; allowed are last_f, next_a, spread"),
        ({"compute_streams": 3}, r"compute_streams = 3: allowed are 1 and 2"),
        ({"compute_streams": 2, "in_flight": (19, 15, 17, 12)}, r"in_flight \(19, 15, 17, 12\): .* \[19, 15, 17, 13\]"),
        ({"compute_streams": 2, "in_flight": (99,)}, r"one bound per worker"),
    ],
)  # fmt: skip
def test_errors_name_the_rule(change: dict[str, object], message: str) -> None:
    base: dict[str, object] = {"p": 2, "layers": 8, "m": 8, "group": 4, "order": "megatron"}
    with pytest.raises(ValueError, match=message):
        af_pipe_program(**{**base, **change})  # type: ignore[arg-type]


@given(shapes)
@settings(max_examples=40, deadline=None)
def test_most_held_is_what_the_first_groups_hold(shape: Shape) -> None:
    """The bound that planners use, counted along the compute order, and no other group of a pool above it."""
    p, layers, m, group, order, head, _ = shape
    program = build((p, layers, m, group, order, head, 1))

    def held(worker: int) -> int:
        rows = program.stream_rows(worker, Stream.COMPUTE)
        rows = rows[np.isin(program.kind[rows], (Kind.ATTN, Kind.FFN))]
        change = np.where(program.phase[rows] == Phase.F, 1, -1)
        return int(np.cumsum(change).max(initial=0))

    assert most_held(p, layers, m, group, order, head) == (held(0), held(p))
    assert max(held(w) for w in range(p)) == held(0)
    assert max(held(w) for w in range(p, 2 * p)) == held(p)
