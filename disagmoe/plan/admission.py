"""Decides when a worker may start another forward: the bound on what is in flight.

One compute stream bounds the activations a worker holds by its order. With
forwards and backwards on streams of their own nothing would: forwards would run
ahead until the sends are full. `Program.in_flight` gives each worker a limit, and
this module turns it into dependencies: the i-th forward action of a worker waits
for its backward action number i - limit, whose activations are then free.

An *action* is all compute of one (layer, micro-batch) on one worker in one
direction; the embedding belongs to layer 0, the output head keeps nothing that
counts. Receives are not held back: the input of the next forwards may arrive
while they wait.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import Kind, Phase
from disagmoe.plan.program import Program, among

LongArray = NDArray[np.int64]

_KINDS = (Kind.EMBED, Kind.ATTN, Kind.FFN, Kind.STAGE)
_BACKWARD = (Phase.B, Phase.I, Phase.W)


def admission_rows(program: Program) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows (before, after) of every wait the bound causes; empty where there is none.

    `before` is the last row of a backward action, `after` the first row of the
    forward action that takes its place.
    """
    if not program.in_flight:
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp)
    forward = np.flatnonzero(among(program.kind, _KINDS) & (program.phase == int(Phase.F)))
    backward = np.flatnonzero(among(program.kind, _KINDS) & among(program.phase, _BACKWARD))
    starts, start_worker, start_rank = _actions(program, forward)
    ends, end_worker, end_rank = _actions(program, backward[::-1])
    limit = np.asarray(program.in_flight, dtype=np.int64)
    frees = start_rank - limit[start_worker]
    span = max(int(start_rank.max(initial=0)), int(end_rank.max(initial=0))) + 1
    key = end_worker * span + end_rank
    order = np.argsort(key)
    wanted = start_worker * span + frees
    at = np.minimum(np.searchsorted(key[order], wanted), max(order.shape[0] - 1, 0))
    waits = (frees >= 0) & (key[order][at] == wanted) if order.size else np.zeros(starts.shape[0], dtype=np.bool_)
    return ends[order][at[waits]], starts[waits]


def _actions(program: Program, rows: NDArray[np.intp]) -> tuple[NDArray[np.intp], LongArray, LongArray]:
    """The first of these rows of every action, its worker, and its number on that worker in running order."""
    worker = program.worker[rows].astype(np.int64)
    layer = np.maximum(program.layer[rows].astype(np.int64), 0)
    replica, microbatch = program.replica[rows].astype(np.int64), program.microbatch[rows].astype(np.int64)
    key = ((worker * program.n_layers + layer) * program.n_microbatches + microbatch) * (
        int(replica.max(initial=0)) + 1
    ) + replica
    _, first = np.unique(key, return_index=True)
    found = np.sort(rows[first])  # rows are grouped by worker and stream, in running order
    at = program.worker[found].astype(np.int64)
    return found, at, np.arange(found.shape[0]) - np.searchsorted(at, at, side="left")
