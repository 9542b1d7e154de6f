"""From what every rank ran to one Timeline of the step.

Decides how many ranks become one worker, and what belongs to a wait. A worker's
ranks (those of all replicas) count as one: post, start and end are their means,
which keeps every order. A transfer starts when the last rank it depends on has
posted it: at the other end the ranks of the peer, for a collective the ranks of
the worker itself; before that it waits. Clocks of different machines are aligned
with rank 0's once, at start-up; on one machine they are the same clock.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from disagmoe.ops import COMPUTE_STREAMS, Stream
from disagmoe.plan.program import Program
from disagmoe.runtime.child import Context
from disagmoe.runtime.executor import Record
from disagmoe.runtime.groups import RankMap, Ranks
from disagmoe.runtime.traffic import partners
from disagmoe.timeline.timeline import Timeline

FloatArray = NDArray[np.float64]
_PINGS = 8
_NEVER = np.nan


def clock_offset_s(context: Context) -> float:
    """What to add to this rank's `time.perf_counter` to get rank 0's. Collective over the world.

    0 where all ranks are on one machine. Otherwise from the fastest of a few
    round trips, half of which is the error.
    """
    if context.local_size == context.world_size:
        return 0.0
    offset, reply = 0.0, torch.zeros(1, dtype=torch.float64)
    for rank in range(1, context.world_size):
        best = np.inf
        for _ in range(_PINGS):
            if context.rank == rank:
                sent = time.perf_counter()
                dist.send(reply, 0)
                dist.recv(reply, 0)
                took = time.perf_counter() - sent
                if took < best:
                    best, offset = took, float(reply) - (sent + took / 2)
            elif context.rank == 0:
                dist.recv(reply, rank)
                reply[0] = time.perf_counter()
                dist.send(reply, rank)
    return offset


def gather_timeline(
    program: Program, ranks: RankMap, record: Record, offset_s: float, *, origin: str = "measured"
) -> Timeline | None:
    """The Timeline of a step on rank 0, None on the others. Collective over the world."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = np.array(sorted(record.moments), dtype=np.int64)
    times = np.array([record.moments[row] for row in rows.tolist()], dtype=np.float64).reshape(-1, 3) + offset_s
    gathered: list[tuple[NDArray[np.int64], FloatArray, float] | None] | None = [None] * world if rank == 0 else None
    dist.gather_object((rows, times, record.begin_s + offset_s), gathered)
    if gathered is None:
        return None
    found = [entry for entry in gathered if entry is not None]
    begin_s = min(begin for _, _, begin in found)
    moments = np.full((world, len(program), 3), _NEVER)
    for of_rank, (of_rows, of_times, _) in enumerate(found):
        moments[of_rank, of_rows] = of_times - begin_s
    return timeline_of(program, ranks, moments, origin=origin)


def timeline_of(program: Program, ranks: RankMap, moments: FloatArray, *, origin: str = "measured") -> Timeline:
    """Join `moments` [ranks, rows, (post, start, end)], NaN where a rank has no part, into the workers' Timeline."""
    post, start, end = (moments[:, :, i] for i in range(3))
    others = np.array(partners(program))
    columns = np.zeros((3, len(program)))
    for worker in range(program.n_workers):
        rows = np.flatnonzero(program.worker == worker)
        compute = np.isin(program.stream[rows], sorted(COMPUTE_STREAMS))
        own = ranks.everywhere([worker])
        mean = np.zeros((3, rows.shape[0]))
        for rank in own:
            begun = start[rank, rows]
            if origin == "measured":  # paced ranks have told each other
                begun = np.where(compute, begun, _arrival(program, ranks, post, rank, rows, others[rows]))
            mean[0] += post[rank, rows]
            mean[1] += np.clip(begun, post[rank, rows], end[rank, rows])
            mean[2] += end[rank, rows]
        columns[:, rows] = mean / len(own)
    return Timeline(program, start_s=columns[1], end_s=columns[2], post_s=columns[0], origin=origin)


def _arrival(
    program: Program, ranks: RankMap, post: FloatArray, rank: int, rows: NDArray[np.intp], others: NDArray[np.int64]
) -> FloatArray:
    """When the last rank that each row of `rank` depends on had posted it."""
    place = ranks.place(rank)
    latest: FloatArray = post[rank, rows].copy()
    for peer in range(program.n_workers):
        here = np.flatnonzero((others >= 0) & (program.worker[others] == peer))
        if here.size:
            far: Ranks = ranks.ranks(peer, place.replica)
            latest[here] = np.maximum(latest[here], post[np.array(far)][:, others[here]].max(axis=0))
    alone = others < 0
    for stream, near in ((Stream.COLL, ranks.ranks(place.worker, place.replica)), (Stream.SYNC, None)):
        here = np.flatnonzero(alone & (program.stream[rows] == int(stream)))
        if here.size:
            members = np.array(near if near is not None else ranks.everywhere([place.worker]))
            latest[here] = post[members][:, rows[here]].max(axis=0)
    return latest
