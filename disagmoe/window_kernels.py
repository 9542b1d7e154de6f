"""The compiled loop that re-records a Program's order: what runs next where several operations could.

Decides how a list schedule advances. Every stream keeps its rows in their given
order; when it is idle it looks at the first few and takes the first that can start
by its data, its peer and the counters of its worker. Unlike `kernels.run_events`
nothing slows anything down here: durations are fixed, and what matters is the order
in which operations start, which becomes the new order of every stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Function = TypeVar("Function", bound=Callable[..., object])

HELD, REPEATED, PENDING, COUNTERS = 0, 1, 2, 3
"""Counters of a worker: layers in flight, layers repeated for their backward, weight gradients put off."""


def _jit(function: Function) -> Function:
    """numba.njit with the settings of `kernels.py`, keeping the function's type."""
    return cast(Function, njit(cache=True, nogil=True, error_model="numpy", forceinline=True)(function))


@_jit
def _within(row: int, head: Longs, following: Longs, slot: int, window: int) -> bool:
    """Whether a row is among the first `window` rows left on its slot."""
    at, seen = head[slot], 0
    while at >= 0 and seen < window:
        if at == row:
            return True
        at, seen = following[at], seen + 1
    return False


@_jit
def _allowed(node: int, worker: int, takes: Longs, counts: Longs, limits: Longs) -> bool:
    """Whether the counters of a worker leave room for a node."""
    for c in range(COUNTERS):
        if takes[node, c] > 0 and counts[worker, c] + takes[node, c] > limits[worker, c]:
            return False
    return True


@_jit
def _pick(
    slot: int,
    worker: int,
    row_node: Longs,
    row_slot: Longs,
    first_row: Longs,
    second_row: Longs,
    waiting: Longs,
    takes: Longs,
    gives: Longs,
    window: Longs,
    limits: Longs,
    counts: Longs,
    head: Longs,
    following: Longs,
    running: Longs,
) -> int:
    """The row that an idle slot starts now, -1 for none: the first ready one that is no filler, else a filler.

    A filler (it lowers PENDING) does not count as looked at, and goes first once as
    many are pending as may be. What would be next in the given order may exceed the
    limits: else what overtook it could keep it from ever starting.
    """
    filler, row, seen = -1, head[slot], 0
    full = counts[worker, PENDING] >= limits[worker, PENDING]
    while row >= 0 and seen < window[slot]:
        node = row_node[row]
        fills = gives[node, PENDING] > 0
        seen += 0 if fills else 1
        turn = seen <= 1 or _allowed(node, worker, takes, counts, limits)
        if turn and first_row[node] == row and waiting[node] == 0:
            second = second_row[node]
            free = second < 0
            if second >= 0:
                peer = row_slot[second]
                free = running[peer] < 0 and _within(second, head, following, peer, window[peer])
            if free and fills:
                filler = row if filler < 0 else filler
                if full:
                    return int(filler)
            elif free:
                return int(row)
        row = following[row]
    return int(filler)


@_jit
def _take(row: int, slot: int, head: Longs, following: Longs, previous: Longs) -> None:
    """Remove a row from what is left on its slot."""
    before, after = previous[row], following[row]
    if before >= 0:
        following[before] = after
    else:
        head[slot] = after
    if after >= 0:
        previous[after] = before


@_jit
def _senders(row_slot: Longs, first_row: Longs, second_row: Longs, n_slots: int) -> tuple[Longs, Longs]:
    """(ptr, slots): the slots with transfers that come in on slot s are slots[ptr[s]:ptr[s + 1]]."""
    found = np.zeros((n_slots, n_slots), np.bool_)
    for node in range(first_row.shape[0]):
        if second_row[node] >= 0:
            found[row_slot[second_row[node]], row_slot[first_row[node]]] = True
    ptr, slots, n = np.zeros(n_slots + 1, np.int64), np.empty(n_slots * n_slots, np.int64), 0
    for into in range(n_slots):
        for out in range(n_slots):
            if found[into, out]:
                slots[n] = out
                n += 1
        ptr[into + 1] = n
    return ptr, slots


@_jit
def _mark(changed: Bools, slots: Longs, first: int, last: int) -> None:
    """Have slots[first:last] asked again."""
    for k in range(first, last):
        changed[slots[k]] = True


@_jit
def record_window(
    slot_ptr: Longs,
    slot_worker: Longs,
    row_node: Longs,
    row_slot: Longs,
    first_row: Longs,
    second_row: Longs,
    succ_ptr: Longs,
    succ: Longs,
    indegree: Longs,
    duration: Floats,
    takes: Longs,
    gives: Longs,
    window: Longs,
    limits: Longs,
) -> tuple[Longs, int]:
    """List-schedule a Program; returns the number in the sequence of starts of every row, and how many nodes ran.

    Slots, rows and nodes as in `kernels.run_events`. A node adds takes[node] to its
    worker's counters when it starts and takes gives[node] off them when it ends
    (both [nodes, COUNTERS], at the worker of its first row), and overtakes others only
    where what it takes stays within limits [workers, COUNTERS]. A slot looks at its
    first window[slot] rows. Fewer nodes than there are ran where the given order itself
    is one that waits for itself.
    """
    n_slots, n_rows = slot_worker.shape[0], row_node.shape[0]
    waiting, sequence = indegree.copy(), np.full(n_rows, -1, np.int64)
    following, previous = np.arange(1, n_rows + 1), np.arange(-1, n_rows - 1)
    head, running, until = slot_ptr[:-1].copy(), np.full(n_slots, -1, np.int64), np.full(n_slots, np.inf)
    for slot in range(n_slots):
        previous[slot_ptr[slot]], following[slot_ptr[slot + 1] - 1] = -1, -1
    ptr, senders = _senders(row_slot, first_row, second_row, n_slots)
    slots = np.arange(n_slots)
    begins = np.searchsorted(slot_worker, np.arange(limits.shape[0] + 1))  # slots of worker w: begins[w]:begins[w + 1]
    changed = np.ones(n_slots, np.bool_)  # slots whose next start may be another than when they were last asked
    counts, started, ended, t = np.zeros(limits.shape, np.int64), 0, 0, 0.0
    while True:
        moved = True
        while moved:
            moved = False
            for slot in range(n_slots):
                if not changed[slot]:
                    continue
                changed[slot] = False
                if running[slot] >= 0 or head[slot] < 0:
                    continue
                worker = slot_worker[slot]
                row = _pick(
                    slot, worker, row_node, row_slot, first_row, second_row, waiting, takes, gives, window, limits,
                    counts, head, following, running,
                )  # fmt: skip
                if row < 0:
                    continue
                node, moved = row_node[row], True
                for c in range(COUNTERS):
                    counts[worker, c] += takes[node, c]
                while row >= 0:
                    at = row_slot[row]
                    _take(row, at, head, following, previous)
                    running[at], until[at], sequence[row] = node, t + duration[node], started
                    _mark(changed, senders, ptr[at], ptr[at + 1])  # the window of a stream that receives has moved on
                    row = second_row[node] if row == first_row[node] else -1
                _mark(changed, slots, begins[worker], begins[worker + 1])
                started += 1
        t = np.inf
        for slot in range(n_slots):
            t = min(t, until[slot])
        if t == np.inf:
            return sequence, ended
        for slot in range(n_slots):
            if until[slot] > t:
                continue
            node, running[slot], until[slot] = running[slot], -1, np.inf
            changed[slot] = True
            _mark(changed, senders, ptr[slot], ptr[slot + 1])
            if row_slot[first_row[node]] == slot:
                ended += 1
                worker = slot_worker[slot]
                for c in range(COUNTERS):
                    counts[worker, c] -= gives[node, c]
                _mark(changed, slots, begins[worker], begins[worker + 1])
                for edge in range(succ_ptr[node], succ_ptr[node + 1]):
                    waiting[succ[edge]] -= 1
                    if waiting[succ[edge]] == 0:
                        changed[row_slot[first_row[succ[edge]]]] = True
