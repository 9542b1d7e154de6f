"""Decides whether a Program is a complete, consistent and runnable training step.

`verify` proves, without running anything, what both executors and the simulator
rely on. Each check is vectorised; only a failing one looks for names. Checks that
follow from the operations alone (columns, streams, pairs, transfers) are here,
those that compare with the declared layers, micro-batches and chunks are in
`completeness.py`, the absence of deadlocks in `deadlock.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import COMM_KINDS, COMPUTE_KINDS, COMPUTE_STREAMS, RECV_STREAMS, SEND_STREAMS, Kind, Phase, Stream
from disagmoe.plan.completeness import check_complete, check_homes, check_recompute, check_step_end
from disagmoe.plan.deadlock import find_deadlock
from disagmoe.plan.dependencies import Graph, PlanError, build_graph, data_edges, is_wait, stream_mask
from disagmoe.plan.edges import BoolArray, pack_key
from disagmoe.plan.plan import Plan
from disagmoe.plan.program import IntArray, Program, among
from disagmoe.plan.text import row_token

__all__ = ["Memory", "PlanError", "verify"]

Memory = Sequence[float] | Callable[[Program], Sequence[float]]
"""GiB every worker needs at its peak, or how to find that from a Program."""

_TRANSFER_STREAMS = SEND_STREAMS | RECV_STREAMS
_COLLECTIVES = frozenset({Stream.COLL, Stream.NVLINK})
_STREAMS_OF: dict[Kind, frozenset[Stream]] = {
    **dict.fromkeys(COMPUTE_KINDS, frozenset(COMPUTE_STREAMS)),
    # On a compute stream: where the worker waits for it.
    Kind.DISPATCH: frozenset(_TRANSFER_STREAMS | _COLLECTIVES | COMPUTE_STREAMS),
    Kind.COMBINE: frozenset(_TRANSFER_STREAMS | _COLLECTIVES | COMPUTE_STREAMS),
    Kind.P2P: frozenset(_TRANSFER_STREAMS | COMPUTE_STREAMS),
    Kind.GRAD_SYNC: _COLLECTIVES | {Stream.SYNC},
}
_PHASES_OF: dict[Kind, tuple[Phase, ...]] = {
    **dict.fromkeys(COMPUTE_KINDS, tuple(Phase)),
    **dict.fromkeys(COMM_KINDS, (Phase.F, Phase.B, Phase.R)),
    Kind.GRAD_SYNC: (Phase.F, Phase.B),
}
_ARRIVES_ON = {Stream.SEND: Stream.RECV, Stream.SEND_B: Stream.RECV_B}


def verify(
    plan: Plan | Program,
    *,
    graph: Graph | None = None,
    recompute: Collection[Kind] | None = None,
    memory_gib: Memory | None = None,
    limit_gib: float | None = None,
) -> None:
    """Return if the Program is sound; otherwise raise PlanError naming the operations at fault.

    `graph` saves building it again. `recompute`, where given, is the policy: these
    kinds are recomputed once per operation and no other is. `memory_gib` (per
    worker) is compared with `limit_gib` where both are given.
    """
    program = plan.program if isinstance(plan, Plan) else plan
    _check_columns(program)
    _check_streams(program)
    _check_once(program)
    graph = build_graph(program) if graph is None else graph
    _check_transfers(program, graph)
    check_complete(program)
    check_recompute(program, recompute)
    check_homes(program)
    _check_pairs(program)
    _check_places(program, graph)
    check_step_end(program)
    if cycle := find_deadlock(program, graph):
        raise PlanError(f"deadlock: {cycle}")
    _check_memory(program, memory_gib, limit_gib)


def _first(mask: BoolArray) -> int | None:
    """Index of the first True, None if there is none."""
    at = int(mask.argmax()) if mask.size else 0
    return at if mask.size and bool(mask[at]) else None


def _check_columns(program: Program) -> None:
    """Every column within the declared range; rows grouped by stream."""
    if not len(program):
        raise PlanError("the Program has no operations")
    for name, low, high in (
        ("worker", 0, program.n_workers),
        ("stream", 0, len(Stream)),
        ("kind", 0, len(Kind)),
        ("phase", 0, len(Phase)),
        ("layer", -1, program.n_layers),
        ("microbatch", -1, program.n_microbatches),
        ("chunk", -1, program.n_chunks),
        ("replica", 0, None),
        ("peer", -1, program.n_workers),
        ("pair", -1, None),
    ):
        column = getattr(program, name)
        out = (column < low) if high is None else (column < low) | (column >= high)
        if (i := _first(out)) is not None:
            allowed = f"at least {low}" if high is None else f"{low}..{high - 1}"
            raise PlanError(f"row {i}: {name} {int(column[i])} is not allowed, {allowed} is")
    stream = program.worker.astype(np.int64) * len(Stream) + program.stream
    if (i := _first(stream[1:] < stream[:-1])) is not None:
        raise PlanError(
            f"row {i + 1}: {row_token(program, i + 1)} is not grouped by worker and stream with its own stream"
        )
    if program.in_flight and (len(program.in_flight) != program.n_workers or min(program.in_flight) < 1):
        raise PlanError(f"in_flight {program.in_flight}: needs one bound of at least 1 for each worker, or none at all")
    _check_fields(program)


def _check_fields(program: Program) -> None:
    """Phase, layer and micro-batch that suit the kind."""
    phases = np.zeros((len(Kind), len(Phase)), dtype=np.bool_)
    for kind, allowed in _PHASES_OF.items():
        phases[kind, list(allowed)] = True
    if (i := _first(~phases[program.kind, program.phase])) is not None:
        kind = Kind(program.kind[i])
        names = ", ".join(p.name for p in _PHASES_OF[kind])
        raise PlanError(
            f"{row_token(program, i)}: {kind.name} has no phase {Phase(program.phase[i]).name}, only {names}"
        )
    of_step = among(program.kind, (Kind.GRAD_SYNC, Kind.OPTIM))
    at_ends = among(program.kind, (Kind.EMBED, Kind.HEAD))
    loose = at_ends | of_step | (program.kind == int(Kind.P2P))  # P2P -1 leaves the embedding
    if (i := _first(of_step != (program.microbatch == -1))) is not None:
        rule = "has no micro-batch (-1)" if of_step[i] else "needs a micro-batch"
        raise PlanError(f"{row_token(program, i)}: {Kind(program.kind[i]).name} {rule}")
    if (i := _first((at_ends & (program.layer != -1)) | (~loose & (program.layer == -1)))) is not None:
        rule = "has layer -1" if at_ends[i] else "needs a layer"
        raise PlanError(f"{row_token(program, i)}: {Kind(program.kind[i]).name} {rule}")


def _check_streams(program: Program) -> None:
    """Compute on compute streams, communication on its own; peers exactly where there is a transfer."""
    allowed = np.zeros((len(Kind), len(Stream)), dtype=np.bool_)
    for kind, streams in _STREAMS_OF.items():
        allowed[kind, sorted(streams)] = True
    if (i := _first(~allowed[program.kind, program.stream])) is not None:
        kind, stream = Kind(program.kind[i]), Stream(program.stream[i])
        names = ", ".join(s.name for s in sorted(_STREAMS_OF[kind]))
        raise PlanError(f"wrong stream: {row_token(program, i)} ({kind.name}) is on {stream.name}, allowed: {names}")
    transfer = stream_mask(program, frozenset(_TRANSFER_STREAMS))
    if (i := _first(transfer & ((program.peer < 0) | (program.peer == program.worker)))) is not None:
        raise PlanError(f"peer: {row_token(program, i)} needs another worker as its peer, not {int(program.peer[i])}")
    if (i := _first(~transfer & (program.peer != -1))) is not None:
        raise PlanError(f"peer: {row_token(program, i)} names peer {int(program.peer[i])} but is no transfer")


def _check_once(program: Program) -> None:
    """No operation twice. Work of a micro-batch exists once anywhere, step work and waiting once per worker."""
    is_recv, waits = stream_mask(program, frozenset(RECV_STREAMS)), is_wait(program)
    place = np.where((program.microbatch == -1) | waits, program.worker, -1)
    columns = (program.kind, program.phase, program.layer, program.microbatch, program.chunk, program.replica)
    key = pack_key(*columns, place, is_recv.astype(np.int32) + 2 * waits)
    ordered = np.sort(key)
    if (i := _first(ordered[1:] == ordered[:-1])) is None:
        return
    first, second = (int(r) for r in np.flatnonzero(key == ordered[i])[:2])
    raise PlanError(f"duplicated operation: {row_token(program, first)} and {row_token(program, second)}")


def _check_transfers(program: Program, graph: Graph) -> None:
    """Both ends in one direction, and received in the order in which they were sent."""
    moved = np.flatnonzero(graph.second_row >= 0)
    send, recv = graph.first_row[moved], graph.second_row[moved]
    expected = np.full(len(Stream), -1)
    for out, into in _ARRIVES_ON.items():
        expected[out] = into
    if (i := _first(expected[program.stream[send]] != program.stream[recv])) is not None:
        sent, received = Stream(program.stream[send[i]]), Stream(program.stream[recv[i]])
        raise PlanError(
            f"wrong stream: {row_token(program, int(send[i]))} leaves on {sent.name} and arrives on {received.name}"
        )
    # Nodes are in storage order, so a stable sort by process group keeps the order of sending.
    group = pack_key(program.worker[send], program.peer[send], program.stream[send])
    order = np.argsort(group, kind="stable")
    group, recv = group[order], recv[order]
    if (i := _first((group[1:] == group[:-1]) & (recv[1:] < recv[:-1]))) is not None:
        first, second = row_token(program, int(recv[i])), row_token(program, int(recv[i + 1]))
        raise PlanError(f"swapped receive: {first} is sent before {second} but received after it")


def _check_pairs(program: Program) -> None:
    """One forward and one backward of different micro-batches on one worker; a unit where stages are paired.

    In a layer-level Program a pair labels all operations of the forward and of
    the backward (its weight gradients and repeats too) that run side by side.
    """
    rows = np.flatnonzero(program.pair >= 0)
    if not rows.size:
        return
    rows = rows[np.argsort(program.pair[rows], kind="stable")]
    pair, phase = program.pair[rows], program.phase[rows]
    start = np.flatnonzero(np.concatenate([[True], pair[1:] != pair[:-1]]))
    size = np.diff(np.append(start, rows.shape[0]))
    whole = program.kind[rows] == int(Kind.STAGE)
    forward, backward = phase == int(Phase.F), among(phase, (Phase.B, Phase.I))
    backward |= among(phase, (Phase.W, Phase.R)) & ~whole
    first_f, last_f = _range(program.microbatch[rows], forward, start)
    first_b, last_b = _range(program.microbatch[rows], backward, start)
    low, high = _range(program.worker[rows], forward | backward, start)
    stages = np.logical_or.reduceat(whole, start)
    adjacent = (size == 2) & (rows[start + size - 1] - rows[start] == 1)
    same_stream = np.equal(*_range(program.stream[rows], forward | backward, start))
    faults = (
        (
            np.logical_or.reduceat(~(forward | backward), start),
            "has a phase other than F, B and I (of layers: W, R)",
        ),
        ((first_f != last_f) | (first_b != last_b), "is not one forward and one backward"),
        (first_f == first_b, "has its forward and its backward on the same micro-batch"),
        (low != high, "lies on several workers"),
        (stages & ~(adjacent & same_stream), "is not two stages next to each other on one stream"),
    )
    for fault, text in faults:
        if (i := _first(fault)) is not None:
            members = " ".join(row_token(program, int(r)) for r in rows[start[i] : start[i] + min(size[i], 4)])
            raise PlanError(f"pair {int(pair[start[i]])} ({members}) {text}")


def _range(values: IntArray, mask: BoolArray, start: NDArray[np.intp]) -> tuple[IntArray, IntArray]:
    """Smallest and largest masked value of each group of rows; they differ where a group has none."""
    low = np.minimum.reduceat(np.where(mask, values, np.iinfo(np.int32).max), start)
    return low, np.maximum.reduceat(np.where(mask, values, -1), start)


def _check_places(program: Program, graph: Graph) -> None:
    """What an operation needs is on its worker: neighbours in the chain meet, or a transfer joins them.

    Stage-level Programs leave the transfers out and are not asked.
    """
    row = graph.first_row
    waits = is_wait(program)
    chain = ~among(program.kind[row], (Kind.GRAD_SYNC, Kind.OPTIM, Kind.STAGE)) & ~waits[row]
    chain &= among(program.phase[row], (Phase.F, Phase.B, Phase.I))
    leaves = np.where(graph.second_row >= 0, program.peer[row], program.worker[row])
    src, dst = data_edges(graph)
    apart = chain[src] & chain[dst] & (leaves[src] != program.worker[row][dst])
    # Between the chunks of a spread head only the softmax statistics travel, and HEAD in backward gathers them itself.
    apart &= ~((program.kind[row][src] == int(Kind.HEAD)) & (program.kind[row][dst] == int(Kind.HEAD)))
    if waits.any():  # a transfer also waits for the compute before its batch at the receiver: an order, no data
        received = graph.second_row[dst] >= 0
        apart &= ~(received & (program.worker[row][src] == program.worker[graph.second_row[dst]]))
    if (i := _first(apart)) is not None:
        source, target = row_token(program, int(row[src[i]])), row_token(program, int(row[dst[i]]))
        raise PlanError(f"missing transfer: {target} needs the result of {source}, which is not on its worker")


def _check_memory(program: Program, memory_gib: Memory | None, limit_gib: float | None) -> None:
    """Peak memory of every worker within the limit."""
    if memory_gib is None or limit_gib is None:
        return
    peak = np.asarray(memory_gib(program) if callable(memory_gib) else memory_gib, dtype=np.float64)
    if peak.shape != (program.n_workers,):
        raise PlanError(f"memory_gib has shape {peak.shape}, one value per worker ({program.n_workers}) is needed")
    if (i := _first(~(peak <= limit_gib))) is not None:
        raise PlanError(f"memory: worker {i} needs {peak[i]:.2f} GiB, the limit is {limit_gib:.2f} GiB")
