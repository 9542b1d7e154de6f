"""The simulator: when every operation of a Program starts and ends.

Decides what "ready" means. Streams run their operations in order; an operation
starts when it heads every stream it uses (a transfer uses one of the sender's
and one of the receiver's) and its data dependencies are met. Running operations
slow each other by the rates of `disagmoe/kernels.py`. Nothing here is random or
depends on the order of ties, so equal inputs give byte-equal Timelines.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagmoe.kernels import N_LINKS, run_events
from disagmoe.ops import COMPUTE_KINDS, Kind, Stream
from disagmoe.plan.dependencies import Graph, build_graph
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.text import row_token
from disagmoe.timeline.timeline import Timeline

_NAMED_HEADS = 6  # blocked operations a DeadlockError spells out


class DeadlockError(ValueError):
    """Nothing runs, yet operations are left; the message names those that block their streams."""


def simulate(program: Program, pricing: Pricing, graph: Graph | None = None) -> Timeline:
    """Run one step of a priced Program.

    `graph` is `build_graph(program)`, given by callers that have it already.
    Returns start, end and post of every row in seconds. Raises DeadlockError
    where the stream orders and dependencies block each other, ValueError where
    a price is not a finite number >= 0 or a factor is below 1.
    """
    graph = build_graph(program) if graph is None else graph
    _check_prices(program, pricing, graph)
    slot_first, row_slot = _slots(program)
    slot_worker = program.worker[slot_first]
    first = graph.first_row
    done, start, end, met, passed = run_events(
        np.append(slot_first, len(program)).astype(np.int32),
        slot_worker.astype(np.int32),
        np.searchsorted(slot_worker, np.arange(program.n_workers + 1)).astype(np.int32),
        graph.node.astype(np.int32, copy=False),
        row_slot,
        first.astype(np.int32, copy=False),
        graph.second_row.astype(np.int32, copy=False),
        graph.succ_ptr.astype(np.int32, copy=False),
        graph.succ.astype(np.int32, copy=False),
        graph.indegree.astype(np.int32, copy=False),
        pricing.duration_s[first].astype(np.float64, copy=False),
        pricing.link[first].astype(np.int32, copy=False),
        pricing.slows_compute[first].astype(np.float64, copy=False),
        pricing.slowed_by_compute[first].astype(np.float64, copy=False),
        _is_compute(program)[first],
    )
    if done < first.shape[0]:
        raise DeadlockError(_describe_block(program, graph, slot_first, passed, first.shape[0] - done))
    row_end = end[graph.node]
    return Timeline(program, start[graph.node], row_end, _posts(graph, slot_first, met, row_end))


def _slots(program: Program) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """First row of every (worker, stream) group and the group of every row."""
    key = program.worker.astype(np.int64) * len(Stream) + program.stream
    if np.any(np.diff(key) < 0):
        raise ValueError("the rows of a Program must be grouped by worker and stream; pack them with Program.from_rows")
    begins = np.diff(key, prepend=-1) != 0
    return np.flatnonzero(begins).astype(np.int32), (np.cumsum(begins) - 1).astype(np.int32)


def _is_compute(program: Program) -> NDArray[np.bool_]:
    """Which rows compute, [rows]."""
    lookup = np.array([kind in COMPUTE_KINDS for kind in Kind])
    return lookup[program.kind]


def _posts(
    graph: Graph, slot_first: NDArray[np.int32], met: NDArray[np.float64], row_end: NDArray[np.float64]
) -> NDArray[np.float64]:
    """When each row's own side was ready: head of its stream and, unless it only receives, its inputs there."""
    post = np.zeros_like(row_end)
    post[1:] = row_end[:-1]
    post[slot_first] = 0.0
    post[graph.first_row] = np.maximum(post[graph.first_row], met)
    return post


def _check_prices(program: Program, pricing: Pricing, graph: Graph) -> None:
    """Reject prices that have no meaning before they turn into a wrong timeline."""
    rules = (
        ("duration_s", pricing.duration_s, "a finite number of seconds >= 0", 0.0, np.inf),
        ("link", pricing.link, f"a link class from 0 to {N_LINKS - 1}", 0, N_LINKS),
        ("slows_compute", pricing.slows_compute, "a finite factor >= 1", 1.0, np.inf),
        ("slowed_by_compute", pricing.slowed_by_compute, "a finite factor >= 1", 1.0, np.inf),
    )
    second = np.flatnonzero(graph.second_row >= 0)
    for name, values, allowed, low, below in rules:
        if values.shape != (len(program),):
            raise ValueError(f"{name} has shape {values.shape}, but the Program has {len(program)} rows")
        bad = ~((values >= low) & (values < below))  # so written, NaN is bad
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(f"{name} of {_describe_row(program, row)} is {values[row]}; it must be {allowed}")
        unequal = values[graph.first_row[second]] != values[graph.second_row[second]]
        if unequal.any():
            node = second[int(np.argmax(unequal))]
            sent, received = int(graph.first_row[node]), int(graph.second_row[node])
            raise ValueError(
                f"{name} of {_describe_row(program, sent)} is {values[sent]} where it is sent and {values[received]} "
                "where it is received; both rows of a transfer must carry the same value"
            )


def _describe_row(program: Program, row: int) -> str:
    """One row for messages: the operation, its workers and its stream."""
    return f"{row_token(program, row)} ({Stream(program.stream[row]).name})"


def _describe_block(
    program: Program, graph: Graph, slot_first: NDArray[np.int32], passed: NDArray[np.int64], left: int
) -> str:
    """One line naming the heads of the streams that cannot move and what each waits for."""
    ends = np.append(slot_first[1:], len(program))
    heads = (slot_first + passed)[slot_first + passed < ends]
    at_head = np.zeros(len(program), dtype=np.bool_)
    at_head[heads] = True
    blocked = []
    for row in heads:
        node = graph.node[row]
        other = graph.second_row[node] if graph.first_row[node] == row else graph.first_row[node]
        reason = "its peer" if other >= 0 and not at_head[other] else "its inputs"
        blocked.append(f"{_describe_row(program, int(row))} waits for {reason}")
    more = f"; and {len(blocked) - _NAMED_HEADS} more streams" if len(blocked) > _NAMED_HEADS else ""
    named = "; ".join(blocked[:_NAMED_HEADS])
    return f"deadlock, {left} of {graph.n_nodes} operations left: {named}{more}"
