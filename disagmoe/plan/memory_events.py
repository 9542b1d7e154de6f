"""What every row of a Program allocates and frees on its worker's GPU.

Activations belong to the Program's own order, not to a formula: allocated when
the forward of a (layer, micro-batch) starts, freed when its backward ends (with I
and W: what W still needs when W ends). Temporaries exist while their operation
runs. Exchange buffers are placed in one of two ways.

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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.memory import LayerBytes, OpBytes
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import COMPUTE_STREAMS, RECV_STREAMS, SEND_STREAMS, Kind, Phase, Stream
from disagmoe.plan.program import Program

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

DYNAMIC = ("attention", "ffn", "exchange", "head", "working")
"""Components that come and go: kept activations by side, exchange buffers, embedding and head, temporaries."""
_EXCHANGE, _HEAD, _WORKING = 2, 3, 4
_COMPONENT = {Kind.ATTN: 0, Kind.FFN: 1, Kind.HEAD: _HEAD, Kind.EMBED: _HEAD}
_COMM = (Kind.DISPATCH, Kind.COMBINE, Kind.P2P)
_CUT = (int(Kind.DISPATCH), int(Kind.FFN), int(Kind.COMBINE))
_INSIDE = frozenset({Stream.COLL, Stream.NVLINK})
_FORWARD, _BACKWARD = (Phase.F, Phase.R), (Phase.B, Phase.I)


@dataclass(frozen=True)
class WorkerBytes:
    """Bytes of every operation of one worker: its dense and its MoE layers, the output head, the embedding.

    `step` are the temporaries of the optimizer.
    """

    layers: tuple[LayerBytes, LayerBytes]  # (dense, MoE)
    head: OpBytes
    embed: OpBytes
    step: float = 0.0


def chunks_of(program: Program, rows: NDArray[np.intp]) -> FloatArray:
    """Into how many chunks the operation of each row is cut: 1 where its layer is not.

    Every part of a spread head keeps all its rows and has its own part of the
    vocabulary: it is no chunk in this sense.
    """
    most = np.ones((len(Kind), program.n_layers + 1), dtype=np.int64)
    cut = np.flatnonzero((program.chunk > 0) & np.isin(program.kind, _CUT))
    if cut.size:
        np.maximum.at(most, (program.kind[cut], program.layer[cut] + 1), program.chunk[cut] + 1)
    return most[program.kind[rows], program.layer[rows] + 1].astype(np.float64)


class Tables:
    """Bytes by worker, kind, phase and type of layer, and which exchanges the Program has."""

    def __init__(
        self,
        program: Program,
        workers: Sequence[WorkerBytes],
        moe: Sequence[bool],
        recompute: Recompute,
        frames: bool,
    ) -> None:
        self.frames = frames
        self.type_of = np.array([0, *(int(m) for m in moe)], dtype=np.int64)  # of layer + 1
        shape = (len(workers), len(Kind), len(Phase), 2)
        self.begin, self.end, self.working = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        distinct: dict[int, int] = {}
        for w, worker in enumerate(workers):
            same = distinct.setdefault(id(worker), w)
            if same != w:
                for table in (self.begin, self.end, self.working):
                    table[w] = table[same]
                continue
            for t, layer in enumerate(worker.layers):
                self._fill(w, Kind.ATTN, t, layer.attention, again=recompute.attention == "full")
                self._fill(w, Kind.FFN, t, layer.ffn, again=recompute.ffn == "full")
            self._fill(w, Kind.HEAD, 0, worker.head, again=False)
            self._fill(w, Kind.EMBED, 0, worker.embed, again=False)
            self.working[w, Kind.OPTIM] = worker.step
        self.sent = np.array([[layer.sent for layer in w.layers] for w in workers])
        self.received = np.array([[layer.received for layer in w.layers] for w in workers])
        self.stream = np.array([w.layers[0].stream for w in workers])
        self.there = self._exchanges(program)
        self.attends, self.feeds = (_compute_flags(program, kind) for kind in (Kind.ATTN, Kind.FFN))

    def _fill(self, worker: int, kind: Kind, layer_type: int, op: OpBytes, *, again: bool) -> None:
        begin, end, working = (t[worker, kind, :, layer_type] for t in (self.begin, self.end, self.working))
        later = op.weight_inputs + op.weight_grads
        begin[Phase.F], end[Phase.F] = op.saved, (op.kept - op.saved) if again else 0.0
        begin[Phase.R] = op.saved - op.kept
        end[Phase.B] = -op.saved
        end[Phase.I], end[Phase.W] = later - op.saved, -later
        working[[Phase.F, Phase.R]] = op.forward
        # The embedding's gradient is a weight gradient.
        working[[Phase.B, Phase.W if kind is Kind.EMBED else Phase.I]] = op.backward

    def _exchanges(self, program: Program) -> dict[tuple[Kind, str], BoolArray]:
        """(kind, "send" | "recv" | "own") -> flags [workers, phases, layers + 1] of the exchanges of this Program."""
        sides = {
            "send": SEND_STREAMS,
            "recv": RECV_STREAMS,
            "own": _INSIDE,
        }
        out = {}
        for kind in _COMM:
            of_kind = program.kind == int(kind)
            for side, streams in sides.items():
                rows = np.flatnonzero(of_kind & np.isin(program.stream, sorted(int(s) for s in streams)))
                flags = np.zeros((program.n_workers, len(Phase), program.n_layers + 1), dtype=np.bool_)
                flags[program.worker[rows], program.phase[rows], program.layer[rows] + 1] = True
                flags[:, Phase.I] = flags[:, Phase.B]  # an input gradient travels in phase B
                out[kind, side] = flags
        return out


def _compute_flags(program: Program, kind: Kind) -> BoolArray:
    """[workers, layers + 2]: whether a worker computes this kind for layer index - 1."""
    rows = np.flatnonzero(program.kind == int(kind))
    flags = np.zeros((program.n_workers, program.n_layers + 2), dtype=np.bool_)
    flags[program.worker[rows], program.layer[rows] + 1] = True
    return flags


@dataclass(frozen=True, eq=False)
class _Ops:
    """Columns of some rows, with what the tables say of them."""

    worker: NDArray[np.int64]
    kind: NDArray[np.int64]
    phase: NDArray[np.int64]
    layer: NDArray[np.int64]
    share: FloatArray
    sent: FloatArray
    received: FloatArray
    stream: FloatArray
    tables: Tables

    def is_a(self, kind: Kind, *phases: Phase) -> BoolArray:
        flags: BoolArray = (self.kind == int(kind)) & np.isin(self.phase, [int(p) for p in phases])
        return flags

    def has(self, kind: Kind, side: str, *, before: bool = False) -> BoolArray:
        """Whether this row's worker has that exchange in this row's phase and layer (or the layer before)."""
        at = np.maximum(self.layer + (0 if before else 1), 0)
        flags: BoolArray = self.tables.there[kind, side][self.worker, self.phase, at]
        return flags


def _ops(program: Program, rows: NDArray[np.intp], tables: Tables) -> _Ops:
    worker, kind, phase, layer = (
        getattr(program, name)[rows].astype(np.int64) for name in ("worker", "kind", "phase", "layer")
    )
    share = np.where(program.chunk[rows] < 0, 1.0, 1.0 / chunks_of(program, rows))
    layer_type = tables.type_of[layer + 1]
    return _Ops(
        worker,
        kind,
        phase,
        layer,
        share,
        tables.sent[worker, layer_type] * share,
        tables.received[worker, layer_type] * share,
        tables.stream[worker] * share,
        tables,
    )


def _base(ops: _Ops, tables: Tables) -> tuple[FloatArray, FloatArray]:
    """Kept activations and temporaries of compute rows, at their start and at their end, [components, rows]."""
    n = ops.worker.shape[0]
    begin, end = np.zeros((len(DYNAMIC), n)), np.zeros((len(DYNAMIC), n))
    at = (ops.worker, ops.kind, ops.phase, tables.type_of[ops.layer + 1])
    component = np.zeros(len(Kind), dtype=np.int64)
    for kind, index in _COMPONENT.items():
        component[kind] = index
    columns = np.arange(n)
    begin[component[ops.kind], columns] = tables.begin[at] * ops.share
    end[component[ops.kind], columns] = tables.end[at] * ops.share
    begin[_WORKING] = tables.working[at]
    end[_WORKING] = -tables.working[at]
    return begin, end


def in_order(program: Program, rows: NDArray[np.intp], tables: Tables) -> tuple[FloatArray, FloatArray]:
    """Bytes at the start and at the end of the compute rows `rows`, [components, rows]."""
    ops = _ops(program, rows, tables)
    begin, end = _base(ops, tables)
    _beside(program, rows, begin, end)
    D, C, P = _COMM
    x = _Shifts(ops.worker)

    attn, ffn = ops.is_a(Kind.ATTN, *_FORWARD), ops.is_a(Kind.FFN, *_FORWARD)
    x.after(attn & ops.has(D, "own"), ops.sent + ops.received)
    x.outgoing(attn & ops.has(D, "send"), ops.sent)
    x.on_end(ffn & ops.has(D, "own"), -ops.received)
    (x.on_end if tables.frames else x.on_start)(ffn & ops.has(D, "own"), -ops.sent)
    x.incoming(ffn & ops.has(D, "recv"), ops.received)
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
    begin[_EXCHANGE], end[_EXCHANGE] = x.begin, x.end
    return begin, end


def _beside(program: Program, rows: NDArray[np.intp], begin: FloatArray, end: FloatArray) -> None:
    """With two compute streams an operation of the other one may run at the same time: add its largest temporaries."""
    second = program.stream[rows] == int(Stream.COMPUTE_B)
    if not second.any():
        return
    worker, working = program.worker[rows], np.maximum(begin[_WORKING], 0.0)
    most = np.zeros((program.n_workers, 2))
    np.maximum.at(most, (worker, second.astype(np.int64)), working)
    other = np.where(second, most[worker, 0], most[worker, 1])
    begin[_WORKING] += other
    end[_WORKING] -= other


class _Shifts:
    """Exchange bytes at the starts and ends of compute rows, some of them a row earlier or later on the same worker."""

    def __init__(self, worker: NDArray[np.int64]) -> None:
        n = worker.shape[0]
        self.begin, self.end = np.zeros(n), np.zeros(n)
        index = np.arange(n)
        same = worker[1:] == worker[:-1]
        self._before, self._behind = index.copy(), index.copy()
        self._before[1:][same] = index[:-1][same]
        self._behind[:-1][same] = index[1:][same]

    def on_start(self, where: BoolArray, nbytes: FloatArray) -> None:
        self.begin += np.where(where, nbytes, 0.0)

    def on_end(self, where: BoolArray, nbytes: FloatArray) -> None:
        self.end += np.where(where, nbytes, 0.0)

    after = on_end

    def outgoing(self, where: BoolArray, nbytes: FloatArray) -> None:
        """Filled by this row, sent while the next one runs."""
        at = np.flatnonzero(where)
        self.end[at] += nbytes[at]
        np.add.at(self.end, self._behind[at], -nbytes[at])

    def incoming(self, where: BoolArray, nbytes: FloatArray) -> None:
        """Arrives while the row before runs, read by this one."""
        at = np.flatnonzero(where)
        np.add.at(self.begin, self._before[at], nbytes[at])
        self.end[at] -= nbytes[at]


def in_time(program: Program, tables: Tables) -> tuple[FloatArray, FloatArray]:
    """Bytes at the start and at the end of every row, [components, rows]."""
    ops = _ops(program, np.arange(len(program)), tables)
    begin, end = _base(ops, tables)
    waits = np.isin(program.stream, sorted(int(s) for s in COMPUTE_STREAMS)) & (program.kind == int(Kind.P2P))
    streams = {
        "send": SEND_STREAMS | _INSIDE,
        "recv": RECV_STREAMS | _INSIDE,
    }
    goes, comes = (np.isin(program.stream, sorted(int(s) for s in streams[side])) & ~waits for side in streams)
    own = goes & comes
    D, C, P = _COMM
    start, stop = begin[_EXCHANGE], end[_EXCHANGE]

    def both(kind: Kind, side: str) -> BoolArray:
        return ops.has(kind, side) | ops.has(kind, "own")

    def add(at: FloatArray, where: BoolArray, nbytes: FloatArray) -> None:
        at += np.where(where, nbytes, 0.0)

    framed = own & tables.frames
    attn, ffn = ops.is_a(Kind.ATTN, *_FORWARD), ops.is_a(Kind.FFN, *_FORWARD)
    dispatch = ops.is_a(D, *_FORWARD)
    add(stop, attn & both(D, "send"), ops.sent)
    add(stop, dispatch & goes & ~framed, -ops.sent)
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
    return begin, end
