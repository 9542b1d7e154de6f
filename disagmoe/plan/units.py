"""Decides how orders with overlapped forward/backward pairs are written down and stamped out.

A *unit* is what one worker runs as a whole: a forward, a backward (whole, or its
input or weight part alone), or a forward and a backward of different
micro-batches overlapped with each other. A stage-level Program has one or two
STAGE rows per unit; a layer-level one has the rows of a template per kind of
unit, stamped out with array operations only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagmoe.graph_kernels import distinct_rows
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.expand import TailRow, packed
from disagmoe.plan.program import COLUMNS, Program, among

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]
COLUMN = {name: i for i, name in enumerate(COLUMNS)}


class UnitOrder(NamedTuple):
    """The units of one worker in execution order; all arrays are int32 of shape [units].

    `forward` is the chunk (virtual stage of this worker) that runs forward, -1
    where the unit is a backward alone. `phase` is Phase.B, I or W of the backward
    of chunk `backward`, and both are -1 where the unit is a forward alone. A unit
    with both is an overlapped pair.
    """

    forward: IntArray
    forward_microbatch: IntArray
    phase: IntArray
    backward: IntArray
    backward_microbatch: IntArray

    @property
    def paired(self) -> NDArray[np.bool_]:
        """Which units overlap a forward with a backward."""
        return (self.forward >= 0) & (self.backward >= 0)


def unit_order(units: Iterable[tuple[int, int, int, int, int]]) -> UnitOrder:
    """Pack units given as tuples in the order of UnitOrder's fields."""
    table = np.array(list(units), dtype=np.int32).reshape(-1, len(UnitOrder._fields))
    return UnitOrder(*np.ascontiguousarray(table.T))


def peak_in_flight(order: UnitOrder) -> int:
    """Most stage activations the worker holds at once: forward begun, B or I not yet done."""
    begins = (order.forward >= 0).astype(np.int64)
    ends = among(order.phase, (Phase.B, Phase.I)).astype(np.int64)
    held = np.cumsum(begins - ends)
    return int((held + ends).max(initial=0))  # inside a pair the new activation joins before the old one leaves


@dataclass(frozen=True)
class Stages:
    """Which virtual stage each chunk of each worker is.

    `of[w][c]` is the stage of chunk c on worker w. In a `bidirectional` pipeline
    chunk c runs in direction c and every stage exists once per direction.
    """

    of: tuple[tuple[int, ...], ...]
    bidirectional: bool = False

    @cached_property
    def count(self) -> int:
        """Number of different stages."""
        return 1 + max(s for stages in self.of for s in stages)

    @cached_property
    def _home(self) -> dict[tuple[int, int], int]:
        return {(self.replica(c), s): w for w, stages in enumerate(self.of) for c, s in enumerate(stages)}

    def replica(self, chunk: int) -> int:
        """Direction in which a chunk runs; 0 in a pipeline of one direction."""
        return chunk if self.bidirectional else 0

    def home(self, stage: int, replica: int) -> int:
        """Worker of a stage in one direction, -1 before the first and after the last stage."""
        return self._home[replica, stage] if 0 <= stage < self.count else -1


def unit_program(orders: Sequence[UnitOrder], stages: Stages, microbatches: int) -> Program:
    """A stage-level Program: STAGE rows, layer = virtual stage, both rows of a pair labelled alike.

    The first row of a pair is its forward. `build_graph` makes the two one unit
    that starts when both can; price it with `unit_seconds`.
    """
    worker, joined = _join(orders)
    of = np.array(stages.of, dtype=np.int32)
    pair = np.where(joined.paired, np.cumsum(joined.paired) - 1, -1)
    table = np.zeros((worker.shape[0], 2, len(COLUMNS)), dtype=np.int32)
    phases = (np.full_like(joined.phase, Phase.F), joined.phase)
    chunks = (joined.forward, joined.backward)
    for side, microbatch in enumerate((joined.forward_microbatch, joined.backward_microbatch)):
        rows = table[:, side]
        rows[:, COLUMN["worker"]] = worker
        rows[:, COLUMN["stream"]] = Stream.COMPUTE
        rows[:, COLUMN["kind"]] = Kind.STAGE
        rows[:, COLUMN["phase"]] = phases[side]
        rows[:, COLUMN["layer"]] = of[worker, chunks[side]]
        rows[:, COLUMN["microbatch"]] = microbatch
        rows[:, COLUMN["replica"]] = np.maximum(chunks[side], 0) if stages.bidirectional else 0
        rows[:, COLUMN["peer"]] = -1
        rows[:, COLUMN["pair"]] = pair
    exists = np.stack(chunks, axis=1) >= 0
    return Program.from_table(table[exists], n_workers=len(orders), n_layers=stages.count, n_microbatches=microbatches)


def unit_seconds(program: Program, *, forward: float, backward: float, pair: float, weight: float = 0.0) -> FloatArray:
    """Seconds of the rows of a stage-level Program, shape [rows], for `Pricing.ideal`.

    `forward` and `backward` are one stage's, `weight` <= `backward` is the part of
    it that a W takes (an I takes the rest), `pair` is a whole overlapped pair; it
    is charged to the pair's first row.
    """
    seconds = np.zeros(len(Phase))
    seconds[[Phase.F, Phase.I, Phase.W, Phase.B]] = forward, backward - weight, weight, backward
    paired = np.where(program.phase == Phase.F, pair, 0.0)
    return np.where(program.pair >= 0, paired, seconds[program.phase])


class UnitKey(NamedTuple):
    """What decides the template of a unit: where it runs and which chunks it runs in which phase."""

    worker: int
    forward: int
    phase: int
    backward: int


class UnitCell(NamedTuple):
    """One row of a template: everything of a Program row but worker and micro-batch.

    `side` says whose micro-batch it is: 0 the forward's, 1 the backward's.
    `paired` rows carry the number of the unit's pair.
    """

    stream: Stream
    kind: Kind
    phase: Phase
    layer: int
    side: int
    peer: int = -1
    replica: int = 0
    paired: int = 0
    chunk: int = 0


class ExtraRows(NamedTuple):
    """Rows that stand before units, as int32 arrays of shape [rows].

    `before` is the index of the unit over all workers, one after the other;
    a worker's number of units means after its last one.
    """

    before: IntArray
    table: IntArray


def expand_units(
    orders: Sequence[UnitOrder],
    template: Callable[[UnitKey], Sequence[UnitCell]],
    tail: Iterable[TailRow],
    extra: ExtraRows | None = None,
) -> IntArray:
    """The table [rows, len(COLUMNS)] for `Program.from_table`.

    `template` is asked once per different UnitKey. `extra` rows come before the
    units they name, `tail` rows (micro-batch -1) after everything.
    """
    worker, joined = _join(orders)
    columns = np.stack([worker, joined.forward, joined.phase, joined.backward])
    kind_of, first = distinct_rows(columns)
    templates = [template(UnitKey(*key)) for key in columns[:, first].T.tolist()]
    cells = packed((c for t in templates for c in t), len(UnitCell._fields))
    length = np.array([len(t) for t in templates])
    start = np.cumsum(length) - length
    repeat = length[kind_of]
    unit = np.repeat(np.arange(worker.shape[0]), repeat)
    # Row i of a unit's block is cell start + i of its template.
    source = np.arange(unit.shape[0]) + np.repeat(start[kind_of] - (np.cumsum(repeat) - repeat), repeat)
    cell = {name: cells[:, i].take(source) for i, name in enumerate(UnitCell._fields)}
    body = np.zeros((len(COLUMNS), unit.shape[0]), dtype=np.int32).T  # columns lie together
    for name in ("stream", "kind", "phase", "layer", "peer", "replica", "chunk"):
        body[:, COLUMN[name]] = cell[name]
    body[:, COLUMN["worker"]] = worker[unit]
    microbatch = np.where(cell["side"] == 0, joined.forward_microbatch[unit], joined.backward_microbatch[unit])
    body[:, COLUMN["microbatch"]] = microbatch
    pair = np.where(joined.paired, np.cumsum(joined.paired) - 1, -1)
    body[:, COLUMN["pair"]] = np.where(cell["paired"] == 1, pair[unit], -1)
    if extra is not None:
        place = np.concatenate([2 * extra.before, 2 * unit + 1])
        body = np.concatenate([extra.table, body])[np.argsort(place, kind="stable")]
    rows = [(t.worker, t.stream, t.kind, t.phase, t.layer, -1, 0, 0, -1, -1) for t in tail]
    return np.concatenate([body, np.array(rows, dtype=np.int32).reshape(-1, len(COLUMNS))])


def _join(orders: Sequence[UnitOrder]) -> tuple[IntArray, UnitOrder]:
    """Worker of every unit and the orders of all workers one after the other."""
    worker = np.repeat(np.arange(len(orders), dtype=np.int32), [o.phase.shape[0] for o in orders])
    return worker, UnitOrder(*(np.concatenate(column) for column in zip(*orders, strict=True)))
