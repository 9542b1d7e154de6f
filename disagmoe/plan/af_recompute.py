"""Decides where AF-Pipe repeats forwards, and where the tokens of repeated experts come from.

A worker repeats its part of a layer right before the backward of that layer. Where
the experts keep the rows that arrived, that is all: no worker waits for another.
Where tokens are sent again (R DISPATCH), an expert worker's backward waits for the
attention worker's repeat, and that has to be early enough: it is put before the
first action of the attention worker that comes less than `LEAD` slots before the
experts' backward when the ring runs in lock-step (`kernels.record_transfers`). In
that run everything started in the order of its slots, and a repeat only waits for
what comes before it there, so it cannot close a circle of waits.

Re-sent tokens have the streams SEND_B and RECV_B to themselves. Both ends use them
in the order of backwards, which is the same on all workers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.af_ring import Ring, Step
from disagmoe.plan.expand import Cell, Template, TemplateKey
from disagmoe.plan.orders import StageOrder

LongArray = NDArray[np.int64]

LEAD = 4
"""Slots of the lock-step run from the repeated attention to the experts' backward: its compute, the transfer, the
experts' repeat and their backward."""


def repeat_layers(
    ring: Ring, steps: Sequence[Step], orders: Sequence[StageOrder], sent: LongArray, recompute: Collection[Kind]
) -> tuple[dict[TemplateKey, Template], list[StageOrder]]:
    """Templates and orders with the operations of `recompute` (of ATTN, DISPATCH, FFN) in phase R.

    `sent` [steps, micro-batches] is the slot in which the product of each step
    leaves. Raises ValueError where tokens would be re-sent without the attention
    that paces them.
    """
    templates: dict[TemplateKey, Template] = dict(steps)
    if not recompute:
        return templates, list(orders)
    again = {Kind.ATTN: Kind.ATTN in recompute, Kind.FFN: Kind.FFN in recompute}
    resend = Kind.DISPATCH in recompute
    if resend and not all(again.values()):
        raise ValueError("AF-Pipe sends tokens again only where attention and experts are both recomputed")
    for key, cells in steps:
        if key[1] == Phase.B:
            templates[key] = _repeated(ring, cells, again, resend)
    if not resend:
        return templates, list(orders)
    for layer in range(ring.layers):
        group = layer % ring.p
        templates[group, int(Phase.R), layer // ring.p] = [
            Cell(ring.backward, Kind.ATTN, Phase.R, layer),
            Cell(Stream.SEND_B, Kind.DISPATCH, Phase.R, layer, peer=ring.p + group),
        ]
    chunks = 1 + max(int(order.chunk.max()) for order in orders)
    number = np.full((len(orders), len(Phase), chunks), -1, dtype=np.int64)
    for i, step in enumerate(steps):
        number[step.key] = i
    paced = [
        _paced(order, number[w], number[ring.p + w, Phase.B], sent) if w < ring.p else order
        for w, order in enumerate(orders)
    ]
    return templates, paced


def _repeated(ring: Ring, cells: Sequence[Cell], again: dict[Kind, bool], resend: bool) -> list[Cell]:
    """The cells of one backward step with the repeat before its compute."""
    out: list[Cell] = []
    for cell in cells:
        if cell.phase == Phase.B and again.get(cell.kind, False):
            repeat = cell._replace(phase=Phase.R)
            if cell.kind == Kind.FFN:
                if resend:
                    source = ring.attention(cell.layer)
                    out.append(Cell(Stream.RECV_B, Kind.DISPATCH, Phase.R, cell.layer, peer=source))
                out.append(repeat)
            elif not resend:
                out.append(repeat)
        out.append(cell)
    return out


def _paced(order: StageOrder, own: LongArray, experts: LongArray, sent: LongArray) -> StageOrder:
    """The order of an attention worker with the repeat of every layer early enough for its experts.

    `own` [phases, chunks] are the steps of this worker, `experts` [chunks] the
    backward steps of the experts of its layers; -1 where there is none.
    """
    step = own[order.phase, order.chunk]
    # Steps that send nothing, and padding, are as late as what is before them.
    slots = np.maximum.accumulate(np.where(step >= 0, sent[step, order.microbatch], -1))
    backward = np.flatnonzero((order.phase == Phase.B) & (step >= 0))
    wanted = sent[experts[order.chunk[backward]], order.microbatch[backward]] - LEAD
    forward = np.zeros((own.shape[1], sent.shape[1]), dtype=np.int64)
    ahead = np.flatnonzero(order.phase == Phase.F)
    forward[order.chunk[ahead], order.microbatch[ahead]] = ahead
    after_forward = forward[order.chunk[backward], order.microbatch[backward]] + 1
    at = np.minimum(np.searchsorted(slots, wanted, side="left"), backward)
    at = np.maximum.accumulate(np.maximum(at, after_forward))
    return StageOrder(
        np.insert(order.phase, at, Phase.R),
        np.insert(order.chunk, at, order.chunk[backward]),
        np.insert(order.microbatch, at, order.microbatch[backward]),
    )
