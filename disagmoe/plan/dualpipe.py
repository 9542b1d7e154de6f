"""Decides the orders and Programs of DualPipe and DualPipeV.

DualPipe (https://github.com/deepseek-ai/DualPipe, dualpipe/dualpipe.py) feeds
micro-batches from both ends of the pipeline: rank r holds stage r of direction 0
and stage P-1-r of direction 1, so every stage exists twice. DualPipeV cuts that
in half: one direction through 2R stages that go down and up again over R ranks.
Both follow the same eight steps, in terms of a rank's *own* end (0: the one it is
nearer to) and the *other* end (1).

Pipeline transfers are sent as soon as their data is there and received ahead of
use. With `p2p_exposed` they are batched and waited for where the open code does:
what a unit produced leaves when the next unit is about to begin, together with
what that unit needs, and nothing runs until the whole batch has arrived.

A weight gradient that is put off keeps its inputs, which recompute is there to drop:
in the middle ranks those of half of all layers at once. With recompute every
backward outside a pair therefore runs whole (`enable_zb` off, in the open code's terms).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.expand import packed
from disagmoe.plan.pairs import PairedLayers
from disagmoe.plan.program import COLUMNS, Program
from disagmoe.plan.units import ExtraRows, Stages, UnitOrder, unit_order, unit_program

_LANES = {True: (Stream.SEND, Stream.RECV), False: (Stream.SEND_B, Stream.RECV_B)}
_ORDERS_KEPT = 8
"""Recorded orders that are remembered: a search asks for the same with other layers, recompute and chunks."""
OWN, OTHER = 0, 1
"""Ends of the pipeline, seen from a rank."""


class Move(NamedTuple):
    """A transfer that a rank posts and waits for before unit `before`: what its stage `chunk` gets or gives."""

    before: int
    phase: Phase
    chunk: int
    microbatch: int
    arriving: bool


class _Rank:
    """Records what one rank does: its units, and the batches of transfers between them.

    `chunk_of[end]` is the chunk (and direction) of an end and `first_of[end]` its
    first micro-batch. Every kind of event takes the micro-batches of an end in order.
    Unless it `defers` weight gradients, every backward is whole and `weights` only waits.
    """

    def __init__(self, chunk_of: tuple[int, int], first_of: tuple[int, int], defers: bool) -> None:
        self.chunk_of, self.first_of, self.defers = chunk_of, first_of, defers
        self.units: list[tuple[int, int, int, int, int]] = []
        self.moves: list[Move] = []
        self._posted: list[tuple[Phase, int, int, bool]] = []
        self._next: dict[tuple[object, ...], int] = {}
        self._weights: list[tuple[int, int]] = []

    def _take(self, *event: object, end: int) -> int:
        taken = self._next.get((*event, end), 0)
        self._next[*event, end] = taken + 1
        return self.first_of[end] + taken

    def post(self, phase: Phase, end: int, *, arriving: bool) -> None:
        """Add a transfer to the next batch."""
        self._posted.append((phase, self.chunk_of[end], self._take(phase, arriving, end=end), arriving))

    def commit(self) -> None:
        """Start the batch and wait for it."""
        self.moves += [Move(len(self.units), *move) for move in self._posted]
        self._posted.clear()

    def forward(self, end: int, *, recv: bool = True, send: bool = True) -> None:
        if recv:
            self.post(Phase.F, end, arriving=True)
        self.commit()
        self.units.append((self.chunk_of[end], self._take("forward", end=end), -1, -1, -1))
        if send:
            self.post(Phase.F, end, arriving=False)

    def backward(self, end: int, phase: Phase = Phase.B, *, send: bool = True) -> None:
        self.post(Phase.B, end, arriving=True)
        self.commit()
        chunk, microbatch = self.chunk_of[end], self._take("backward", end=end)
        phase = phase if self.defers else Phase.B
        self.units.append((-1, -1, phase, chunk, microbatch))
        if phase == Phase.I:
            self._weights.append((chunk, microbatch))
        if send:
            self.post(Phase.B, end, arriving=False)

    def weights(self) -> None:
        """The oldest weight gradients that are waiting."""
        self.commit()
        if self.defers:
            self.units.append((-1, -1, Phase.W, *self._weights.pop(0)))

    def pair(self, forward: int, backward: int, *, recv: bool = True) -> None:
        if recv:
            self.post(Phase.F, forward, arriving=True)
        self.post(Phase.B, backward, arriving=True)
        self.commit()
        ahead = self.chunk_of[forward], self._take("forward", end=forward)
        behind = self.chunk_of[backward], self._take("backward", end=backward)
        self.units.append((*ahead, Phase.B, *behind))
        self.post(Phase.F, forward, arriving=False)
        self.post(Phase.B, backward, arriving=False)


def _begin(rank: _Rank, half: int, q: int) -> None:
    """Steps 1 to 3: forwards from the own end, then from both, then the first zero-bubble backwards.

    q counts from the own end (0) to the middle (half - 1). The order of posts and
    waits is that of the source: it is what keeps neighbours' batches matched.
    """
    middle = q == half - 1
    for _ in range(2 * (half - q - 1)):
        rank.forward(OWN)
    rank.post(Phase.F, OWN, arriving=True)
    for i in range(q + 1):
        rank.forward(OWN, recv=False, send=middle)
        rank.post(Phase.F, OWN, arriving=True)
        rank.forward(OTHER, send=not middle or i < q)
        if not middle:
            rank.post(Phase.F, OWN, arriving=False)
    for _ in range(half - q - 1):
        rank.backward(OTHER, Phase.I)
        rank.post(Phase.F, OTHER, arriving=True)
        rank.weights()
        rank.forward(OTHER, recv=False)


def _steady(rank: _Rank, half: int, q: int, pairs: int) -> None:
    """Steps 4 and 5: `pairs` times two overlapped pairs, then pairs while the own end has no forwards left.

    The first pair of a middle rank would hold one micro-batch twice and runs as F, then B.
    """
    for i in range(pairs):
        if i == 0 and q == half - 1:
            rank.forward(OWN, recv=False, send=False)
            rank.post(Phase.F, OTHER, arriving=False)
            rank.backward(OTHER, send=False)
            rank.post(Phase.F, OWN, arriving=False)
            rank.post(Phase.B, OTHER, arriving=False)
        else:
            rank.pair(OWN, OTHER, recv=i > 0)
        rank.pair(OTHER, OWN)
    for _ in range(half - q - 1):
        rank.backward(OTHER)
        rank.pair(OTHER, OWN)


def _finish(rank: _Rank, half: int, q: int) -> None:
    """Steps 6 to 8: backwards, the second half of them without weights, then the weights."""
    phase = Phase.B
    for i in range(q + 1):
        split = i == (q + 1) // 2
        phase = Phase.I if split and q % 2 == 1 else phase
        rank.backward(OTHER, phase)
        phase = Phase.I if split and q % 2 == 0 else phase
        rank.backward(OWN, phase)
    for _ in range(half - q - 1):
        rank.weights()
        rank.backward(OWN, Phase.I)
    for _ in range(q + 1):
        rank.weights()
    rank.commit()


@lru_cache(maxsize=_ORDERS_KEPT)
def _dualpipe(ranks: int, microbatches: int, *, defers: bool = True) -> tuple[_Rank, ...]:
    if ranks < 2 or ranks % 2:
        raise ValueError(f"DualPipe needs an even number of pipeline ranks, at least 2; got {ranks}")
    if microbatches % 2:
        raise ValueError(f"DualPipe needs an even number of micro-batches, half per direction; got {microbatches}")
    if microbatches < 2 * ranks:
        raise ValueError(f"DualPipe needs at least 2 x {ranks} ranks = {2 * ranks} micro-batches; got {microbatches}")
    recorded = []
    for r in range(ranks):
        q = min(r, ranks - 1 - r)
        directions = (0, 1) if r < ranks // 2 else (1, 0)
        first_of = (directions[0] * microbatches // 2, directions[1] * microbatches // 2)
        rank = _Rank(directions, first_of, defers)
        _begin(rank, ranks // 2, q)
        _steady(rank, ranks // 2, q, microbatches // 2 - ranks + q + 1)
        _finish(rank, ranks // 2, q)
        recorded.append(rank)
    return tuple(recorded)


@lru_cache(maxsize=_ORDERS_KEPT)
def _dualpipev(ranks: int, microbatches: int, *, defers: bool = True) -> tuple[_Rank, ...]:
    if ranks < 1:
        raise ValueError(f"DualPipeV needs at least 1 pipeline rank; got {ranks}")
    if microbatches < 2 * ranks:
        raise ValueError(
            f"DualPipeV needs at least as many micro-batches as its 2 x {ranks} = {2 * ranks} stages; "
            f"got {microbatches}"
        )
    recorded = []
    for r in range(ranks):
        rank = _Rank((0, 1), (0, 0), defers)
        _begin(rank, ranks, r)
        _steady(rank, ranks, r, microbatches - 2 * ranks + r + 1)
        _finish(rank, ranks, r)
        recorded.append(rank)
    return tuple(recorded)


def dualpipe_orders(ranks: int, microbatches: int) -> tuple[UnitOrder, ...]:
    """DualPipe for P ranks and N micro-batches; chunk c of a rank runs in direction c.

    Direction 0 has micro-batches 0..N/2-1 and enters at rank 0, direction 1 has the
    others and enters at rank P-1. Raises ValueError unless P and N are even and N >= 2P.
    """
    return tuple(unit_order(rank.units) for rank in _dualpipe(ranks, microbatches))


def dualpipev_orders(ranks: int, microbatches: int) -> tuple[UnitOrder, ...]:
    """DualPipeV for R ranks and N micro-batches. Raises ValueError unless N >= 2R."""
    return tuple(unit_order(rank.units) for rank in _dualpipev(ranks, microbatches))


def dualpipe_stages(ranks: int) -> Stages:
    """Rank r holds stage r of direction 0 and stage P-1-r of direction 1."""
    return Stages(tuple((r, ranks - 1 - r) for r in range(ranks)), bidirectional=True)


def dualpipev_stages(ranks: int) -> Stages:
    """Rank r holds stages r and 2R-1-r."""
    return Stages(tuple((r, 2 * ranks - 1 - r) for r in range(ranks)))


def dualpipe_stage_program(ranks: int, microbatches: int) -> Program:
    """The stage-level Program of DualPipe, for closed forms."""
    return unit_program(dualpipe_orders(ranks, microbatches), dualpipe_stages(ranks), microbatches)


def dualpipev_stage_program(ranks: int, microbatches: int) -> Program:
    """The stage-level Program of DualPipeV, for closed forms."""
    return unit_program(dualpipev_orders(ranks, microbatches), dualpipev_stages(ranks), microbatches)


def dualpipe_program(
    *,
    ranks: int,
    microbatches: int,
    stage_layers: Sequence[Sequence[int]],
    moe: Sequence[bool],
    p2p_exposed: bool = False,
    recompute: Collection[Kind] = (),
) -> Program:
    """The layer-level Program of one training step of DualPipe.

    `stage_layers[s]` are the layers of stage s of P (contiguous, at least one),
    `moe[l]` says whether layer l has experts. The replica of a row is its direction.
    Gradients of a layer are reduced over both its copies (see `build_graph`). Kinds
    in `recompute` run again before the backward of their layer (see `pairs.py`), and
    no weight gradients are deferred then.
    """
    layers = _paired(dualpipe_stages(ranks), stage_layers, moe, recompute)
    return _program(_dualpipe(ranks, microbatches, defers=not recompute), layers, microbatches, p2p_exposed)


def dualpipev_program(
    *,
    ranks: int,
    microbatches: int,
    stage_layers: Sequence[Sequence[int]],
    moe: Sequence[bool],
    p2p_exposed: bool = False,
    recompute: Collection[Kind] = (),
    chunks: int = 1,
) -> Program:
    """The layer-level Program of one training step of DualPipeV: as DualPipe's, with 2R stages held once.

    Exchange and experts are cut in `chunks` parts.
    """
    layers = _paired(dualpipev_stages(ranks), stage_layers, moe, recompute, chunks)
    return _program(_dualpipev(ranks, microbatches, defers=not recompute), layers, microbatches, p2p_exposed)


def _paired(
    stages: Stages,
    stage_layers: Sequence[Sequence[int]],
    moe: Sequence[bool],
    recompute: Collection[Kind],
    chunks: int = 1,
) -> PairedLayers:
    layers = tuple(tuple(s) for s in stage_layers)
    return PairedLayers(
        stages, layers, tuple(moe), whole_alone=True, transfers=False, recompute=recompute, chunks=chunks
    )


def _program(recorded: Sequence[_Rank], layers: PairedLayers, microbatches: int, p2p_exposed: bool) -> Program:
    orders = [unit_order(rank.units) for rank in recorded]
    return layers.program(orders, microbatches, _transfers(recorded, layers, p2p_exposed))


def _transfers(recorded: Sequence[_Rank], layers: PairedLayers, exposed: bool) -> ExtraRows:
    """The sends and receives of every rank in the order of posting, and where compute waits for them if it does.

    Whatever goes to a higher rank uses SEND and RECV, whatever goes to a lower one
    SEND_B and RECV_B, so that a stream always joins the same two workers.
    """
    rows: list[tuple[int, ...]] = []
    first = 0
    for worker, rank in enumerate(recorded):
        ends = {
            (phase, chunk, arriving): layers.boundary(worker, chunk, phase, arriving=arriving)
            for phase, chunk, arriving in product((Phase.F, Phase.B), (0, 1), (False, True))
        }
        for before, phase, chunk, microbatch, arriving in rank.moves:
            peer, layer = ends[phase, chunk, arriving]
            if peer < 0:
                continue
            upwards = (peer > worker) != arriving
            stream = _LANES[upwards][arriving]
            op = (Kind.P2P, phase, layer, microbatch, 0, layers.stages.replica(chunk))
            rows.append((first + before, worker, stream, *op, peer, -1))
            if exposed:
                rows.append((first + before, worker, Stream.COMPUTE, *op, -1, -1))
        first += len(rank.units)
    table = packed(rows, 1 + len(COLUMNS))
    return ExtraRows(table[:, 0], table[:, 1:])
