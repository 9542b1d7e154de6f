"""All compiled loops of the suite.

Decides how time passes: `run_events` advances a Program from event to event, with
every running operation progressing at the rate that `compute_rate` and
`transfer_rate` give for what runs beside it: the rule of `disagmoe/cost/sharing.py`, compiled.

Everything here is numba-compiled without fastmath and takes plain arrays; the
calibration arrives as arguments, so one compilation serves every cluster.
Completion times are kept as absolute numbers and moved only when a rate really
changes: without contention they are plain sums of durations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Function = TypeVar("Function", bound=Callable[..., object])

# Columns of the table of running operations, one row per stream ("slot").
NODE, SIDE, HOME, FAR, LINK, SLOT_COLUMNS = 0, 1, 2, 3, 4, 5
# SIDE: what the operation on this slot uses. A transfer is COMING in on one slot and GOING out on another.
COMPUTING, GOING, COMING = 0, 1, 2
# Columns of the load table, one row per worker: running compute, transfers per direction and link class.
COMPUTES, OUT, IN, LOAD_COLUMNS = 0, 1, 3, 5
N_LINKS = 2


def _jit(function: Function) -> Function:
    """numba.njit with the settings of this module, keeping the function's type."""
    return cast(Function, njit(cache=True, nogil=True, error_model="numpy", forceinline=True)(function))


@_jit
def compute_rate(computes: int, slows: float) -> float:
    """Progress per second of one compute operation on a worker.

    `computes` operations compute on the worker at once (they share the GPU);
    `slows` is the largest slow-down factor (>= 1) of the transfers beside them.
    """
    return 1.0 / computes / slows


@_jit
def transfer_rate(slowed: float, beside_compute: bool, share: int) -> float:
    """Progress per second of one transfer.

    `slowed` >= 1 applies where compute runs on one of its ends; `share` is the
    largest number of transfers that use the same link in the same direction at
    one of its ends, itself included.
    """
    return 1.0 / (slowed if beside_compute else 1.0) / share


@_jit
def _set_finish(tree: Floats, slot: int, finish: float) -> None:
    """Set a leaf of the tournament tree whose root, tree[1], is the next completion."""
    i = tree.shape[0] // 2 + slot
    tree[i] = finish
    while i > 1:
        i //= 2
        low = min(tree[2 * i], tree[2 * i + 1])
        if tree[i] == low:
            break
        tree[i] = low


@_jit
def _touch(worker: int, dirty: Longs) -> None:
    """Add a worker to the list dirty[1:], whose length is dirty[0], unless it is there (flag behind the list)."""
    flag = dirty.shape[0] // 2 + worker
    if dirty[flag] == 0:
        dirty[flag] = 1
        dirty[0] += 1
        dirty[dirty[0]] = worker


@_jit
def _occupy(
    node: int, first: int, second: int, link: int, computes: bool, running: Longs, slot_worker: Ints, dirty: Longs
) -> None:
    """Put a starting operation on its slots (`second` is -1 unless it is a transfer)."""
    both = GOING | COMING  # a collective uses its worker's link in both directions
    near = slot_worker[first]
    far = slot_worker[second] if second >= 0 else near
    running[first, NODE], running[first, HOME], running[first, FAR], running[first, LINK] = node, first, far, link
    running[first, SIDE] = COMPUTING if computes else (GOING if second >= 0 else both)
    _touch(near, dirty)
    if second >= 0:
        running[second, NODE], running[second, HOME], running[second, FAR] = node, first, near
        running[second, LINK], running[second, SIDE] = link, COMING
        _touch(far, dirty)


@_jit
def _measure_load(worker: int, worker_ptr: Ints, running: Longs, slows: Floats, load: Longs, slow: Floats) -> None:
    """Count what runs on one worker: computes, transfers per direction and link, the largest slow-down."""
    for column in range(LOAD_COLUMNS):
        load[worker, column] = 0
    slow[worker] = 1.0
    for slot in range(worker_ptr[worker], worker_ptr[worker + 1]):
        node = running[slot, NODE]
        if node < 0:
            continue
        side = running[slot, SIDE]
        if side == COMPUTING:
            load[worker, COMPUTES] += 1
            continue
        slow[worker] = max(slow[worker], slows[node])
        if side & GOING:
            load[worker, OUT + running[slot, LINK]] += 1
        if side & COMING:
            load[worker, IN + running[slot, LINK]] += 1


@_jit
def _rate(slot: int, near: int, running: Longs, slowed: Floats, load: Longs, slow: Floats) -> float:
    """The rate of the operation on a slot of worker `near`, from the loads of its ends."""
    side = running[slot, SIDE]
    if side == COMPUTING:
        return compute_rate(load[near, COMPUTES], slow[near])
    far, link = running[slot, FAR], running[slot, LINK]
    sender, receiver = (near, far) if side & GOING else (far, near)
    share = max(load[sender, OUT + link], load[receiver, IN + link])
    beside_compute = load[near, COMPUTES] + load[far, COMPUTES] > 0
    return transfer_rate(slowed[running[slot, NODE]], beside_compute, share)


@_jit
def _settle_rates(
    t: float,
    worker_ptr: Ints,
    duration: Floats,
    slows: Floats,
    slowed: Floats,
    running: Longs,
    rate: Floats,
    load: Longs,
    slow: Floats,
    dirty: Longs,
    tree: Floats,
) -> None:
    """Bring the rates on all workers whose load changed up to date, and move the completions that follow."""
    width = tree.shape[0] // 2
    for k in range(1, dirty[0] + 1):
        _measure_load(dirty[k], worker_ptr, running, slows, load, slow)
    for k in range(1, dirty[0] + 1):
        worker = dirty[k]
        dirty[dirty.shape[0] // 2 + worker] = 0
        for slot in range(worker_ptr[worker], worker_ptr[worker + 1]):
            node, home = running[slot, NODE], running[slot, HOME]
            if node < 0:
                continue
            new, old = _rate(slot, worker, running, slowed, load, slow), rate[home]
            if new != old:
                left = duration[node] if old == 0.0 else (tree[width + home] - t) * old
                rate[home] = new
                _set_finish(tree, home, t + left / new)
    dirty[0] = 0


@_jit
def _take_finished(t: float, tree: Floats, running: Longs, todo: Longs) -> int:
    """Move every operation that completes at t to `todo`, lowest slot first; returns how many."""
    width, n_todo = tree.shape[0] // 2, 0
    while tree[1] == t:
        i = 1
        while i < width:
            i = 2 * i if tree[2 * i] == t else 2 * i + 1
        todo[n_todo] = running[i - width, NODE]
        n_todo += 1
        _set_finish(tree, i - width, np.inf)
    return n_todo


@_jit
def _release(node: int, waiting: Longs, todo: Longs, n_todo: int) -> int:
    """Take away one thing a node waits for; it goes to `todo` when that was the last. Returns the new length."""
    waiting[node] -= 1
    if waiting[node] == 0:
        todo[n_todo] = node
        return n_todo + 1
    return n_todo


@_jit
def run_events(
    slot_ptr: Ints,
    slot_worker: Ints,
    worker_ptr: Ints,
    row_node: Ints,
    row_slot: Ints,
    first_row: Ints,
    second_row: Ints,
    succ_ptr: Ints,
    succ: Ints,
    indegree: Ints,
    duration: Floats,
    link: Ints,
    slows: Floats,
    slowed: Floats,
    computing: Bools,
) -> tuple[int, Floats, Floats, Floats, Longs]:
    """Run every operation of a Program and return when each started and ended.

    A *slot* is one stream of one worker; its rows are slot_ptr[s]:slot_ptr[s+1]
    in execution order, the slots of worker w are worker_ptr[w]:worker_ptr[w+1].
    A *node* is one operation: one row, or the two rows of a transfer (first_row
    sends, second_row receives or is -1). Arrays from `duration` on have shape
    [nodes]; durations are finite and >= 0, factors >= 1, links 0 or 1.

    A node starts once all its rows are at the head of their slots and its data
    dependencies (succ, indegree) are met. Returns the number of finished nodes
    (fewer than [nodes]: deadlock), start and end and the time of the last met
    data dependency per node (s; start is -1 where a node never started) and the
    number of finished rows per slot.
    """
    n_nodes, n_slots, n_workers = first_row.shape[0], slot_worker.shape[0], worker_ptr.shape[0] - 1
    start, end, met = np.full(n_nodes, -1.0), np.full(n_nodes, -1.0), np.zeros(n_nodes)
    passed = np.zeros(n_slots, np.int64)
    running = np.full((n_slots, SLOT_COLUMNS), -1, np.int64)
    rate = np.zeros(n_slots)  # of the operation whose first row is on this slot; 0 = just started
    load, slow = np.zeros((n_workers, LOAD_COLUMNS), np.int64), np.ones(n_workers)
    dirty = np.zeros(2 * (n_workers + 1), np.int64)
    width = 2
    while width < n_slots:
        width *= 2
    tree = np.full(2 * width, np.inf)

    waiting = np.empty(n_nodes, np.int64)  # unmet dependencies plus rows not yet at the head
    for node in range(n_nodes):
        waiting[node] = indegree[node] + (2 if second_row[node] >= 0 else 1)
    todo = np.empty(n_slots + 1, np.int64)  # nodes to start or, if started, to end at time t
    n_todo, done, t = 0, 0, 0.0
    for slot in range(n_slots):
        n_todo = _release(row_node[slot_ptr[slot]], waiting, todo, n_todo)
    while True:
        while n_todo > 0:
            n_todo -= 1
            node = todo[n_todo]
            first, second = first_row[node], second_row[node]
            if start[node] < 0.0:
                start[node] = t
                if duration[node] > 0.0:  # else it ends at once, without ever running beside anything
                    rate[row_slot[first]] = 0.0
                    other = row_slot[second] if second >= 0 else -1
                    _occupy(node, row_slot[first], other, link[node], computing[node], running, slot_worker, dirty)
                    continue
            end[node] = t
            done += 1
            row = first
            while row >= 0:
                slot = row_slot[row]
                passed[slot] += 1
                if running[slot, NODE] == node:
                    running[slot, NODE] = -1
                    _touch(slot_worker[slot], dirty)
                if row + 1 < slot_ptr[slot + 1]:
                    n_todo = _release(row_node[row + 1], waiting, todo, n_todo)
                row = second if row == first else -1
            for edge in range(succ_ptr[node], succ_ptr[node + 1]):
                met[succ[edge]] = t
                n_todo = _release(succ[edge], waiting, todo, n_todo)
        # Rates change once per instant, after all that ends and starts at t has done so.
        _settle_rates(t, worker_ptr, duration, slows, slowed, running, rate, load, slow, dirty, tree)
        t = tree[1]
        if t == np.inf:
            return done, start, end, met, passed
        n_todo = _take_finished(t, tree, running, todo)


@_jit
def topological_sweep(succ_ptr: Ints, succ: Ints, indegree: Ints) -> Bools:
    """Which nodes of a directed graph neither lie on a cycle nor come after one.

    Successors of node i are succ[succ_ptr[i]:succ_ptr[i + 1]]. Removes nodes
    without predecessors until none is left; returns the removed ones, [nodes].
    All true means the graph has no cycle; every other node waits on another
    such node.
    """
    n_nodes = indegree.shape[0]
    waiting, done = indegree.copy(), np.zeros(n_nodes, np.bool_)
    todo = np.empty(n_nodes, np.int64)
    n_todo = 0
    for node in range(n_nodes):
        if waiting[node] == 0:
            todo[n_todo] = node
            n_todo += 1
    while n_todo > 0:
        n_todo -= 1
        node = todo[n_todo]
        done[node] = True
        for edge in range(succ_ptr[node], succ_ptr[node + 1]):
            waiting[succ[edge]] -= 1
            if waiting[succ[edge]] == 0:
                todo[n_todo] = succ[edge]
                n_todo += 1
    return done


@_jit
def _most_urgent(
    pending: Longs, n_pending: Longs, sending: Bools, receiving: Bools, home: Longs, turn: Longs
) -> tuple[int, int]:
    """The pending transfer between two idle streams whose receiver needs it first: (sender, position), or -1, -1.

    Arguments as in `record_transfers`; `sending` and `receiving` [workers] say which streams are taken.
    """
    n_microbatches = turn.shape[1]
    best, at_worker, at_position = np.iinfo(np.int64).max, -1, -1
    for worker in range(n_pending.shape[0]):
        if sending[worker]:
            continue
        for k in range(n_pending[worker]):
            following, b = pending[worker, k] // n_microbatches + 1, pending[worker, k] % n_microbatches
            if not receiving[home[following]] and turn[following, b] < best:
                best, at_worker, at_position = turn[following, b], worker, k
    return at_worker, at_position


@_jit
def record_transfers(
    first: Longs, step: Longs, microbatch: Longs, home: Longs, sends: Bools, n_microbatches: int
) -> tuple[Longs, int]:
    """Run a ring in lock-step, every action and every transfer one time slot, and record who sends when.

    A micro-batch passes steps 0, 1, ... of the chain; step s runs on worker
    home[s]. Worker w runs the actions first[w]:first[w + 1] in that order, of
    which action i is step step[i] of micro-batch microbatch[i]. The product of
    step s is sent to its next step where sends[s], and is there at once where not;
    in one slot a worker runs at most one action, sends at most one product and
    receives at most one. Among the transfers that could start, the one whose
    receiver has it earliest in its order goes first.

    Returns the slot in which the product of each (step, micro-batch) was sent
    ([steps, n_microbatches], -1 where it was not) and the number of actions that
    never ran (0 unless the orders wait for each other).
    """
    n_workers, n_steps = first.shape[0] - 1, home.shape[0]
    turn = np.zeros((n_steps, n_microbatches), np.int64)  # position in the order of its worker
    most = 0
    for worker in range(n_workers):
        most = max(most, first[worker + 1] - first[worker])
        for i in range(first[worker], first[worker + 1]):
            turn[step[i], microbatch[i]] = i - first[worker]
    ready = np.full((n_steps, n_microbatches), -1, np.int64)  # slot from which the input is there, -1: not yet
    ready[0, :] = 0
    sent = np.full((n_steps, n_microbatches), -1, np.int64)
    pending, n_pending = np.empty((n_workers, most), np.int64), np.zeros(n_workers, np.int64)
    at, left, slot, moved = first[:-1].copy(), first[n_workers], 0, True
    while left > 0 and moved:
        moved = False
        sending, receiving = np.zeros(n_workers, np.bool_), np.zeros(n_workers, np.bool_)
        worker, k = _most_urgent(pending, n_pending, sending, receiving, home, turn)
        while worker >= 0:
            s, b = pending[worker, k] // n_microbatches, pending[worker, k] % n_microbatches
            n_pending[worker] -= 1
            pending[worker, k : n_pending[worker]] = pending[worker, k + 1 : n_pending[worker] + 1].copy()
            sending[worker] = receiving[home[s + 1]] = moved = True
            sent[s, b], ready[s + 1, b] = slot, slot + 1
            worker, k = _most_urgent(pending, n_pending, sending, receiving, home, turn)
        for worker in range(n_workers):
            i = at[worker]
            if i == first[worker + 1] or not 0 <= ready[step[i], microbatch[i]] <= slot:
                continue
            s, b = step[i], microbatch[i]
            at[worker], left, moved = i + 1, left - 1, True
            if sends[s]:
                pending[worker, n_pending[worker]] = s * n_microbatches + b
                n_pending[worker] += 1
            elif s + 1 < n_steps:
                ready[s + 1, b] = slot + 1
        slot += 1
    return sent, left
