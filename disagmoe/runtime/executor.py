"""Runs one worker's part of a Program: compute on the calling thread, every other stream on a lane.

Decides when an operation starts. A stream runs its rows in the Program's order; a
row starts when the rows it needs are through. Communication therefore overlaps
compute as planned, and the calling thread never blocks in a send (gloo's are
rendezvous). With two compute streams, whichever head is ready runs, backward
first: on a GPU both issue to streams of their own, on a CPU they take turns. Where a
pacer decides how long everything takes, they too run side by side.

The executor knows nothing of models: `perform(task)` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from disagmoe.ops import COMPUTE_STREAMS, RECV_STREAMS, Stream
from disagmoe.runtime.errors import PeerLostError
from disagmoe.runtime.header import name_op
from disagmoe.runtime.lane import Lane, Ticket
from disagmoe.runtime.pacing import Pacer
from disagmoe.runtime.script import Script, Task
from disagmoe.runtime.streams import Board, Moment, Stamp, Stamps

LEAST_TIMEOUT_S = 10.0
MOST_TIMEOUT_S = 25.0


def wait_limit_s(planned_step_s: float) -> float:
    """How long one wait may take before a peer counts as lost: 5 planned steps, within 10 to 25 s."""
    return min(MOST_TIMEOUT_S, max(LEAST_TIMEOUT_S, 5.0 * planned_step_s))


@dataclass(frozen=True)
class Record:
    """What one rank ran in one step: the moment of every row, and the rows of each stream in the order they ran."""

    begin_s: float
    moments: Mapping[int, Moment]
    ran: Mapping[Stream, list[int]]


class Executor:
    """Runs the Script of one worker, step after step, on one rank.

    `perform` does one task and returns when it is through on the host; it is called
    on the thread of the task's stream. A task that waits for other ranks itself (a
    collective) returns when the waiting was over, others None. `names` are those of
    the workers, for error messages.
    """

    def __init__(
        self,
        script: Script,
        perform: Callable[[Task], float | None],
        *,
        device: torch.device,
        timeout_s: float = MOST_TIMEOUT_S,
        names: tuple[str, ...] = (),
        pacer: Pacer | None = None,
    ) -> None:
        self.script = script
        self.perform = perform
        self.pacer = pacer
        self.device = device
        self.timeout_s = timeout_s
        self._names = names
        self._tasks = {task.row: task for task in script.tasks()}
        here = [stream for stream in script.streams if stream in COMPUTE_STREAMS][: None if pacer is None else 1]
        self._compute = [script.streams[stream] for stream in here]
        self._lanes = {s: Lane(s.name.lower(), device) for s in script.streams if s not in here}
        two = device.type == "cuda" and len(self._compute) > 1
        self.second_stream = torch.cuda.Stream(device) if two else None  # type: ignore[no-untyped-call]

    def step(self) -> Record:
        """Run every task once. Raises what a task raised, or PeerLostError naming the operation and its peer."""
        if self.pacer is not None:
            self.pacer.begin()
        run = _Step(self)
        tickets = [lane.post(s.name, run.play, self.script.streams[s]) for s, lane in self._lanes.items()]
        try:
            run.compute([list(reversed(tasks)) for tasks in self._compute])
            for ticket in tickets:
                self._await(ticket, run)
        except BaseException as error:
            run.board.fail(error)
            raise
        return run.record()

    def close(self) -> None:
        """End the lanes."""
        for lane in self._lanes.values():
            lane.close()

    def describe(self, task: Task) -> str:
        """An operation and, where it has one, its peer, in words."""
        if task.peer < 0:
            return name_op(task.op)
        peer = self._names[task.peer] if self._names else f"worker {task.peer}"
        return f"{name_op(task.op)} {'from' if task.stream in RECV_STREAMS else 'to'} {peer}"

    def stuck(self, task: Task, late: int) -> PeerLostError:
        """The error of a task whose need `late` was not met in time."""
        need = self.describe(self._tasks[late])
        return PeerLostError(f"{self.describe(task)} cannot start: {need} was not through after {self.timeout_s:g} s")

    def _await(self, ticket: Ticket[None], run: _Step) -> None:
        """Until a lane is through; it has time as long as anything gets done."""
        while True:
            before = len(run.done)
            try:
                return ticket.wait(self.timeout_s)
            except PeerLostError:
                if ticket.done or len(run.done) == before:
                    raise


class _Step:
    """One step under way."""

    def __init__(self, owner: Executor) -> None:
        self.board = Board()
        self.done: dict[int, tuple[Stamp, Stamp, Stamp]] = {}
        self._owner = owner
        self._stamps = Stamps(owner.device)
        self._ran: dict[Stream, list[int]] = {stream: [] for stream in owner.script.streams}

    def play(self, tasks: tuple[Task, ...]) -> None:
        """Run one communication stream, in order."""
        try:
            for task in tasks:
                self._run(task)
        except BaseException as error:
            self.board.fail(error)
            raise

    def compute(self, streams: list[list[Task]]) -> None:
        """Run the compute streams, each reversed; of two heads that are ready the later stream's."""
        while heads := [tasks for tasks in streams if tasks]:
            ready = heads[-1]
            if len(heads) > 1:
                blocked = [self.board.missing(tasks[-1].needs) for tasks in heads]
                if None not in blocked:
                    late = [row for row in blocked if row is not None]
                    if not self.board.wait_any(late, self._owner.timeout_s):
                        raise self._owner.stuck(heads[-1][-1], late[-1])
                    continue
                ready = heads[max(i for i, row in enumerate(blocked) if row is None)]
            task = ready.pop()
            second = self._owner.second_stream if task.stream == Stream.COMPUTE_B else None
            with torch.cuda.stream(second) if second is not None else nullcontext():
                self._run(task)

    def record(self) -> Record:
        """What was run and when."""
        begin_s = self._stamps.begin_s if self._owner.pacer is None else 0.0
        return Record(begin_s, self._stamps.resolve(self.done), self._ran)

    def _run(self, task: Task) -> None:
        owner = self._owner
        if task.needs and (late := self.board.wait_all(task.needs, owner.timeout_s)) is not None:
            raise owner.stuck(task, late)
        self._ran[task.stream].append(task.row)
        try:
            self.done[task.row] = self._timed(task) if owner.pacer is None else owner.pacer.run(task, owner.perform)
        except PeerLostError as error:
            raise PeerLostError(f"{owner.describe(task)}: {error}") from error
        self.board.settle(task.row, self._stamps.event())

    def _timed(self, task: Task) -> tuple[Stamp, Stamp, Stamp]:
        """Perform a task as fast as it goes."""
        post = self._stamps.now()
        started = self._owner.perform(task)
        return post, post if started is None else started, self._stamps.now()
