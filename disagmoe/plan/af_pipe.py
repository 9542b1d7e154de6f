"""Decides the Program of AF-Pipe: attention and experts on workers of their own.

p attention workers A_g (worker g) and p expert workers F_g (worker p + g); layer
l lives on A_{l mod p} and F_{l mod p}, so a micro-batch walks the ring A_0, F_0,
A_1, ..., F_{p-1} v = ceil(L / p) times: an interleaved pipeline over 2p ring
stages whose chunk is one layer. Dispatch (A to F of one layer) and combine (F
straight to the *next* layer's A, so there is no P2P) are transfers on one send
and one receive stream per worker.

What a worker does with one micro-batch, and where the output head is, is decided in
`af_ring.py`. Five things are decided here.

1. *Groups.* Micro-batches are cut into near-equal groups of at most Ng, always:
   Megatron's full groups with a short last one drain the ring at the end.
2. *Warm-up.* The ring has R slots, R - 2p of them for transfers, and a worker
   starts backwards after 2 (R - position - 1) + (v - 1) Ng forwards. "megatron"
   has R = 2p; "comm_stage" has R = Ng, so that Ng = 4p gives every transfer a ring
   stage of its own (A, dispatch, F, combine). R well above Ng deadlocks whatever
   the streams do: the first worker would warm up with micro-batches that come
   round only after backwards the last one cannot have started.
3. *Order of transfers.* Sends in order of production and receives in order of
   consumption block each other when Ng > 2p: a worker's early product waits for a
   receiver that waits for a sender that waits for the worker. Both ends are
   therefore ordered by the slot a transfer takes when the ring runs in lock-step
   (`kernels.record_transfers`). That run is one in which every operation does
   start, so no set of durations can deadlock the order.
4. *The output head.* A whole one runs, forward and backward together, midway between
   the forward and the backward of its place in the ring (of the last layer, or of
   the one that would follow it), so that the transfers on either side of it overlap
   with other micro-batches where the warm-up leaves room. The chunks of a spread one
   have the places of the layers that would follow, which each F-group has one of.
5. *Compute streams.* With one, a worker runs its order as it is. With two, forwards
   and backwards are in-order streams of their own that share the GPU, and a forward
   starts only while the worker holds fewer layers than the order on one stream holds
   at most (`Program.in_flight`). The lock-step run keeps that bound, so it proves
   this form free of deadlocks as well. Transfers keep their order and streams.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from disagmoe.kernels import record_transfers
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.af_recompute import repeat_layers
from disagmoe.plan.af_ring import HEADS, Ring, Step, ring_steps
from disagmoe.plan.expand import Cell, TailRow, expand, step_tail
from disagmoe.plan.orders import StageOrder, alternate, grouped_table, near_equal_groups, peak_in_flight, warmup
from disagmoe.plan.program import COLUMNS, IntArray, Program

LongArray = NDArray[np.int64]

ORDERS = ("megatron", "comm_stage")
"""The warm-ups on offer; see the module's docstring."""


def af_orders(
    p: int, v: int, m: int, group: int, order: str, workers: Sequence[int] | None = None
) -> tuple[StageOrder, ...]:
    """Stage orders of these workers, or of all 2p (A_0..A_{p-1}, F_0..F_{p-1}), layers padded to p * v.

    `group` is the in-flight group size Ng, from 2p to 4p.
    """
    if order not in ORDERS:
        raise ValueError(f"AF-Pipe order {order!r} is unknown; allowed are {', '.join(ORDERS)}")
    if min(p, v, m) < 1:
        raise ValueError(f"AF-Pipe needs a depth, virtual stages and micro-batches of at least 1, not {p}, {v} and {m}")
    if not 2 * p <= group <= 4 * p:
        raise ValueError(f"AF-Pipe group size {group} with p = {p}: allowed are {2 * p} to {4 * p} (2p to 4p)")
    sizes = near_equal_groups(m, 2 * p, group)
    chunk, microbatch = grouped_table(v, sizes)
    round_trip = group if v == 1 else min(sizes)  # with one chunk nothing comes round
    slots = 2 * p if order == "megatron" else max(2 * p, round_trip)
    ring = [2 * (w % p) + w // p for w in (range(2 * p) if workers is None else workers)]
    return tuple(
        alternate(chunk, microbatch, v, warmup(slots, v, stage * slots // (2 * p), max(sizes), m * v)) for stage in ring
    )


def most_held(p: int, layers: int, m: int, group: int, order: str, head: str = "last_f") -> tuple[int, int]:
    """Most layers A_0 and F_0 hold at once; no group of their pools holds more."""
    ring = _ring(p, layers, head, 1)
    first = (0, p)
    attention, experts = af_orders(p, ring.chunks, m, group, order, first)
    return _held(attention, ring, 0), _held(experts, ring, p)


def group_sizes(p: int, layers: int, m: int) -> tuple[int, ...]:
    """In-flight group sizes in [2p, 4p] that give different orders, largest first.

    Where a worker has several layers, only the number of groups matters.
    """
    sizes = range(4 * p, 2 * p - 1, -1)
    if layers <= p:
        return (4 * p, 3 * p, 2 * p)
    return tuple({len(near_equal_groups(m, 2 * p, size)): size for size in reversed(sizes)}.values())[::-1]


def af_pipe_program(
    *,
    p: int,
    layers: int,
    m: int,
    group: int,
    order: str,
    head: str = "last_f",
    compute_streams: int = 1,
    in_flight: Sequence[int] | None = None,
    recompute: Collection[Kind] = (),
) -> Program:
    """The Program of one training step of `layers` layers and m micro-batches on 2p workers.

    The ring is planned for whole rounds of p layers; what does not exist is left
    out. With two compute streams, `in_flight` bounds the layers each worker holds
    (default: the most the order on one stream holds). Kinds in `recompute` run again
    before their backward (see `af_recompute.py`). Raises ValueError for an unknown
    order or head, a group outside [2p, 4p], or another number of streams.
    """
    ring = _ring(p, layers, head, compute_streams)
    orders = list(af_orders(p, ring.chunks, m, group, order))
    held = [_held(orders[w], ring, w) for w in range(2 * p)]
    limits: tuple[int, ...] = ()
    if compute_streams == 2:
        limits = tuple(held) if in_flight is None else tuple(in_flight)
        if len(limits) != 2 * p or any(limit < least for limit, least in zip(limits, held, strict=True)):
            raise ValueError(f"AF-Pipe in_flight {limits}: needs one bound per worker, at least {held} for this order")
    if not ring.spread:
        (worker,) = ring.head_workers
        orders[worker] = with_head(orders[worker], ring.slot(worker), ring.chunks)
    steps = ring_steps(ring)
    tail: list[TailRow] = []
    for w, own in enumerate(orders):
        layers_of = {c: [c * p + w % p] for c in range(ring.chunks) if c * p + w % p < layers}
        tail += step_tail(w, own, layers_of, shared=w == 0 or w in ring.head_workers)
    sent = transfer_slots(orders, steps, m)
    templates, orders = repeat_layers(ring, steps, orders, sent, recompute)
    table = in_slot_order(expand(orders, templates, tail), steps, sent)
    return Program.from_table(
        table,
        n_workers=2 * p,
        n_layers=layers,
        n_microbatches=m,
        n_chunks=len(ring.head_workers),
        in_flight=limits,
    )


def _ring(p: int, layers: int, head: str, compute_streams: int) -> Ring:
    """The ring's shape, checked."""
    if layers < 1:
        raise ValueError(f"AF-Pipe needs at least 1 layer, not {layers}")
    if p < 1:
        raise ValueError(f"AF-Pipe needs a depth of at least 1, not {p}")
    if head not in HEADS:
        raise ValueError(f"AF-Pipe head {head!r} is unknown; allowed are {', '.join(HEADS)}")
    if compute_streams not in (1, 2):
        raise ValueError(f"AF-Pipe compute_streams = {compute_streams}: allowed are 1 and 2")
    return Ring(p, layers, head, Stream.COMPUTE if compute_streams == 1 else Stream.COMPUTE_B)


def _held(order: StageOrder, ring: Ring, worker: int) -> int:
    """Most layers the worker holds at once, padding left out; at least 1."""
    exists = order.chunk * ring.p + worker % ring.p < ring.layers
    return max(1, peak_in_flight(StageOrder(order.phase[exists], order.chunk[exists], order.microbatch[exists])))


def with_head(order: StageOrder, last_chunk: int, head_chunk: int) -> StageOrder:
    """The order of the worker with the output head, the head being a chunk of its own.

    Forward and backward of the head are one action (so one micro-batch's logits
    live at a time), midway between the last layer's forward and its backward.
    """
    forward = np.flatnonzero((order.chunk == last_chunk) & (order.phase == Phase.F))
    backward = np.flatnonzero((order.chunk == last_chunk) & (order.phase == Phase.B))
    at = forward + (backward - forward) // 2 + 1
    return StageOrder(
        np.insert(order.phase, at, Phase.F),
        np.insert(order.chunk, at, head_chunk),
        np.insert(order.microbatch, at, order.microbatch[forward]),
    )


def transfer_slots(orders: Sequence[StageOrder], steps: Sequence[Step], m: int) -> LongArray:
    """Lock-step slot in which the product of each (step, micro-batch) is sent, [steps, m]; -1 where it is not."""
    chunks = 1 + max(int(o.chunk.max()) for o in orders)
    at = np.full((len(orders), len(Phase), chunks), -1, dtype=np.int64)
    for i, step in enumerate(steps):
        at[step.key] = i
    number, microbatch = [], []
    for w, o in enumerate(orders):
        of_action = at[w, o.phase, o.chunk]
        number.append(of_action[of_action >= 0])
        microbatch.append(o.microbatch[of_action >= 0].astype(np.int64))
    first = np.cumsum([0, *(n.shape[0] for n in number)], dtype=np.int64)
    home = np.array([step.key[0] for step in steps], dtype=np.int64)
    sends = np.array([_sent(step) is not None for step in steps])
    sent, left = record_transfers(first, np.concatenate(number), np.concatenate(microbatch), home, sends, m)
    if left:
        raise ValueError(
            f"AF-Pipe orders of {len(orders)} workers and {m} micro-batches wait for each other; use group = 2p"
        )
    return sent


def _sent(step: Step) -> Cell | None:
    """The transfer that leaves with the product of a step."""
    return next((cell for cell in step.cells if cell.stream == Stream.SEND), None)


def in_slot_order(table: IntArray, steps: Sequence[Step], sent: LongArray) -> IntArray:
    """The rows with the transfers of every stream in the order of their slots."""
    column = {name: table[:, i] for i, name in enumerate(COLUMNS)}
    rows = np.flatnonzero((column["stream"] == Stream.SEND) | (column["stream"] == Stream.RECV))
    labels = ("kind", "phase", "layer", "chunk")
    made = [(i, cell) for i, step in enumerate(steps) if (cell := _sent(step)) is not None]
    shape = tuple(int(column[name].max()) + 2 for name in labels)
    step_of = np.full(shape, -1, dtype=np.int64)
    for i, cell in made:
        step_of[cell.kind, cell.phase, cell.layer, cell.chunk] = i
    step = step_of[tuple(column[name][rows] for name in labels)]
    slot = np.zeros(table.shape[0], dtype=np.int64)
    slot[rows] = sent[step, column["microbatch"][rows]]
    return table[np.argsort(slot, kind="stable")]
