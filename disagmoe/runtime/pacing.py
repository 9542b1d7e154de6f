"""The pacer of an emulated step: when each operation starts and ends, in logical time.

Decides what it means that real processes run at the modelled speed. Every operation
does its real work (a small model's) and then waits until its modelled duration is
over: compute its own, a transfer that of its links. Times are *logical*, in seconds
of the modelled step; `dilation` wall seconds make one. An operation is ready at the
latest logical end of what it waits for, and starts at max(ready, now - slack): what
the host needs to get going is forgiven up to the slack, which is fixed beforehand;
whatever is later than that shows in every time that follows.

Logical times travel with the messages. Whoever takes part in a transfer or a
collective tells the others when it was ready, and the operation starts at the
latest of these. An end counts once the clock is `hold_s` past it, so that what
started beside the operation shortly before has been seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from disagmoe.ops import COMPUTE_STREAMS, Kind, Op, Phase, Stream
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.runtime.collective import finish
from disagmoe.runtime.groups import Groups
from disagmoe.runtime.script import Task
from disagmoe.runtime.streams import Moment
from disagmoe.runtime.traffic import Logbook, Traffic

MOST_SLACK = 0.25
"""Of the smallest exchange."""
HOLD = 0.25
"""Of the slack: what an end is held back for."""
_SHORTEST_SLEEP_S = 200e-6
_LEAD_S = 0.02
_CARRIED = (Kind.DISPATCH, Kind.COMBINE, Kind.P2P)
"""Transfers whose headers bring the others' times."""


@dataclass(frozen=True)
class Pace:
    """`dilation` wall seconds per logical second; the slack and how long ends are held back, in logical seconds."""

    dilation: float
    slack_s: float
    hold_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.dilation > 0.0 and 0.0 <= self.hold_s <= self.slack_s):
            raise ValueError(
                f"dilation {self.dilation}, slack {self.slack_s} s, hold {self.hold_s} s: "
                "allowed: dilation > 0 and 0 <= hold <= slack"
            )

    @classmethod
    def of_exchange(cls, dilation: float, smallest_s: float) -> Pace:
        """The pace of a step whose smallest exchange takes so long."""
        slack_s = MOST_SLACK * smallest_s
        return cls(dilation, slack_s, HOLD * slack_s)


class Pacer:
    """The logical clock of one rank. Used by all threads of the rank, each with rows of its own."""

    def __init__(self, pace: Pace, traffic: Traffic, logbook: Logbook, groups: Groups) -> None:
        self.pace = pace
        self.late_s: list[float] = []
        """By how much each row started later than it was ready, the slack taken off."""
        self._traffic = traffic
        self._logbook = logbook
        self._groups = groups
        self._began_s = 0.0
        self._ends: dict[int, float] = {}
        self._last: dict[Stream, float] = {}
        self._underway: dict[Op, _Underway] = {}

    def begin(self) -> None:
        """Begin a step, at the same moment on all ranks. Collective over the world."""
        self.late_s = []
        self._ends.clear()
        self._last.clear()
        self._underway.clear()
        self._traffic.restart()
        self._logbook.clear(self._groups.rank)
        dist.barrier()
        origin = torch.tensor([time.perf_counter() + _LEAD_S], dtype=torch.float64)
        dist.broadcast(origin, 0)
        self._began_s = float(origin)
        time.sleep(max(0.0, self._began_s - time.perf_counter()))

    def now_s(self) -> float:
        """Logical time."""
        return (time.perf_counter() - self._began_s) / self.pace.dilation

    def run(self, task: Task, perform: Callable[[Task], object]) -> Moment:
        """Do the work of a row; returns when its logical time is over."""
        ready = max((self._ends[need] for need in task.needs), default=0.0)
        ready = max(ready, self._last.get(task.stream, 0.0))
        post = max(ready, self.now_s() - self.pace.slack_s)
        self.late_s.append(post - ready)
        if task.op.kind in _CARRIED and task.stream not in COMPUTE_STREAMS:
            self._underway[task.op] = moving = _Underway(task.row, post)
            self._begin(task.row, post)
            perform(task)
            del self._underway[task.op]
            start = moving.start_s
        else:
            start = self._latest(task.op, post)
            self._begin(task.row, start)
            perform(task)
        end = self._await_end(task.row, start)
        self._logbook.finish(self._groups.rank, task.row, end)
        self._ends[task.row] = self._last[task.stream] = end
        return Moment(post, start, end)

    def posted_ns(self, op: Op) -> int:
        """When this rank was ready for a transfer, in logical nanoseconds: what its headers carry."""
        moving = self._underway.get(op)
        return 0 if moving is None else round(moving.start_s * 1e9)

    def heard_ns(self, op: Op, posted_ns: int) -> None:
        """When others were ready for a transfer: what their headers said."""
        moving = self._underway.get(op)
        if moving is not None:
            moving.start_s = max(moving.start_s, posted_ns * 1e-9)
            self._begin(moving.row, moving.start_s)

    def _begin(self, row: int, start_s: float) -> None:
        if self._traffic.duration_s[row] > 0.0:
            self._logbook.begin(self._groups.rank, row, start_s)

    def _latest(self, op: Op, post_s: float) -> float:
        """When the last of those that an operation brings together was ready for it."""
        if op.kind == Kind.OPTIM:
            group = None
        elif op.kind == Kind.GRAD_SYNC and op.phase == Phase.B:
            group = self._groups.reduction("dense")
            if group is None:
                return post_s
        else:
            return post_s
        latest = torch.tensor([post_s], dtype=torch.float64)
        work = dist.all_reduce(latest, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        finish(work, group)
        return float(latest)

    def _await_end(self, row: int, start_s: float) -> float:
        """Wait until an operation that started then is over; returns when that was."""
        duration, hold = self._traffic.duration_s[row], self.pace.hold_s
        if duration == 0.0:
            return start_s
        soonest = start_s + duration
        while True:
            time.sleep(max(0.0, self._began_s + (soonest + hold) * self.pace.dilation - time.perf_counter()))
            seen = max(self.now_s() - hold, soonest)
            progress = self._traffic.progress(row, self._groups.rank, start_s, seen)
            if progress.end_s <= seen:
                return progress.end_s
            soonest = seen + max(progress.left_s, _SHORTEST_SLEEP_S / self.pace.dilation)


@dataclass
class _Underway:
    """A transfer that this rank has begun; `start_s` is the latest time heard so far."""

    row: int
    start_s: float


@dataclass(frozen=True)
class Pacing:
    """How a Plan is emulated: the `pricing` of its Program, the pace, and the file that `Logbook.create` made."""

    pricing: Pricing
    pace: Pace
    logbook: Path

    def pacer(self, program: Program, groups: Groups) -> Pacer:
        """The pacer of this rank."""
        logbook = Logbook(self.logbook, groups.ranks.world_size, len(program))
        return Pacer(self.pace, Traffic(program, self.pricing, groups.ranks, logbook), logbook, groups)
