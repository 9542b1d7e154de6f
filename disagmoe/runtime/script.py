"""One worker's part of a Program: what it runs on which stream, and what each row waits for.

Decides which data dependencies a worker must watch itself: those between two rows
of its own. What another worker has to do first arrives with a transfer, or with a
collective that the operation is. One dependency is not in the Graph, where a
transfer is over for both ends at once: a rank may be asked for the backward of an
exchange before its own end of the forward has returned the route, so every
DISPATCH and COMBINE of a later phase also waits for the worker's own F of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.dependencies import Graph, build_graph, data_edges, is_wait
from disagmoe.plan.program import Program


@dataclass(frozen=True)
class Task:
    """One row of a Program on its worker; `needs` are rows of the same worker."""

    row: int
    op: Op
    stream: Stream
    peer: int
    needs: tuple[int, ...]


@dataclass(frozen=True)
class Script:
    """The streams of one worker, tasks in order."""

    worker: int
    streams: Mapping[Stream, tuple[Task, ...]]

    def tasks(self) -> list[Task]:
        """Every task, stream after stream: the worker's rows in storage order."""
        return [task for stream in self.streams.values() for task in stream]


def script_of(program: Program, worker: int, graph: Graph | None = None) -> Script:
    """The Script of `worker`; `graph` saves building it again."""
    graph = build_graph(program) if graph is None else graph
    needs = _needs(program, worker, graph)
    streams: dict[Stream, tuple[Task, ...]] = {}
    for stream in Stream:
        rows = program.stream_rows(worker, stream).tolist()
        if rows:
            streams[stream] = tuple(
                Task(row, program.op(row), stream, int(program.peer[row]), tuple(sorted(needs.get(row, ()))))
                for row in rows
            )
    return Script(worker, streams)


def _needs(program: Program, worker: int, graph: Graph) -> dict[int, set[int]]:
    """The rows of `worker` that each of its rows waits for, those before it on its own stream left out."""
    src, dst = data_edges(graph)
    needs: dict[int, set[int]] = {}
    for before in (graph.first_row, graph.second_row):
        for after in (graph.first_row, graph.second_row):
            a, b = before[src], after[dst]
            here = (a >= 0) & (b >= 0)
            here &= (program.worker[a] == worker) & (program.worker[b] == worker)
            here &= (program.stream[a] != program.stream[b]) | (a > b)
            for x, y in np.stack([a[here], b[here]], axis=1).tolist():
                needs.setdefault(y, set()).add(x)
    for x, y in _own_routes(program, worker):
        needs.setdefault(y, set()).add(x)
    return needs


def _own_routes(program: Program, worker: int) -> list[tuple[int, int]]:
    """(row of an exchange's F, row of a later phase of it) for every exchange of the worker."""
    exchanges = np.isin(program.kind, (Kind.DISPATCH, Kind.COMBINE)) & (program.worker == worker) & ~is_wait(program)
    rows = np.flatnonzero(exchanges).tolist()
    forward = {program.op(row): row for row in rows if program.phase[row] == int(Phase.F)}
    later = ((row, program.op(row)) for row in rows if program.phase[row] != int(Phase.F))
    return [(forward[first], row) for row, op in later if (first := op._replace(phase=Phase.F)) in forward]
