"""What an operation of each worker holds, as tables, and which exchanges a Program has.

Decides how bytes by kind, phase and type of layer become columns of rows.
Activations belong to the Program's own order, not to a formula: allocated when the
forward of a (layer, micro-batch) starts, freed when its backward ends (with I and
W: what W still needs when W ends). Temporaries exist while their operation runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.memory import LayerBytes, OpBytes
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import RECV_STREAMS, SEND_STREAMS, Kind, Phase, Stream
from disagmoe.plan.program import Program, among

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

DYNAMIC = ("attention", "ffn", "exchange", "head", "working")
"""Components that come and go: kept activations by side, exchange buffers, embedding and head, temporaries."""
EXCHANGE, _HEAD, WORKING = 2, 3, 4
_COMPONENT = {Kind.ATTN: 0, Kind.FFN: 1, Kind.HEAD: _HEAD, Kind.EMBED: _HEAD}
COMM = (Kind.DISPATCH, Kind.COMBINE, Kind.P2P)
_CUT = (int(Kind.DISPATCH), int(Kind.FFN), int(Kind.COMBINE))
INSIDE = frozenset({Stream.COLL, Stream.NVLINK})


@dataclass(frozen=True)
class WorkerBytes:
    """Bytes of every operation of one worker: its dense and its MoE layers, the output head, the embedding.

    `step` are the temporaries of the optimizer.
    """

    layers: tuple[LayerBytes, LayerBytes]  # (dense, MoE)
    head: OpBytes
    embed: OpBytes
    step: float = 0.0


def chunks_of(program: Program) -> FloatArray:
    """Into how many chunks the operation of each sort of rows is cut in its direction: 1 where its layer is not.

    Every part of a spread head keeps all its rows and has its own part of the
    vocabulary: it is no chunk in this sense.
    """
    # Comet cuts forward and backward exchanges differently.
    sorts = program.sorts.sample
    forward = among(sorts.phase, (Phase.F, Phase.R)).astype(np.int64)
    most = np.ones((len(Kind), 2, program.n_layers + 1), dtype=np.int64)
    cut = np.flatnonzero((sorts.chunk > 0) & among(sorts.kind, _CUT))
    if cut.size:
        np.maximum.at(most, (sorts.kind[cut], forward[cut], sorts.layer[cut] + 1), sorts.chunk[cut] + 1)
    return most[sorts.kind, forward, sorts.layer + 1].astype(np.float64)


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
        self.attends_again = recompute.attention == "full"
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
        sample = program.sorts.sample
        self.there = self._exchanges(sample)
        self.attends, self.feeds = (_compute_flags(sample, kind) for kind in (Kind.ATTN, Kind.FFN))

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
            "own": INSIDE,
        }
        out = {}
        for kind in COMM:
            of_kind = program.kind == int(kind)
            for side, streams in sides.items():
                rows = np.flatnonzero(of_kind & among(program.stream, streams))
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
class Ops:
    """Columns of the sorts of rows, with what the tables say of them."""

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
        flags: BoolArray = (self.kind == int(kind)) & among(self.phase, phases)
        return flags

    def has(self, kind: Kind, side: str, *, before: bool = False) -> BoolArray:
        """Whether this sort's worker has that exchange in its phase and layer (or the layer before)."""
        at = np.maximum(self.layer + (0 if before else 1), 0)
        flags: BoolArray = self.tables.there[kind, side][self.worker, self.phase, at]
        return flags


def ops_of(program: Program, tables: Tables) -> Ops:
    """What the sorts of rows of a Program are; rows of one sort hold the same."""
    sample = program.sorts.sample
    worker, kind, phase, layer = (
        getattr(sample, name).astype(np.int64) for name in ("worker", "kind", "phase", "layer")
    )
    share = np.where(sample.chunk < 0, 1.0, 1.0 / chunks_of(program))
    layer_type = tables.type_of[layer + 1]
    return Ops(
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


def base(ops: Ops, tables: Tables) -> tuple[FloatArray, FloatArray]:
    """Kept activations and temporaries of compute rows, at their start and at their end, [components, sorts]."""
    n = ops.worker.shape[0]
    begin, end = np.zeros((len(DYNAMIC), n)), np.zeros((len(DYNAMIC), n))
    at = (ops.worker, ops.kind, ops.phase, tables.type_of[ops.layer + 1])
    component = np.zeros(len(Kind), dtype=np.int64)
    for kind, index in _COMPONENT.items():
        component[kind] = index
    columns = np.arange(n)
    begin[component[ops.kind], columns] = tables.begin[at] * ops.share
    end[component[ops.kind], columns] = tables.end[at] * ops.share
    begin[WORKING] = tables.working[at]
    end[WORKING] = -tables.working[at]
    return begin, end
