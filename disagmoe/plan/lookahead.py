"""Re-records the order of a Program with a small look-ahead window; weight gradients fill what stays idle.

A generator's order is a good one for equal durations. Here the Program is played
once with its own: an idle stream takes the first of its next few operations that can
start, a weight gradient (phase W) only where nothing else can, unless as many are
put off as may be. The order of the starts becomes the order of every stream, so the
result is as static as any Program, and free of deadlock since every operation did
start in that order.

What the window may not do is use more memory than was asked for: a worker holds at
most as many layers in flight as in the given order plus `spare`, and repeats no more
layers ahead of their backward than that order does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.dependencies import Graph, build_graph, is_wait
from disagmoe.plan.memory_timeline import in_flight
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import COLUMNS, Program, among
from disagmoe.window_kernels import COUNTERS, HELD, PENDING, REPEATED, record_window

LongArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
_BACKWARD = (Phase.B, Phase.I)


@dataclass(frozen=True)
class Window:
    """`rows` operations of a stream are looked at; `spare` more layers than in the given order may be in flight
    (fewer, where negative); `pending` weight gradients may be put off on a worker."""

    rows: int
    spare: int = 0
    pending: int = 8

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("pending", self.pending)):
            if value < 1:
                raise ValueError(f"look-ahead {name}={value}: must be at least 1")


def look_ahead(program: Program, pricing: Pricing, window: Window) -> Program:
    """The same operations, every stream in the order of a list schedule with this window.

    Raises ValueError where the window's limits leave no order, and for Programs with
    waits on a compute stream or with two compute streams.
    """
    if is_wait(program).any() or (program.stream == int(Stream.COMPUTE_B)).any():
        raise ValueError("look-ahead reorders Programs with one compute stream and no waits on it")
    graph = build_graph(program)
    slot = program.worker.astype(np.int64) * len(Stream) + program.stream
    begins = np.flatnonzero(np.diff(slot, prepend=-1) != 0)
    takes, gives = _counted(program, graph)
    sequence, ran = record_window(
        np.append(begins, len(program)).astype(np.int64),
        program.worker[begins].astype(np.int64),
        graph.node.astype(np.int64),
        np.cumsum(np.diff(slot, prepend=-1) != 0) - 1,
        graph.first_row.astype(np.int64),
        graph.second_row.astype(np.int64),
        graph.succ_ptr.astype(np.int64),
        graph.succ.astype(np.int64),
        graph.indegree.astype(np.int64),
        _stretched(pricing)[graph.first_row],
        takes,
        gives,
        np.full(begins.shape[0], window.rows, dtype=np.int64),
        _limits(program, window),
    )
    if ran < graph.n_nodes:
        raise ValueError(f"no order within {window}: {graph.n_nodes - ran} operations would never start")
    # What workers share is reduced last on each of them, in one order everywhere.
    shared = (program.kind == int(Kind.GRAD_SYNC)) & (program.layer == -1)
    last = (program.kind == int(Kind.GRAD_SYNC)) & (program.phase == int(Phase.F)) & (not program.early_gather)
    shared &= program.phase == int(Phase.B)
    order = np.lexsort((sequence, shared + 2 * last, slot))
    return replace(program, **{name: getattr(program, name)[order] for name in COLUMNS})


def _stretched(pricing: Pricing) -> FloatArray:
    """Durations as if everything ran beside something: contention does not depend on the order here."""
    slowest = float(pricing.slows_compute.max(initial=1.0))
    comm = (pricing.slowed_by_compute > 1.0) | (pricing.slows_compute > 1.0) | (pricing.wire_bytes > 0.0)
    stretched: FloatArray = pricing.duration_s * np.where(comm, pricing.slowed_by_compute, slowest)
    return stretched


def _counted(program: Program, graph: Graph) -> tuple[LongArray, LongArray]:
    """What every node adds to and takes off the counters of its worker, [nodes, COUNTERS]."""
    row = graph.first_row
    kind, phase, worker = program.kind[row], program.phase[row], program.worker[row]
    takes, gives = (np.zeros((graph.n_nodes, COUNTERS), dtype=np.int64) for _ in range(2))
    counted, back = _counted_kind(program, None)[worker] == kind, among(phase, _BACKWARD)
    takes[:, HELD] = counted & (phase == int(Phase.F))
    gives[:, HELD] = counted & back
    again = _counted_kind(program, Phase.R)[worker] == kind
    takes[:, REPEATED] = again & (phase == int(Phase.R))
    gives[:, REPEATED] = again & back
    takes[:, PENDING] = phase == int(Phase.I)
    gives[:, PENDING] = phase == int(Phase.W)
    return takes, gives


def _counted_kind(program: Program, phase: Phase | None) -> LongArray:
    """The kind by which a worker's layers are counted: attention where it has any in this phase, or FFN; -2: none."""
    found = np.full(program.n_workers, -2, dtype=np.int64)
    there = np.ones(len(program), dtype=np.bool_) if phase is None else program.phase == int(phase)
    for kind in (Kind.FFN, Kind.ATTN):
        found[np.unique(program.worker[there & (program.kind == int(kind))])] = int(kind)
    return found


def _limits(program: Program, window: Window) -> LongArray:
    """Most of what each counter may reach, [workers, COUNTERS]."""
    limits = np.full((program.n_workers, COUNTERS), window.pending, dtype=np.int64)
    limits[:, HELD] = np.maximum(1, np.array(in_flight(program)) + window.spare)
    kind = _counted_kind(program, Phase.R)[program.worker]
    change = np.where(program.phase == int(Phase.R), 1, np.where(among(program.phase, _BACKWARD), -1, 0))
    rows = np.flatnonzero((program.kind == kind) & (change != 0))
    for worker in range(program.n_workers):
        mine = change[rows[program.worker[rows] == worker]]
        limits[worker, REPEATED] = max(1, int(np.cumsum(mine).max(initial=1)))
    return limits
