"""What ran beside an operation decides its end: whole Programs, against what the simulator says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from disagmoe.ops import Kind, Stream
from disagmoe.plan.plan import Placement, Worker
from disagmoe.runtime.groups import RankMap
from disagmoe.runtime.traffic import NEVER, Logbook, Traffic
from disagmoe.simulator import simulate
from disagmoe.timeline.timeline import Timeline
from tests.simulator.task_programs import Task, pack, task_lists


def ranks_of(workers: int, gpus: int = 1) -> RankMap:
    placement = Placement(
        workers=tuple(Worker(f"P{i}", "AF", gpus, 1, 1.0) for i in range(workers)),
        attn=(0,),
        ffn=(0,),
        embed=0,
        head=0,
    )
    return RankMap(placement, 1)


class Simulated:
    """The times of a Timeline, the same on every rank of a worker."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    def start(self, rank: int, row: int) -> float:
        return float(self.timeline.start_s[row])

    def end(self, rank: int, row: int) -> float:
        return float(self.timeline.end_s[row])


@settings(max_examples=150, deadline=None)
@given(task_lists())
def test_every_operation_ends_when_the_simulator_says(case: tuple[list[Task], int]) -> None:
    tasks, n_workers = case
    program, pricing, graph = pack(tasks, n_workers)
    timeline = simulate(program, pricing, graph)
    traffic = Traffic(program, pricing, ranks_of(n_workers), Simulated(timeline))
    horizon = timeline.step_s + 1.0
    for row in range(len(program)):
        start, end = float(timeline.start_s[row]), float(timeline.end_s[row])
        if pricing.duration_s[row] == 0.0:
            continue
        rank = int(program.worker[row])
        assert traffic.progress(row, rank, start, horizon).end_s == pytest.approx(end, rel=1e-9, abs=1e-12)
        halfway = start + 0.5 * (end - start)
        early = traffic.progress(row, rank, start, halfway)
        assert early.end_s == NEVER
        assert 0.0 < early.left_s <= end - halfway + 1e-12  # nothing goes faster than alone


def test_the_other_end_is_the_rank_of_the_same_number(tmp_path: Path) -> None:
    tasks = [
        Task(Kind.DISPATCH, ((0, Stream.SEND), (1, Stream.RECV)), 4, slowed=2),  # type: ignore[arg-type]
        Task(Kind.FFN, ((1, Stream.COMPUTE),), 4),  # type: ignore[arg-type]
    ]
    program, pricing, _ = pack(tasks, 2)
    logbook = Logbook(Logbook.create(tmp_path / "times", 4, len(program)), 4, len(program))
    traffic = Traffic(program, pricing, ranks_of(2, gpus=2), logbook)
    send = int(np.flatnonzero(program.stream == int(Stream.SEND))[0])
    compute = int(np.flatnonzero(program.stream == int(Stream.COMPUTE))[0])
    receive = int(np.flatnonzero(program.stream == int(Stream.RECV))[0])
    for rank in (0, 1):
        logbook.begin(rank, send, 0.0)
        logbook.begin(2 + rank, receive, 0.0)
    logbook.begin(3, compute, 1.0)  # on the second rank of the receiver only
    assert traffic.progress(send, 0, 0.0, 10.0).end_s == pytest.approx(4.0)
    assert traffic.progress(send, 1, 0.0, 10.0).end_s == pytest.approx(1.0 + 2 * 3.0)
    logbook.finish(3, compute, 3.0)
    traffic.restart()
    assert traffic.progress(send, 1, 0.0, 10.0).end_s == pytest.approx(5.0)  # 1 + 2 at half speed + 2


def test_a_transfer_has_begun_when_all_who_take_part_were_ready(tmp_path: Path) -> None:
    tasks = [
        Task(Kind.DISPATCH, ((0, Stream.SEND), (1, Stream.RECV)), 4, slows=2),  # type: ignore[arg-type]
        Task(Kind.ATTN, ((0, Stream.COMPUTE),), 4),  # type: ignore[arg-type]
    ]
    program, pricing, _ = pack(tasks, 2)
    logbook = Logbook(Logbook.create(tmp_path / "times", 4, len(program)), 4, len(program))
    traffic = Traffic(program, pricing, ranks_of(2, gpus=2), logbook)
    send, receive, compute = (
        int(np.flatnonzero(program.stream == int(s))[0]) for s in (Stream.SEND, Stream.RECV, Stream.COMPUTE)
    )
    logbook.begin(0, compute, 0.0)
    logbook.begin(0, send, 0.0)
    assert traffic.progress(compute, 0, 0.0, 3.0).left_s == pytest.approx(1.0)  # nobody receives yet
    logbook.begin(2, receive, 1.0)
    assert traffic.progress(compute, 0, 0.0, 3.0).left_s == pytest.approx(1.0)
    logbook.begin(3, receive, 2.0)
    assert traffic.progress(compute, 0, 0.0, 3.0).left_s == pytest.approx(1.5)  # half speed from 2 on


def test_a_logbook_is_shared_by_all_who_map_it_and_cleared_by_rank(tmp_path: Path) -> None:
    path = Logbook.create(tmp_path / "times", 2, 3)
    mine, yours = Logbook(path, 2, 3), Logbook(path, 2, 3)
    mine.begin(0, 2, 1.5)
    yours.begin(1, 0, 2.5)
    yours.finish(1, 0, 3.5)
    assert [yours.start(0, row) for row in range(3)] == [NEVER, NEVER, 1.5]
    assert (mine.start(1, 0), mine.end(1, 0), mine.end(0, 2)) == (2.5, 3.5, NEVER)
    mine.clear(1)
    assert (yours.start(1, 0), yours.end(1, 0), yours.start(0, 2)) == (NEVER, NEVER, 1.5)
