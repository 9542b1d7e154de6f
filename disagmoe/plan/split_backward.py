"""Splits backwards in two: the gradient of the input first, the weights' when there is time.

What waits for a backward (the other pool, the stage before) needs the gradient of its
input only. Every whole backward (phase B) of attention and experts becomes an I in its
place and a W later on the same stream, where it fills time in which nothing else is
ready. At most `pending` weight gradients of a worker are put off, as each keeps the
inputs of its GEMMs and the gradients of their outputs in memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import COMPUTE_STREAMS, Kind, Phase
from disagmoe.plan.program import COLUMNS, IntArray, Program, among

_SPLIT = (int(Kind.ATTN), int(Kind.FFN))


def split_backward(program: Program, pending: int = 0) -> Program:
    """The Program with I and W instead of B; the W of a backward follows the `pending`-th I after its own.

    With 0 it follows its own I, and only what waits for the I gains. Whatever is left
    at the end of a stream runs there, in the order of its I's. Backwards that are
    split already stay as they are. Raises ValueError where they may not be put off.
    """
    if pending < 0:
        raise ValueError(f"pending={pending} weight gradients: must not be negative")
    if pending and program.in_flight:
        raise ValueError(f"pending={pending}: a layer in flight counts until its weight gradient; only 0 is allowed")
    whole = among(program.kind, _SPLIT) & (program.phase == int(Phase.B))
    whole &= among(program.stream, COMPUTE_STREAMS)
    rows = np.flatnonzero(whole)
    if not rows.size:
        return program
    table: IntArray = program.table()
    phase = COLUMNS.index("phase")
    weights = table[rows].copy()
    table[rows, phase], weights[:, phase] = int(Phase.I), int(Phase.W)
    place = np.concatenate([2 * np.arange(len(program)), 2 * _after(program, rows, pending) + 1])
    merged = np.concatenate([table, weights])[np.argsort(place, kind="stable")]
    return Program.from_table(
        merged,
        n_workers=program.n_workers,
        n_layers=program.n_layers,
        n_microbatches=program.n_microbatches,
        n_chunks=program.n_chunks,
        in_flight=program.in_flight,
        early_gather=program.early_gather,
    )


def _after(program: Program, rows: NDArray[np.intp], pending: int) -> NDArray[np.intp]:
    """For every backward, the row behind which its weight gradient goes: the `pending`-th backward further on.

    Beyond the last one that is the last row of the stream before the optimizer.
    """
    stream = program.worker.astype(np.int64) * (int(max(COMPUTE_STREAMS)) + 1) + program.stream
    of = stream[rows]
    later = np.arange(rows.shape[0]) + pending
    known = (later < rows.shape[0]) & (of[np.minimum(later, rows.shape[0] - 1)] == of)
    work = among(program.stream, COMPUTE_STREAMS) & (program.kind != int(Kind.OPTIM))
    last = np.full(int(stream.max()) + 1, -1, dtype=np.intp)
    np.maximum.at(last, stream[work], np.flatnonzero(work))
    place: NDArray[np.intp] = np.where(known, rows[np.minimum(later, rows.shape[0] - 1)], last[of])
    return place
