"""The executor by itself: order, overlap, timeouts and errors, with operations that are Python functions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.program import Program, Row
from disagmoe.runtime.errors import PeerLostError
from disagmoe.runtime.executor import Executor, wait_limit_s
from disagmoe.runtime.script import Script, Task, script_of

CPU = torch.device("cpu")
PROGRAMS = {
    "one stream": af_pipe_program(p=2, layers=3, m=5, group=6, order="comm_stage"),
    "two streams": af_pipe_program(p=2, layers=3, m=6, group=8, order="megatron", compute_streams=2),
    "head behind": af_pipe_program(p=1, layers=2, m=3, group=4, order="comm_stage", head="next_a"),
}


def executor(script: Script, perform: Callable[[Task], float | None], timeout_s: float = 10.0) -> Executor:
    return Executor(script, perform, device=CPU, timeout_s=timeout_s, names=tuple(f"W{i}" for i in range(4)))


def two_workers(*rows: Row) -> Program:
    return Program.from_rows(rows, n_workers=2, n_layers=2, n_microbatches=2)


class Rendezvous:
    """All workers of a Program as threads of one process; a transfer is over when both ends are in it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scripts = [script_of(program, worker) for worker in range(program.n_workers)]
        self.meetings: dict[Op, threading.Barrier] = {}
        self.through: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def perform(self, worker: int, task: Task) -> None:
        if task.peer >= 0:
            with self._lock:
                barrier = self.meetings.setdefault(task.op, threading.Barrier(2))
            barrier.wait(10.0)
        with self._lock:
            self.through[worker, task.row] = len(self.through)

    def run(self) -> list[dict[Stream, list[int]]]:
        ran: list[dict[Stream, list[int]]] = [{} for _ in self.scripts]
        runners = [executor(s, lambda t, w=i: self.perform(w, t)) for i, s in enumerate(self.scripts)]  # type: ignore[misc]

        def go(worker: int) -> None:
            ran[worker] = dict(runners[worker].step().ran)

        threads = [threading.Thread(target=go, args=(worker,)) for worker in range(len(self.scripts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        for runner in runners:
            runner.close()
        return ran


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_every_stream_runs_its_rows_in_order(program: Program) -> None:
    world = Rendezvous(program)
    ran = world.run()
    assert len(world.through) == len(program)
    for script, of_worker in zip(world.scripts, ran, strict=True):
        assert of_worker == {stream: [task.row for task in tasks] for stream, tasks in script.streams.items()}
        for task in script.tasks():
            for need in task.needs:
                assert world.through[script.worker, need] < world.through[script.worker, task.row]


def test_a_backward_exchange_waits_for_its_own_forward() -> None:
    script = script_of(PROGRAMS["one stream"], 0)
    rows = {task.op: task.row for task in script.tasks()}
    exchanges = [t for t in script.tasks() if t.op.kind in (Kind.DISPATCH, Kind.COMBINE) and t.op.phase == Phase.B]
    assert exchanges
    assert all(rows[task.op._replace(phase=Phase.F)] in task.needs for task in exchanges)


def test_communication_runs_beside_compute() -> None:
    """The send of micro-batch 0 ends only once attention of micro-batch 1 runs, and the other way round."""
    program = two_workers(
        Row(0, Stream.COMPUTE, Op(Kind.ATTN, Phase.F, 0, 0)),
        Row(0, Stream.COMPUTE, Op(Kind.ATTN, Phase.F, 0, 1)),
        Row(0, Stream.SEND, Op(Kind.DISPATCH, Phase.F, 0, 0), peer=1),
        Row(1, Stream.RECV, Op(Kind.DISPATCH, Phase.F, 0, 0), peer=0),
    )
    sending, computing = threading.Event(), threading.Event()

    def perform(task: Task) -> None:
        if task.op.kind == Kind.DISPATCH:
            sending.set()
            assert computing.wait(10.0)
        elif task.op.microbatch == 1:
            computing.set()
            assert sending.wait(10.0)

    runner = executor(script_of(program, 0), perform)
    record = runner.step()
    runner.close()
    send, compute = record.moments[2], record.moments[1]
    assert send.start_s < compute.end_s and compute.start_s < send.end_s


def test_of_two_compute_streams_a_blocked_one_does_not_hold_the_other() -> None:
    program = two_workers(
        Row(0, Stream.COMPUTE, Op(Kind.ATTN, Phase.F, 0, 0)),
        Row(0, Stream.COMPUTE, Op(Kind.ATTN, Phase.F, 1, 0)),
        Row(0, Stream.COMPUTE_B, Op(Kind.ATTN, Phase.B, 1, 1)),
        Row(0, Stream.RECV, Op(Kind.DISPATCH, Phase.B, 1, 1), peer=1),
        Row(1, Stream.SEND, Op(Kind.DISPATCH, Phase.B, 1, 1), peer=0),
        Row(0, Stream.COMPUTE, Op(Kind.ATTN, Phase.F, 1, 1)),
    )
    order: list[Op] = []
    let_go = threading.Event()

    def perform(task: Task) -> None:
        if task.op.kind == Kind.DISPATCH:
            assert let_go.wait(10.0)
        order.append(task.op)
        if task.op == Op(Kind.ATTN, Phase.F, 1, 0):
            let_go.set()

    runner = executor(script_of(program, 0), perform)
    runner.step()
    runner.close()
    compute = [op for op in order if op.kind == Kind.ATTN]
    assert compute[:2] == [Op(Kind.ATTN, Phase.F, 0, 0), Op(Kind.ATTN, Phase.F, 1, 0)]
    assert set(compute[2:]) == {Op(Kind.ATTN, Phase.B, 1, 1), Op(Kind.ATTN, Phase.F, 1, 1)}


ONE_RECEIVE = (
    Row(0, Stream.SEND, Op(Kind.DISPATCH, Phase.F, 1, 0), peer=1),
    Row(1, Stream.RECV, Op(Kind.DISPATCH, Phase.F, 1, 0), peer=0),
    Row(1, Stream.COMPUTE, Op(Kind.FFN, Phase.F, 1, 0)),
)


def test_a_peer_that_does_not_answer_is_named_with_the_operation() -> None:
    runner = executor(script_of(two_workers(*ONE_RECEIVE), 1), lambda task: time.sleep(0.5), timeout_s=0.1)
    words = (
        "FFN F of layer 1, micro-batch 0 cannot start: "
        "DISPATCH F of layer 1, micro-batch 0 from W0 was not through after 0.1 s"
    )
    with pytest.raises(PeerLostError, match=words):
        runner.step()
    runner.close()


def test_a_lost_peer_is_named_with_the_operation() -> None:
    def perform(task: Task) -> None:
        raise PeerLostError("connection closed")

    runner = executor(script_of(two_workers(*ONE_RECEIVE), 1), perform)
    with pytest.raises(PeerLostError, match="DISPATCH F of layer 1, micro-batch 0 from W0: connection closed"):
        runner.step()
    runner.close()


def test_the_first_error_is_everybodys() -> None:
    def perform(task: Task) -> None:
        if task.op.kind == Kind.DISPATCH:
            raise ValueError("wrong rows")

    runner = executor(script_of(two_workers(*ONE_RECEIVE), 1), perform)
    with pytest.raises(ValueError, match="wrong rows"):
        runner.step()
    runner.close()


def test_a_lane_may_go_on_after_the_compute_as_long_as_it_makes_progress() -> None:
    sync = [Row(0, Stream.SYNC, Op(Kind.GRAD_SYNC, Phase.B, layer)) for layer in (1, 0, -1)]
    program = two_workers(Row(0, Stream.COMPUTE, Op(Kind.ATTN, Phase.F, 0, 0)), *sync)
    runner = executor(
        script_of(program, 0), lambda task: time.sleep(0.2 if task.stream == Stream.SYNC else 0.0), timeout_s=0.5
    )
    assert runner.step().ran[Stream.SYNC] == [1, 2, 3]
    runner.close()


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.1, 10.0), (3.0, 15.0), (60.0, 25.0)])
def test_how_long_a_wait_may_take(step_s: float, limit_s: float) -> None:
    assert wait_limit_s(step_s) == limit_s
