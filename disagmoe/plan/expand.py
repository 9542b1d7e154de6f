"""Decides how stage-level actions become the layer-level rows of a Program.

A generator describes what one action looks like once per (worker, phase, chunk),
as a template of rows; this module stamps the templates out along the orders of
all workers with array operations only, so that plans of 10^5 rows are built in
milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.orders import StageOrder
from disagmoe.plan.program import COLUMNS

IntArray = NDArray[np.int32]


class Cell(NamedTuple):
    """One row of a template: everything of a Program row but worker and micro-batch."""

    stream: Stream
    kind: Kind
    phase: Phase
    layer: int
    chunk: int = 0
    peer: int = -1


Template = Sequence[Cell]
TemplateKey = tuple[int, int, int]
"""(worker, phase, chunk) of an action."""


class TailRow(NamedTuple):
    """One row after the last micro-batch: gradient synchronisation or the optimizer."""

    worker: int
    stream: Stream
    kind: Kind
    phase: Phase
    layer: int = -1


def expand(
    orders: Sequence[StageOrder], templates: Mapping[TemplateKey, Template], tail: Iterable[TailRow]
) -> IntArray:
    """The table [rows, len(COLUMNS)] for `Program.from_table`.

    `orders[w]` is the order of worker w; an action without a template has no rows
    (a padded stage that does not exist). `tail` rows have micro-batch -1 and come
    after all actions.
    """
    keys = sorted(k for k, cells in templates.items() if cells)
    cells = packed((c for k in keys for c in templates[k]), len(Cell._fields))
    action, worker, microbatch = _actions(orders, keys)
    length = np.array([len(templates[k]) for k in keys] + [0])
    start = np.concatenate(([0], np.cumsum(length)[:-1]))
    repeat = length[action]
    rows = int(repeat.sum())
    # Row i of an action's block is cell start + i of its template.
    source = np.arange(rows) + np.repeat(start[action] - (np.cumsum(repeat) - repeat), repeat)
    tail_rows = list(tail)
    table = np.empty((len(COLUMNS), rows + len(tail_rows)), dtype=np.int32).T  # columns lie together
    body = table[:rows]
    column = {name: i for i, name in enumerate(COLUMNS)}
    body[:, column["worker"]] = np.repeat(worker, repeat)
    body[:, column["microbatch"]] = np.repeat(microbatch, repeat)
    for i, name in enumerate(Cell._fields):
        body[:, column[name]] = cells[:, i].take(source)
    body[:, column["replica"]] = 0
    body[:, column["pair"]] = -1
    for i, t in enumerate(tail_rows, start=rows):
        table[i] = (t.worker, t.stream, t.kind, t.phase, t.layer, -1, 0, 0, -1, -1)
    return table


def packed(cells: Iterable[Iterable[int]], columns: int) -> IntArray:
    """Cells as an array [cells, columns]; np.array takes several times as long over enumerations."""
    return np.fromiter(itertools.chain.from_iterable(cells), dtype=np.int32).reshape(-1, columns)


def step_tail(worker: int, order: StageOrder, layers: Mapping[int, Sequence[int]], *, shared: bool) -> list[TailRow]:
    """What a worker does after its last micro-batch.

    Gradients of a layer are reduced in the order in which the layers' last
    backwards finish; `layers[c]` are the layers of chunk c in forward order.
    `shared` workers also hold the embedding or the output head and reduce its
    gradient last (layer -1). Then the optimizer runs and the updated parameters
    are gathered.
    """
    latest_first = order.chunk[order.phase == Phase.B][::-1]
    chunks, latest = np.unique(latest_first, return_index=True)
    rows = [
        TailRow(worker, Stream.SYNC, Kind.GRAD_SYNC, Phase.B, layer)
        for c in chunks[np.argsort(-latest)].tolist()
        for layer in reversed(layers.get(c, ()))
    ]
    if shared:
        rows.append(TailRow(worker, Stream.SYNC, Kind.GRAD_SYNC, Phase.B))
    rows.append(TailRow(worker, Stream.COMPUTE, Kind.OPTIM, Phase.F))
    rows.append(TailRow(worker, Stream.SYNC, Kind.GRAD_SYNC, Phase.F))
    return rows


def _actions(orders: Sequence[StageOrder], keys: Sequence[TemplateKey]) -> tuple[NDArray[np.intp], IntArray, IntArray]:
    """Template index (len(keys) where there is none), worker and micro-batch of every action."""
    worker = np.repeat(np.arange(len(orders), dtype=np.int32), [o.phase.shape[0] for o in orders])
    phase = np.concatenate([o.phase for o in orders]).astype(np.intp)
    chunk = np.concatenate([o.chunk for o in orders]).astype(np.intp)
    index = np.full((len(orders), len(Phase), int(chunk.max(initial=0)) + 1), len(keys), dtype=np.intp)
    for i, (w, f, c) in enumerate(keys):
        index[w, f, c] = i
    return index[worker, phase, chunk], worker, np.concatenate([o.microbatch for o in orders])
