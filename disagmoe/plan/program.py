"""Program: which worker runs which operation on which stream, in which order.

A Program is data. It holds no durations and no dependencies: durations come
from the cost model (`plan/pricing.py`), dependencies follow from the operations
themselves (`plan/dependencies.py`). The same Program is drawn, verified,
simulated and executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagmoe.graph_kernels import distinct_rows, stable_order
from disagmoe.ops import Kind, Op, Phase, Stream

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]


def among(column: NDArray[np.integer], members: Iterable[int]) -> BoolArray:
    """Which entries of a column are one of a few numbers: np.isin, but for a few members many times faster."""
    found = np.zeros(column.shape, dtype=np.bool_)
    for member in members:
        found |= column == int(member)
    return found


class Row(NamedTuple):
    """One line of a Program before it is packed into columns.

    A transfer between workers is two rows of one Op: the sender's on a send
    stream and the receiver's on a receive stream, each naming the other in
    `peer`. A collective inside a worker is one row (peer -1).
    """

    worker: int
    stream: Stream
    op: Op
    peer: int = -1
    pair: int = -1


class Sorts(NamedTuple):
    """Rows of one sort differ in nothing but micro-batch and pair: few hundred sorts stand for 10^5 rows.

    `of` [rows] is the number of each row's sort, `sample` a Program of the first row of
    each sort: what depends on neither micro-batch nor order is worked out on it.
    """

    of: IntArray
    sample: Program


COLUMNS = ("worker", "stream", "kind", "phase", "layer", "microbatch", "chunk", "replica", "peer", "pair")
_OF_SORT = ("worker", "stream", "kind", "phase", "layer", "chunk", "replica", "peer")


@dataclass(frozen=True, eq=False)
class Program:
    """Ordered operations of every stream of every worker, as integer columns.

    Rows are grouped by (worker, stream); inside a group their order is the
    execution order. `n_layers` counts layers (virtual stages in a stage-level
    Program), `n_chunks` the sub-operator splits every chunked operation has.
    All columns are int32 arrays of shape [rows].

    `in_flight` bounds, per worker, the layers whose forward has started and whose
    backward has not ended (see `admission.py`); () bounds nothing. A worker whose
    forwards and backwards are on streams of their own needs it: nothing else keeps
    its forwards from running ahead.

    With `early_gather` a GRAD_SYNC in phase F comes before its layer's first forward and
    gathers what the optimizer of the step before updated; without, it ends the step.
    """

    n_workers: int
    n_layers: int
    n_microbatches: int
    n_chunks: int
    worker: IntArray
    stream: IntArray
    kind: IntArray
    phase: IntArray
    layer: IntArray
    microbatch: IntArray
    chunk: IntArray
    replica: IntArray
    peer: IntArray
    pair: IntArray
    in_flight: tuple[int, ...] = ()
    early_gather: bool = False

    def __len__(self) -> int:
        return int(self.worker.shape[0])

    @cached_property
    def sorts(self) -> Sorts:
        """The rows by what they are, whichever micro-batch they are of."""
        if not len(self):
            return Sorts(np.empty(0, dtype=np.int32), self)
        of, first = distinct_rows(np.stack([getattr(self, name) for name in _OF_SORT]))
        return Sorts(of, replace(self, **{name: getattr(self, name)[first] for name in COLUMNS}))

    def op(self, row: int) -> Op:
        """The operation of one row, as a value."""
        return Op(
            Kind(self.kind[row]),
            Phase(self.phase[row]),
            int(self.layer[row]),
            int(self.microbatch[row]),
            int(self.chunk[row]),
            int(self.replica[row]),
        )

    def table(self) -> IntArray:
        """All columns as a new array [rows, len(COLUMNS)], for `from_table`."""
        return np.stack([getattr(self, name) for name in COLUMNS]).T

    def rows(self) -> Iterator[Row]:
        """Every row as a value, in storage order."""
        for i in range(len(self)):
            yield Row(int(self.worker[i]), Stream(self.stream[i]), self.op(i), int(self.peer[i]), int(self.pair[i]))

    def stream_rows(self, worker: int, stream: Stream) -> NDArray[np.intp]:
        """Row indices of one stream, in execution order."""
        return np.flatnonzero((self.worker == worker) & (self.stream == int(stream)))

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Row],
        *,
        n_workers: int,
        n_layers: int,
        n_microbatches: int,
        n_chunks: int = 1,
        in_flight: tuple[int, ...] = (),
        early_gather: bool = False,
    ) -> Program:
        """Pack rows given in any stream order; order within a stream is kept."""
        table = np.array(
            [(r.worker, r.stream, *r.op, r.peer, r.pair) for r in rows],
            dtype=np.int32,
        ).reshape(len(rows), len(COLUMNS))
        return cls.from_table(
            table,
            n_workers=n_workers,
            n_layers=n_layers,
            n_microbatches=n_microbatches,
            n_chunks=n_chunks,
            in_flight=in_flight,
            early_gather=early_gather,
        )

    @classmethod
    def from_table(
        cls,
        table: IntArray,
        *,
        n_workers: int,
        n_layers: int,
        n_microbatches: int,
        n_chunks: int = 1,
        in_flight: tuple[int, ...] = (),
        early_gather: bool = False,
    ) -> Program:
        """Pack an int array [rows, len(COLUMNS)]; a stable sort groups the streams."""
        stream = table[:, 0].astype(np.int64) * len(Stream) + table[:, 1]
        low = int(stream.min(initial=0))
        order = stable_order(stream - low, int(stream.max(initial=0)) - low + 1)
        columns = {name: table[:, i].take(order).astype(np.int32, copy=False) for i, name in enumerate(COLUMNS)}
        return cls(
            n_workers=n_workers,
            n_layers=n_layers,
            n_microbatches=n_microbatches,
            n_chunks=n_chunks,
            in_flight=in_flight,
            early_gather=early_gather,
            **columns,
        )
