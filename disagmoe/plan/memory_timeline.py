"""Integrates bytes over a Program: what every worker's GPU holds, operation by operation.

Decides in which order the operations of a worker count and sums up what
`memory_events.py` says each of them allocates and frees. Everything is vectorised
over rows; bytes are float64 (exact to 2^53).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.recompute import Recompute
from disagmoe.ops import COMPUTE_STREAMS, Kind, Phase, Stream
from disagmoe.plan.memory_events import in_order, in_time
from disagmoe.plan.memory_tables import Tables, WorkerBytes, chunks_of
from disagmoe.plan.program import Program, among

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Levels:
    """What is held after each event; events are grouped by worker.

    `worker` [events]; `where` [events] is the index in the worker's compute order
    or a time in seconds; `nbytes` [len(DYNAMIC), events]; worker w has the events
    `first[w]` to `first[w + 1]`.
    """

    worker: NDArray[np.int64]
    where: FloatArray
    nbytes: FloatArray
    first: NDArray[np.int64]

    def peak_event(self, worker: int) -> int:
        """The event after which a worker holds most, -1 if it has none."""
        low, high = int(self.first[worker]), int(self.first[worker + 1])
        return low + int(self.nbytes[:, low:high].sum(axis=0).argmax()) if high > low else -1


def levels(
    program: Program,
    workers: Sequence[WorkerBytes],
    moe: Sequence[bool],
    recompute: Recompute,
    *,
    frames: bool = False,
    start_s: FloatArray | None = None,
    end_s: FloatArray | None = None,
) -> Levels:
    """Bytes over the compute order of every worker, or over time where `start_s` and `end_s` [rows] are given.

    `moe[l]` says whether layer l has experts; `frames` as in `cost.memory.layer_bytes`.
    """
    tables = Tables(program, workers, moe, recompute, frames)
    if start_s is None or end_s is None:
        delta, worker, at = _ordered(program, *_in_order(program, tables))
    else:
        delta, worker, at = _timed(program, *in_time(program, tables), start_s, end_s)
    nbytes = np.cumsum(delta, axis=1)
    first = np.searchsorted(worker, np.arange(program.n_workers + 1), side="left")
    before = np.where(first > 0, first - 1, 0)[:-1]
    offset = np.where(first[:-1] > 0, nbytes[:, before] if nbytes.shape[1] else 0.0, 0.0)
    return Levels(worker, at, nbytes - offset[:, worker], first)


def peak_bytes(
    program: Program,
    workers: Sequence[WorkerBytes],
    moe: Sequence[bool],
    recompute: Recompute,
    *,
    frames: bool = False,
    start_s: FloatArray | None = None,
    end_s: FloatArray | None = None,
) -> FloatArray:
    """Most bytes that every worker holds at once, [workers]: the peaks of `levels`, without their components."""
    tables = Tables(program, workers, moe, recompute, frames)

    if start_s is None or end_s is None:
        delta, worker, _ = _ordered(program, *_in_order(program, tables, whole=True))
    else:
        delta, worker, _ = _timed(program, *in_time(program, tables, whole=True), start_s, end_s)
    first = np.searchsorted(worker, np.arange(program.n_workers + 1), side="left")
    held = (np.cumsum(delta[0, low:high]) for low, high in itertools.pairwise(first.tolist()))
    return np.array([mine.max(initial=0.0) if mine.size else 0.0 for mine in held])


def _in_order(
    program: Program, tables: Tables, *, whole: bool = False
) -> tuple[NDArray[np.intp], FloatArray, FloatArray]:
    """Compute rows in order, and the bytes at the start and the end of each [components, rows]."""
    rows = compute_order(program)
    return rows, *in_order(program, rows, tables, whole=whole)


def _ordered(
    program: Program, rows: NDArray[np.intp], begin: FloatArray, end: FloatArray
) -> tuple[FloatArray, NDArray[np.int64], FloatArray]:
    """(change [components, events], worker, place) of the starts and ends of compute rows."""
    of = program.worker[rows].astype(np.int64)
    where = np.arange(rows.shape[0]) - np.searchsorted(of, of, side="left")
    delta = np.stack([begin, end], axis=2).reshape(begin.shape[0], -1)
    return delta, np.repeat(of, 2), np.stack([where, where + 1], axis=1).reshape(-1).astype(np.float64)


def _timed(
    program: Program, begin: FloatArray, end: FloatArray, start_s: FloatArray, end_s: FloatArray
) -> tuple[FloatArray, NDArray[np.int64], FloatArray]:
    """(change [components, events], worker, seconds); one event per instant: what ends is gone when others start."""
    busy = np.flatnonzero((begin != 0.0).any(axis=0) | (end != 0.0).any(axis=0))
    delta = np.concatenate([end[:, busy], begin[:, busy]], axis=1)
    worker = np.tile(program.worker[busy].astype(np.int64), 2)
    at = np.concatenate([end_s[busy], start_s[busy]])
    order = np.lexsort((at, worker))
    delta, worker, at = delta[:, order], worker[order], at[order]
    new = np.flatnonzero(np.concatenate([[True], (worker[1:] != worker[:-1]) | (at[1:] != at[:-1])])[: at.size])
    return np.add.reduceat(delta, new, axis=1) if new.size else delta, worker[new], at[new]


def in_flight(program: Program) -> tuple[int, ...]:
    """Most activations every worker holds at once: of stages in a stage-level Program, else of (layer, micro-batch).

    Counted from the start of a forward to the end of its backward (B or I), by
    attention where a worker has any, else by FFN.
    """
    rows, chunks, out = compute_order(program), chunks_of(program), []
    ends_of = np.searchsorted(program.worker[rows], np.arange(program.n_workers + 1))
    for low, high in itertools.pairwise(ends_of.tolist()):
        mine = rows[low:high]
        counted = next((k for k in (Kind.STAGE, Kind.ATTN, Kind.FFN) if (program.kind[mine] == int(k)).any()), None)
        mine = mine[program.kind[mine] == (-1 if counted is None else int(counted))]
        share = np.where(program.chunk[mine] < 0, 1.0, 1.0 / chunks[program.sorts.of[mine]])
        begins = np.where(program.phase[mine] == int(Phase.F), share, 0.0)
        ends = np.where(among(program.phase[mine], (Phase.B, Phase.I)), -share, 0.0)
        out.append(int(np.ceil(np.cumsum(np.stack([begins, ends], axis=1).reshape(-1)).max(initial=0.0) - 1e-9)))
    return tuple(out)


def compute_order(program: Program) -> NDArray[np.intp]:
    """Rows of compute operations, worker by worker in the order of their streams.

    With two compute streams the i-th forward action stands right after the
    backward that makes room for it, the earliest it can start.
    """
    worked = (Kind.EMBED, Kind.ATTN, Kind.FFN, Kind.HEAD, Kind.STAGE, Kind.OPTIM)
    compute = among(program.stream, COMPUTE_STREAMS)
    rows = np.flatnonzero(compute & among(program.kind, worked))
    if not (program.stream[rows] == int(Stream.COMPUTE_B)).any():
        return rows
    limit = np.array(program.in_flight or (len(program),) * program.n_workers, dtype=np.int64)[program.worker[rows]]
    action = _action_number(program, rows)
    ahead = np.where(action < limit, 2 * (action - limit), 2 * (action - limit) + 1)
    slot = np.where(program.phase[rows] == int(Phase.F), ahead, 2 * action)
    slot[program.kind[rows] == int(Kind.OPTIM)] = 2 * len(program)
    return rows[np.lexsort((slot, program.worker[rows]))]


def _action_number(program: Program, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Number, on its stream, of the action a row belongs to: all compute of one layer and micro-batch, one direction.

    A repeat (R) has the number of the action that follows, the output head of the one before.
    """
    columns = ("worker", "stream", "layer", "microbatch", "replica")
    named = np.stack([getattr(program, name)[rows] for name in columns], axis=1).astype(np.int64)
    named[program.kind[rows] == int(Kind.EMBED), 2] = 0
    apart = among(program.kind[rows], (Kind.HEAD, Kind.OPTIM))
    repeat = program.phase[rows] == int(Phase.R)
    counted = np.flatnonzero(~apart & ~repeat)
    changes = np.zeros(rows.shape[0], dtype=np.int64)
    changes[counted] = np.concatenate([[True], (named[counted][1:] != named[counted][:-1]).any(axis=1)])
    count = np.cumsum(changes)
    stream = named[:, 0] * len(Stream) + named[:, 1]
    first = np.searchsorted(stream, stream, side="left")
    before = count[first] - changes[first]
    number: NDArray[np.int64] = np.maximum(count - before - 1 + repeat, 0)
    return number
