"""When the bytes of a Program's rows come and go.

Exchange buffers are placed in one of two ways.

*In order.* Only the order of the compute streams is known. A buffer of an exchange
within a worker lives from the operation that fills it to the one that reads it; a
buffer of a transfer lives one compute operation longer than its producer, or is
there one compute operation before its consumer (double buffering).

*In time.* With the start and the end of every row, each buffer lives from the
start of its transfer, or the end of its producer, to the end of its transfer or
consumer.

Where a layer runs as one function (`frames`), its combine belongs to the experts'
temporaries and the dispatch's send buffer stays until the layer is done.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import COMPUTE_STREAMS, RECV_STREAMS, SEND_STREAMS, Kind, Phase, Stream
from disagmoe.plan.memory_tables import COMM, EXCHANGE, INSIDE, WORKING, Tables, base, ops_of
from disagmoe.plan.program import Program, among

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_FORWARD, _BACKWARD = (Phase.F, Phase.R), (Phase.B, Phase.I)


def in_order(
    program: Program, rows: NDArray[np.intp], tables: Tables, *, whole: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Bytes at the start and at the end of the compute rows `rows`, [components, rows]; summed up if `whole`."""
    ops = ops_of(program, tables)
    begin, end = base(ops, tables)
    _beside(program, begin, end)
    D, C, P = COMM
    x = _Shifts(ops.worker.shape[0])

    attn, ffn = ops.is_a(Kind.ATTN, *_FORWARD), ops.is_a(Kind.FFN, *_FORWARD)
    x.after(attn & ops.has(D, "own"), ops.sent + ops.received)
    x.outgoing(attn & ops.has(D, "send"), ops.sent)
    x.on_end(ffn & ops.has(D, "own"), -ops.received)
    (x.on_end if tables.frames else x.on_start)(ffn & ops.has(D, "own"), -ops.sent)
    x.incoming(ffn & ops.has(D, "recv"), ops.received)
    if not tables.attends_again:  # no attention runs again to fill what is sent again
        x.just_before(ops.is_a(Kind.FFN, Phase.R) & ops.has(D, "own"), ops.sent + ops.received)
    if not tables.frames:
        x.outgoing(ffn & ops.has(C, "own"), ops.sent + ops.received)
    x.outgoing(ffn & ops.has(C, "send"), ops.received)
    x.outgoing(ffn & ops.has(P, "send"), ops.stream)
    first = ops.is_a(Kind.ATTN, Phase.F)
    x.incoming(first & ops.has(C, "recv", before=True), ops.sent)
    x.incoming(first & ops.has(P, "recv", before=True), ops.stream)

    attn, ffn = ops.is_a(Kind.ATTN, *_BACKWARD), ops.is_a(Kind.FFN, *_BACKWARD)
    x.incoming(ffn & ops.has(C, "own"), ops.sent + ops.received)
    x.incoming(ffn & ops.has(C, "recv"), ops.received)
    x.incoming(ffn & ops.has(P, "recv"), ops.stream)
    x.after(ffn & ops.has(D, "own"), ops.sent + ops.received)
    x.outgoing(ffn & ops.has(D, "send"), ops.received)
    x.on_start(attn & ops.has(D, "own"), -ops.received)
    x.on_end(attn & ops.has(D, "own"), -ops.sent)
    x.incoming(attn & ops.has(D, "recv"), ops.sent)
    x.outgoing(attn & ops.has(C, "send", before=True), ops.sent)
    x.outgoing(attn & ops.has(P, "send", before=True), ops.stream)
    begin[EXCHANGE], end[EXCHANGE] = x.begin, x.end
    begin, end = (_of_rows(side, program.sorts.of[rows], whole) for side in (begin, end))
    at = 0 if whole else EXCHANGE
    x.shift(program.sorts.of[rows], program.worker[rows], begin[at], end[at])
    return begin, end


def _of_rows(side: FloatArray, sort: NDArray[np.int32], whole: bool) -> FloatArray:
    """[components, sorts] as [components, rows], or as their sum [1, rows]."""
    return (side.sum(axis=0, keepdims=True) if whole else side).take(sort, axis=1)


def _beside(program: Program, begin: FloatArray, end: FloatArray) -> None:
    """With two compute streams an operation of the other one may run at the same time: add its largest temporaries."""
    sample = program.sorts.sample
    computes = among(sample.stream, COMPUTE_STREAMS)
    second = sample.stream == int(Stream.COMPUTE_B)
    if not second.any():
        return
    worker, working = sample.worker, np.where(computes, np.maximum(begin[WORKING], 0.0), 0.0)
    most = np.zeros((program.n_workers, 2))
    np.maximum.at(most, (worker, second.astype(np.int64)), working)
    other = np.where(second, most[worker, 0], most[worker, 1])
    begin[WORKING] += other
    end[WORKING] -= other


class _Shifts:
    """Exchange bytes at the starts and ends of compute rows, by sort, some of them a row earlier or later."""

    def __init__(self, sorts: int) -> None:
        self.begin, self.end = np.zeros(sorts), np.zeros(sorts)
        self._before, self._behind = np.zeros(sorts), np.zeros(sorts)

    def on_start(self, where: BoolArray, nbytes: FloatArray) -> None:
        self.begin += np.where(where, nbytes, 0.0)

    def on_end(self, where: BoolArray, nbytes: FloatArray) -> None:
        self.end += np.where(where, nbytes, 0.0)

    after = on_end

    def outgoing(self, where: BoolArray, nbytes: FloatArray) -> None:
        """Filled by this row, sent while the next one runs."""
        self.on_end(where, nbytes)
        self._behind += np.where(where, nbytes, 0.0)

    def just_before(self, where: BoolArray, nbytes: FloatArray) -> None:
        """There while the row before runs, and after."""
        self._before += np.where(where, nbytes, 0.0)

    def incoming(self, where: BoolArray, nbytes: FloatArray) -> None:
        """Arrives while the row before runs, read by this one."""
        self.just_before(where, nbytes)
        self.end -= np.where(where, nbytes, 0.0)

    def shift(self, sort: NDArray[np.int32], worker: NDArray[np.int32], begin: FloatArray, end: FloatArray) -> None:
        """Add what belongs to the rows before and behind, on the same worker, to `begin` and `end` [rows]."""
        if not sort.size:
            return
        before, behind = self._before[sort], self._behind[sort]
        same = worker[1:] == worker[:-1]
        begin[:-1] += np.where(same, before[1:], 0.0)
        end[1:] -= np.where(same, behind[:-1], 0.0)
        edge = np.flatnonzero(~same)
        first, last = np.append(0, edge + 1), np.append(edge, sort.shape[0] - 1)
        begin[first] += before[first]
        end[last] -= behind[last]


def in_time(program: Program, tables: Tables, *, whole: bool = False) -> tuple[FloatArray, FloatArray]:
    """Bytes at the start and at the end of every row, [components, rows]; summed up if `whole`."""
    ops = ops_of(program, tables)
    begin, end = base(ops, tables)
    streams = {
        "send": SEND_STREAMS | INSIDE,
        "recv": RECV_STREAMS | INSIDE,
    }
    goes, comes = (among(program.sorts.sample.stream, streams[side]) for side in streams)
    own = goes & comes
    D, C, P = COMM
    start, stop = begin[EXCHANGE], end[EXCHANGE]

    def both(kind: Kind, side: str) -> BoolArray:
        return ops.has(kind, side) | ops.has(kind, "own")

    def add(at: FloatArray, where: BoolArray, nbytes: FloatArray) -> None:
        at += np.where(where, nbytes, 0.0)

    framed = own & tables.frames
    attn, ffn = ops.is_a(Kind.ATTN, *_FORWARD), ops.is_a(Kind.FFN, *_FORWARD)
    dispatch = ops.is_a(D, *_FORWARD)
    add(stop, attn & both(D, "send"), ops.sent)
    add(stop, dispatch & goes & ~framed, -ops.sent)
    if not tables.attends_again:  # no attention runs again to fill what is sent again
        add(start, ops.is_a(D, Phase.R) & goes, ops.sent)
    add(start, dispatch & comes, ops.received)
    add(stop, ffn & both(D, "recv"), -ops.received)
    if tables.frames:
        add(stop, ffn & ops.has(D, "own"), -ops.sent)
    combine = ops.is_a(C, *_FORWARD)
    held_back = ops.has(C, "own") if tables.frames else np.zeros_like(ffn)
    add(stop, ffn & both(C, "send") & ~held_back, ops.received)
    add(stop, combine & goes & ~framed, -ops.received)
    add(start, combine & comes & ~framed, ops.sent)
    add(stop, combine & own & ~framed, -ops.sent)
    # The sum of what arrived waits for the next layer's attention, if that is here.
    follows = tables.attends[ops.worker, ops.layer + 2]
    add(stop, combine & comes & ~own, np.where(follows, ops.stream, 0.0) - ops.sent)
    add(start, ops.is_a(Kind.ATTN, Phase.F) & ops.has(C, "recv", before=True), -ops.stream)

    attn, ffn = ops.is_a(Kind.ATTN, *_BACKWARD), ops.is_a(Kind.FFN, *_BACKWARD)
    dispatch, combine = ops.is_a(D, Phase.B), ops.is_a(C, Phase.B)
    add(start, combine & goes, ops.sent)
    add(stop, combine & goes, -ops.sent)
    add(start, combine & comes, ops.received)
    add(stop, ffn & both(C, "recv"), -ops.received)
    add(stop, ffn & both(D, "send"), ops.received)
    add(stop, dispatch & goes, -ops.received)
    add(start, dispatch & comes, ops.sent)
    add(stop, attn & both(D, "recv"), -ops.sent)

    moved, precedes = ops.kind == int(P), tables.feeds[ops.worker, ops.layer + 1]
    kept = np.where(ops.phase == int(Phase.F), follows, precedes) & ~goes
    add(start, moved & (goes | comes), ops.stream)
    add(stop, moved & (goes | comes) & ~kept, -ops.stream)
    add(start, ops.is_a(Kind.ATTN, Phase.F) & ops.has(P, "recv", before=True), -ops.stream)
    add(stop, ffn & ops.has(P, "recv"), -ops.stream)
    begin, end = (_of_rows(side, program.sorts.of, whole) for side in (begin, end))
    return begin, end
