"""Decides the Program of AF-Pipe: attention and experts on workers of their own.

p attention workers A_g (worker g) and p expert workers F_g (worker p + g); layer
l lives on A_{l mod p} and F_{l mod p}, so a micro-batch walks the ring A_0, F_0,
A_1, ..., F_{p-1} v = ceil(L / p) times: an interleaved pipeline over 2p ring
stages whose chunk is one layer. Dispatch (A to F of one layer) and combine (F
straight to the *next* layer's A, so there is no P2P) are transfers on one send
and one receive stream per worker.

Four things are decided here.

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
4. *The output head* runs, forward and backward together, midway between the last
   layer's forward and its backward, so that the reductions on either side of it
   overlap with other micro-batches where the warm-up leaves room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagmoe.kernels import record_transfers
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.expand import Cell, TailRow, Template, TemplateKey, expand, step_tail
from disagmoe.plan.orders import StageOrder, alternate, grouped_table, near_equal_groups, peak_in_flight, warmup
from disagmoe.plan.program import COLUMNS, IntArray, Program

LongArray = NDArray[np.int64]

ORDERS = ("megatron", "comm_stage")
"""The warm-ups on offer; see the module's docstring."""


def af_orders(p: int, v: int, m: int, group: int, order: str) -> tuple[StageOrder, ...]:
    """Stage orders of the 2p workers (A_0..A_{p-1}, F_0..F_{p-1}), layers padded to p * v.

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
    ring = [*range(0, 2 * p, 2), *range(1, 2 * p, 2)]
    return tuple(
        alternate(chunk, microbatch, v, warmup(slots, v, stage * slots // (2 * p), max(sizes), m * v)) for stage in ring
    )


def in_flight(p: int, v: int, m: int, group: int, order: str) -> tuple[int, ...]:
    """Most layers' activations each of the 2p workers holds at once, padded layers included."""
    return tuple(peak_in_flight(o) for o in af_orders(p, v, m, group, order))


def af_pipe_program(*, p: int, layers: int, m: int, group: int, order: str) -> Program:
    """The Program of one training step of `layers` layers and m micro-batches on 2p workers.

    The ring is planned for p * ceil(layers / p) layers; what does not exist is
    left out. Raises ValueError for an unknown order or a group outside [2p, 4p].
    """
    if layers < 1:
        raise ValueError(f"AF-Pipe needs at least 1 layer, not {layers}")
    v = -(-layers // p) if p > 0 else 0
    orders = list(af_orders(p, v, m, group, order))
    templates: dict[TemplateKey, Template] = {}
    for layer in range(layers):
        c, g = divmod(layer, p)
        templates[g, Phase.F, c], templates[g, Phase.B, c] = _attention(layer, p)
        templates[p + g, Phase.F, c], templates[p + g, Phase.B, c] = _experts(layer, p, last=layer == layers - 1)
    last_chunk, last_group = divmod(layers - 1, p)
    head = p + last_group
    templates[head, Phase.F, v] = [Cell(Stream.COMPUTE, Kind.HEAD, phase, -1) for phase in (Phase.F, Phase.B)]
    tail: list[TailRow] = []
    for w, held_order in enumerate(orders):
        held = {c: [c * p + w % p] for c in range(v) if c * p + w % p < layers}
        tail += step_tail(w, held_order, held, shared=w in (0, head))
    sent = _transfer_slots(orders, p, layers, m)
    orders[head] = _with_head(orders[head], last_chunk, v)
    table = _in_slot_order(expand(orders, templates, tail), sent)
    return Program.from_table(table, n_workers=2 * p, n_layers=layers, n_microbatches=m)


def _attention(layer: int, p: int) -> tuple[list[Cell], list[Cell]]:
    """Forward and backward of attention of one layer, on A_{layer mod p}."""
    experts, before = p + layer % p, p + (layer - 1) % p
    forward = [
        Cell(Stream.COMPUTE, Kind.ATTN, Phase.F, layer),
        Cell(Stream.SEND, Kind.DISPATCH, Phase.F, layer, peer=experts),
    ]
    backward = [
        Cell(Stream.RECV, Kind.DISPATCH, Phase.B, layer, peer=experts),
        Cell(Stream.COMPUTE, Kind.ATTN, Phase.B, layer),
    ]
    if layer == 0:
        embed = [Cell(Stream.COMPUTE, Kind.EMBED, phase, -1) for phase in (Phase.F, Phase.B)]
        return [embed[0], *forward], [*backward, embed[1]]
    forward = [Cell(Stream.RECV, Kind.COMBINE, Phase.F, layer - 1, peer=before), *forward]
    return forward, [*backward, Cell(Stream.SEND, Kind.COMBINE, Phase.B, layer - 1, peer=before)]


def _experts(layer: int, p: int, *, last: bool) -> tuple[list[Cell], list[Cell]]:
    """Forward and backward of the experts of one layer, on F_{layer mod p}.

    After the last layer the F-ranks hold partial rows of every token: these are
    reduced inside the group (a collective) before the output head.
    """
    attention, after = layer % p, (layer + 1) % p
    forward = [
        Cell(Stream.RECV, Kind.DISPATCH, Phase.F, layer, peer=attention),
        Cell(Stream.COMPUTE, Kind.FFN, Phase.F, layer),
    ]
    backward = [
        Cell(Stream.COMPUTE, Kind.FFN, Phase.B, layer),
        Cell(Stream.SEND, Kind.DISPATCH, Phase.B, layer, peer=attention),
    ]
    out, back, peer = (Stream.COLL, Stream.COLL, -1) if last else (Stream.SEND, Stream.RECV, after)
    forward.append(Cell(out, Kind.COMBINE, Phase.F, layer, peer=peer))
    return forward, [Cell(back, Kind.COMBINE, Phase.B, layer, peer=peer), *backward]


def _with_head(order: StageOrder, last_chunk: int, head_chunk: int) -> StageOrder:
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


def _transfer_slots(orders: list[StageOrder], p: int, layers: int, m: int) -> LongArray:
    """Lock-step slot in which the product of each (chain step, micro-batch) is sent, [4 * layers, m].

    Forward steps of the chain are 2 l (attention of layer l) and 2 l + 1 (its
    experts); backward steps count on in reverse.
    """
    forward = 2 * layers
    home = np.array([g for layer in range(layers) for g in (layer % p, p + layer % p)], dtype=np.int64)
    steps, microbatches = [], []
    for w, o in enumerate(orders):
        layer = o.chunk.astype(np.int64) * p + w % p
        step = 2 * layer + (w >= p)
        exists = layer < layers
        steps.append(np.where(o.phase == Phase.F, step, 2 * forward - 1 - step)[exists])
        microbatches.append(o.microbatch[exists].astype(np.int64))
    first = np.cumsum([0, *(s.shape[0] for s in steps)], dtype=np.int64)
    sent, left = record_transfers(
        first, np.concatenate(steps), np.concatenate(microbatches), np.concatenate((home, home[::-1])), m
    )
    if left:
        raise ValueError(
            f"AF-Pipe orders for p = {p}, {layers} layers, {m} micro-batches wait for each other; use group = 2p"
        )
    return sent


def _in_slot_order(table: IntArray, sent: LongArray) -> IntArray:
    """The rows with the transfers of every stream in the order of their slots."""
    column = {name: table[:, i] for i, name in enumerate(COLUMNS)}
    rows = np.flatnonzero((column["stream"] == Stream.SEND) | (column["stream"] == Stream.RECV))
    layer = column["layer"][rows]
    # Chain step that produces what is sent; backward, the product of step 4 L - 1 - s goes to where s came from.
    step = 2 * layer + (column["kind"][rows] == Kind.COMBINE)
    step = np.where(column["phase"][rows] == Phase.F, step, sent.shape[0] - 2 - step)
    slot = np.zeros(table.shape[0], dtype=np.int64)
    slot[rows] = sent[step, column["microbatch"][rows]]
    return table[np.argsort(slot, kind="stable")]
