"""The accounting of simulated Programs: identities that hold whatever the Program."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from task_programs import Task, pack, task_lists

from disagmoe.ops import COMPUTE_KINDS, Kind
from disagmoe.simulator import simulate
from disagmoe.timeline.metrics import worker_metrics


@settings(max_examples=150, deadline=None)
@given(task_lists())
def test_step_is_compute_plus_exposed_plus_bubble_on_every_worker(case: tuple[list[Task], int]) -> None:
    timeline = simulate(*pack(*case))
    step = timeline.step_s
    metrics = worker_metrics(timeline)
    assert [m.worker for m in metrics] == list(range(case[1]))
    for m in metrics:
        assert m.step_s == step
        assert m.compute_s + m.exposed_s + m.bubble_s == pytest.approx(step, rel=1e-9)
        assert sum(m.exposed_by_kind_s.values()) == pytest.approx(m.exposed_s, rel=1e-9, abs=1e-9 * step)
        assert m.wait_s is not None
        assert 0 <= m.wait_s <= m.bubble_s * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(task_lists(contention=False))
def test_alone_on_its_streams_compute_is_the_sum_of_durations(case: tuple[list[Task], int]) -> None:
    """With factors of 1, sharing the GPU between two compute streams changes neither work nor union."""
    program, pricing, graph = pack(*case)
    is_compute = [Kind(k) in COMPUTE_KINDS for k in program.kind]
    for m in worker_metrics(simulate(program, pricing, graph)):
        work = sum(
            pricing.duration_s[row]
            for row in range(len(program))
            if is_compute[row] and program.worker[row] == m.worker
        )
        assert m.compute_s == pytest.approx(work, rel=1e-9, abs=1e-12)
