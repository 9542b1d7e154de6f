"""Decides what a unit with an overlapped pair looks like layer by layer.

A pair runs forward layer i beside backward layer L-1-i on two streams, in the
order in which Megatron-Core's combined 1F1B enqueues them
(https://github.com/NVIDIA/Megatron-LM, megatron/core/models/common/model_chunk_schedule_plan.py),
which is also the order of DeepSeek's profile of DualPipe
(https://github.com/deepseek-ai/profile-data):

    all-to-all   C_b |       D_f   D_b |       C_f
    compute      A_f | M_i   M_w   M_f | A_i   A_w

(A attention, D dispatch, M experts, C combine; f forward, b backward, i its input
and w its weight part.) Everything else follows from in-order streams and data:
M_i starts after A_f and C_b, D_b after D_f and M_i, and so on. Surplus layers of
the longer side run alone. The last attention's weight gradient comes after the
gradient of the stage's input, so that it runs beside the transfer of that.

A recomputed layer is repeated before its backward, paired or alone, under the
backward's micro-batch. Where its combine is repeated too, the repeat is one
function and comes as a whole before the ten operations, whose order it leaves alone:

    all-to-all       D_r       C_r C_b |       D_f   D_b |       C_f
    compute      A_r     M_r       A_f | M_i   M_w   M_f | A_i   A_w

That is Megatron-Core's RecomputeSegment with one layer per segment (same file;
https://github.com/NVIDIA/Megatron-LM/pull/6311), which says of it that "the A2A
issued by a replay is exposed by design": D_r has nothing beside it, C_r has A_f. No
gradient needs what the combine returned. Without C_r the repeat takes its place
among the ten operations, so that C_b hides behind A_r, D_r behind A_f and D_f behind
M_r:

    all-to-all   C_b   D_r |       D_f   D_b       |       C_f
    compute      A_r   A_f | M_r   M_i   M_w   M_f | A_i   A_w
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import numpy as np

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.expand import TailRow, step_tail
from disagmoe.plan.orders import StageOrder
from disagmoe.plan.program import Program, among
from disagmoe.plan.units import ExtraRows, Stages, UnitCell, UnitKey, UnitOrder, expand_units

FORWARD, BACKWARD = 0, 1  # sides of a unit
_EXCHANGES = (Kind.DISPATCH, Kind.COMBINE)
_FORWARD_ORDER = (Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE)
_LANES = {Phase.F: (Stream.SEND, Stream.RECV), Phase.B: (Stream.SEND_B, Stream.RECV_B)}


@dataclass(frozen=True)
class PairedLayers:
    """Templates of the units of one pipeline.

    `layers[s]` are the layers of virtual stage s, `moe[l]` says whether layer l
    has experts. `whole_alone`: a backward that is not overlapped runs as B (one
    autograd pass) and not as I and W. With `transfers` a unit's template starts with
    the receives and ends with the sends of its stages, forward ones on SEND and
    RECV, backward ones on SEND_B and RECV_B; without, they are given apart. Kinds in
    `recompute` run again (phase R) before the backward of their layer. With `chunks`
    > 1 dispatch, experts and combine of a MoE layer are cut in so many parts, which
    follow each other in place of the whole (backwards the last one first).
    """

    stages: Stages
    layers: tuple[tuple[int, ...], ...]
    moe: tuple[bool, ...]
    whole_alone: bool = False
    transfers: bool = True
    recompute: Collection[Kind] = ()
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks = {self.chunks}: the overlap degree must be at least 1")
        needed = self.stages.count
        if len(self.layers) != needed:
            raise ValueError(f"stage_layers has {len(self.layers)} stages; {needed} virtual stages are needed")
        if any(len(s) == 0 for s in self.layers):
            raise ValueError(
                f"{len(self.moe)} layers leave a stage empty; each of {needed} virtual stages needs at least one"
            )
        if [layer for s in self.layers for layer in s] != list(range(len(self.moe))):
            raise ValueError(f"stage_layers must list layers 0..{len(self.moe) - 1} once each, in order")

    def program(self, orders: Sequence[UnitOrder], microbatches: int, extra: ExtraRows | None = None) -> Program:
        """The Program of one training step: the units, then gradient reduction and the optimizer."""
        tail = [row for worker, order in enumerate(orders) for row in self._tail(worker, order)]
        table = expand_units(orders, self.template, tail, extra)
        return Program.from_table(
            table, n_workers=len(orders), n_layers=len(self.moe), n_microbatches=microbatches, n_chunks=self.chunks
        )

    def template(self, key: UnitKey) -> list[UnitCell]:
        """Rows of one unit."""
        if key.phase == Phase.W:
            return list(self._weights(key))
        of = self.stages.of[key.worker]
        forward = of[key.forward] if key.forward >= 0 else None
        backward = of[key.backward] if key.backward >= 0 else None
        paired = forward is not None and backward is not None
        split = key.phase == Phase.B and (paired or not self.whole_alone)
        return [
            *self._moves(key, forward, backward, arriving=True),
            *self._work(key, forward, backward, split, paired),
            *self._moves(key, forward, backward, arriving=False),
        ]

    def _work(
        self, key: UnitKey, forward: int | None, backward: int | None, split: bool, paired: bool
    ) -> Iterator[UnitCell]:
        """Compute and all-to-all of a unit, in the order of enqueuing."""
        last = self.stages.count - 1
        first_replica, second_replica = self.stages.replica(key.forward), self.stages.replica(key.backward)

        pair = int(paired)

        def cell(kind: Kind, phase: Phase, layer: int = -1, chunk: int = 0) -> UnitCell:
            stream = Stream.COLL if kind in _EXCHANGES else Stream.COMPUTE
            if phase is Phase.F:
                return UnitCell(stream, kind, phase, layer, FORWARD, -1, first_replica, pair, chunk)
            return UnitCell(stream, kind, phase, layer, BACKWARD, -1, second_replica, pair, chunk)

        back = Phase.I if split else Phase(max(key.phase, 0))  # phase of the backward's rows in a layer
        if forward == 0:
            yield cell(Kind.EMBED, Phase.F)
        if backward == last:
            yield cell(Kind.HEAD, Phase(key.phase))
        ahead = self.layers[forward] if forward is not None else ()
        behind = self.layers[backward][::-1] if backward is not None else ()
        recompute, cut = frozenset(self.recompute), self.chunks > 1
        for f, b in zip_longest(ahead, behind):
            late = b is not None and b == behind[-1]
            for kind, phase in _layer_pair(f is not None, b is not None, back, split, late, recompute):
                layer = f if phase is Phase.F else b
                if not self.moe[layer] and kind in _EXCHANGES:
                    continue
                for chunk in self._chunks(kind, phase, layer) if cut else (0,):
                    yield cell(kind, phase, layer, chunk)
        if split:
            yield cell(Kind.ATTN, Phase.W, behind[-1])
        if forward == last:
            yield cell(Kind.HEAD, Phase.F)
        if backward == 0:
            yield cell(Kind.EMBED, Phase(key.phase))

    def _weights(self, key: UnitKey) -> Iterator[UnitCell]:
        """The weight gradients of a stage whose input gradients are done."""
        stage, replica = self.stages.of[key.worker][key.backward], self.stages.replica(key.backward)
        work = [(Kind.HEAD, -1)] if stage == self.stages.count - 1 else []
        work += [(kind, layer) for layer in reversed(self.layers[stage]) for kind in (Kind.FFN, Kind.ATTN)]
        work += [(Kind.EMBED, -1)] if stage == 0 else []
        for kind, layer in work:
            for chunk in self._chunks(kind, Phase.W, layer):
                yield UnitCell(Stream.COMPUTE, kind, Phase.W, layer, BACKWARD, replica=replica, chunk=chunk)

    def _chunks(self, kind: Kind, phase: Phase, layer: int) -> range:
        """Parts of an operation, in their order."""
        if layer < 0 or not self.moe[layer] or kind == Kind.ATTN:
            return range(1)
        forward = phase in (Phase.F, Phase.R)
        return range(self.chunks) if forward else range(self.chunks - 1, -1, -1)

    def _moves(self, key: UnitKey, forward: int | None, backward: int | None, *, arriving: bool) -> Iterator[UnitCell]:
        """Transfers into or out of a unit, the forward's first."""
        for phase, chunk, stage in ((Phase.F, key.forward, forward), (Phase.B, key.backward, backward)):
            if stage is None or not self.transfers:
                continue
            peer, layer = self.boundary(key.worker, chunk, phase, arriving=arriving)
            if peer >= 0:
                side = FORWARD if phase == Phase.F else BACKWARD
                stream = _LANES[phase][int(arriving)]
                yield UnitCell(stream, Kind.P2P, phase, layer, side, peer, self.stages.replica(chunk))

    def boundary(self, worker: int, chunk: int, phase: Phase, *, arriving: bool) -> tuple[int, int]:
        """Peer and layer of what enters or leaves a stage in a phase; peer -1 where nothing travels."""
        stage, replica = self.stages.of[worker][chunk], self.stages.replica(chunk)
        other = stage - 1 if (phase == Phase.F) == arriving else stage + 1
        peer = self.stages.home(other, replica)
        if peer in (-1, worker):
            return -1, -1
        return peer, self.layers[min(stage, other)][-1]

    def _tail(self, worker: int, order: UnitOrder) -> list[TailRow]:
        """Reductions in the order in which gradients are complete, then the optimizer."""
        done = among(order.phase, (Phase.B, Phase.W))
        complete = StageOrder(
            np.full(int(done.sum()), Phase.B, np.int8), order.backward[done], order.backward_microbatch[done]
        )
        of = self.stages.of[worker]
        shared = bool({0, self.stages.count - 1} & set(of))
        return step_tail(worker, complete, {c: self.layers[s] for c, s in enumerate(of)}, shared=shared)


@cache
def _layer_pair(
    ahead: bool, behind: bool, back: Phase, split: bool, late: bool, recompute: frozenset[Kind]
) -> tuple[tuple[Kind, Phase], ...]:
    """Kinds and phases of one forward layer beside one backward layer, either of which may be missing.

    `back` is the phase of the backward's experts and attention; with `split` their
    weight parts follow, the attention's not here if it is `late`. The repeat of a
    backward's layer stands in front if it has the combine, else among the ten.
    """
    again = {kind: behind and kind in recompute for kind in Kind}
    first: list[tuple[Kind, Phase]] = []
    if again[Kind.COMBINE]:
        first = [(kind, Phase.R) for kind in _FORWARD_ORDER if again[kind]]
        again = dict.fromkeys(again, False)
    ops = (
        (behind, Kind.COMBINE, Phase.B),
        (again[Kind.ATTN], Kind.ATTN, Phase.R),
        (again[Kind.DISPATCH], Kind.DISPATCH, Phase.R),
        (ahead, Kind.ATTN, Phase.F),
        (again[Kind.FFN], Kind.FFN, Phase.R),
        (behind, Kind.FFN, back),
        (ahead, Kind.DISPATCH, Phase.F),
        (behind and split, Kind.FFN, Phase.W),
        (behind, Kind.DISPATCH, Phase.B),
        (ahead, Kind.FFN, Phase.F),
        (ahead, Kind.COMBINE, Phase.F),
        (behind, Kind.ATTN, back),
        (behind and split and not late, Kind.ATTN, Phase.W),
    )
    return (*first, *((kind, phase) for there, kind, phase in ops if there))
