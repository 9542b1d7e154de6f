"""Interval metrics against a brute-force count, hand-made timelines, and the summary over workers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import COMPUTE_KINDS, Kind, Op, Phase, Stream
from disagmoe.plan.plan import Placement, Worker
from disagmoe.plan.program import Program, Row
from disagmoe.timeline.metrics import AccountingError, WorkerMetrics, summarize, worker_metrics
from disagmoe.timeline.timeline import Timeline

Span = tuple[int, Kind, float, float, float]  # worker, kind, post, start, end

KINDS = (Kind.ATTN, Kind.FFN, Kind.DISPATCH, Kind.COMBINE, Kind.P2P, Kind.GRAD_SYNC)
ORDER = {"dispatch": Kind.DISPATCH, "combine": Kind.COMBINE, "p2p": Kind.P2P, "grad_sync": Kind.GRAD_SYNC}


def timeline_of(spans: list[Span], n_workers: int = 1) -> Timeline:
    spans = sorted(spans, key=lambda s: s[0])
    rows = [Row(w, Stream.COMPUTE, Op(kind, Phase.F, 0, i)) for i, (w, kind, *_) in enumerate(spans)]
    program = Program.from_rows(rows, n_workers=n_workers, n_layers=1, n_microbatches=max(len(rows), 1))
    post, start, end = (np.array([s[column] for s in spans], dtype=np.float64) for column in (2, 3, 4))
    return Timeline(program, start, end, post)


def brute_force(spans: list[Span], worker: int, step: float) -> dict[str, float]:
    """Count unit cells: all times are whole numbers."""
    found = dict.fromkeys(["compute", "overlapped", "exposed", "bubble", "wait", *ORDER], 0.0)
    mine = [s for s in spans if s[0] == worker]
    for cell in range(int(step)):
        running = {kind for _, kind, _, start, end in mine if start <= cell < end}
        waiting = any(kind not in COMPUTE_KINDS and post <= cell < start for _, kind, post, start, _ in mine)
        computing, moving = bool(running & COMPUTE_KINDS), bool(running - COMPUTE_KINDS)
        found["compute"] += computing
        found["overlapped"] += computing and moving
        found["exposed"] += moving and not computing
        found["bubble"] += not (moving or computing)
        found["wait"] += waiting and not (moving or computing)
        if moving and not computing:
            found[next(name for name, kind in ORDER.items() if kind in running)] += 1
    return found


@st.composite
def span_lists(draw: st.DrawFn) -> list[Span]:
    spans = []
    for _ in range(draw(st.integers(1, 14))):
        post, start, end = sorted(draw(st.tuples(*[st.integers(0, 20)] * 3)))
        spans.append((draw(st.integers(0, 1)), draw(st.sampled_from(KINDS)), float(post), float(start), float(end)))
    return spans


@settings(max_examples=300, deadline=None)
@given(span_lists())
def test_equals_a_count_of_unit_cells(spans: list[Span]) -> None:
    timeline = timeline_of(spans, 2)
    for m in worker_metrics(timeline):
        expected = brute_force(spans, m.worker, timeline.step_s)
        found = {
            "compute": m.compute_s,
            "overlapped": m.overlapped_s,
            "exposed": m.exposed_s,
            "bubble": m.bubble_s,
            "wait": m.wait_s,
            **m.exposed_by_kind_s,
        }
        assert found == expected
        assert m.comm_s == expected["overlapped"] + expected["exposed"]
        assert m.stall_s == expected["exposed"] + expected["bubble"]
        assert m.exposed_tokens_s == expected["exposed"] - expected["grad_sync"]


def test_a_hand_made_step() -> None:
    # compute 0-4 and 6-7; dispatch 3-5 (posted at 1); grad sync 4-6; combine 9-10 (posted at 8); step 10.
    m = worker_metrics(
        timeline_of(
            [
                (0, Kind.ATTN, 0, 0, 4),
                (0, Kind.FFN, 4, 6, 7),
                (0, Kind.DISPATCH, 1, 3, 5),
                (0, Kind.GRAD_SYNC, 4, 4, 6),
                (0, Kind.COMBINE, 8, 9, 10),
            ]
        )
    )[0]
    assert (m.compute_s, m.overlapped_s, m.exposed_s, m.bubble_s, m.wait_s) == (5, 1, 3, 2, 1)
    assert m.exposed_by_kind_s == {"dispatch": 1, "combine": 1, "p2p": 0, "grad_sync": 1}
    assert (m.comm_s, m.stall_s, m.exposed_tokens_s) == (4, 5, 2)


def test_waiting_of_compute_is_bubble_but_not_wait() -> None:
    m = worker_metrics(timeline_of([(0, Kind.ATTN, 0, 5, 6)]))[0]
    assert (m.bubble_s, m.wait_s) == (5, 0)


def test_many_operations_of_no_duration_at_one_instant() -> None:
    spans: list[Span] = [(0, kind, 2, 2, 2) for kind in KINDS for _ in range(2000)]
    m = worker_metrics(timeline_of([*spans, (0, Kind.ATTN, 0, 0, 2), (0, Kind.COMBINE, 2, 2, 5)]))[0]
    assert (m.compute_s, m.exposed_s, m.bubble_s) == (2, 3, 0)
    assert m.exposed_by_kind_s["combine"] == 3


def test_a_worker_without_work_and_an_empty_program() -> None:
    idle = worker_metrics(timeline_of([(0, Kind.ATTN, 0, 0, 4)], 2))[1]
    assert (idle.compute_s, idle.bubble_s, idle.stall_s) == (0, 4, 4)
    assert worker_metrics(timeline_of([]))[0].step_s == 0


def test_unknown_posts_give_no_wait() -> None:
    nan = float("nan")
    known, unknown = worker_metrics(
        timeline_of([(0, Kind.ATTN, nan, 1, 2), (0, Kind.P2P, 0, 2, 3), (1, Kind.P2P, nan, 2, 3)], 2)
    )
    assert known.wait_s == 1  # posts of compute are not needed
    assert unknown.wait_s is None
    placement = Placement((Worker("a", "AF", 1, 1, 50.0), Worker("b", "AF", 1, 1, 50.0)), (0,), (0,), 0, 1)
    assert summarize((known, unknown), placement).mean.wait_s is None


@pytest.mark.parametrize(("start", "end"), [(-1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_impossible_intervals_are_refused(start: float, end: float) -> None:
    timeline = timeline_of([(0, Kind.ATTN, 0, 0, 1), (0, Kind.ATTN, 0, 0, 1)])
    timeline.start_s[1], timeline.end_s[1] = start, end
    with pytest.raises(AccountingError, match="need 0 <= start <= end"):
        worker_metrics(timeline)


def breakdown(worker: int, compute: float, exposed: float, bubble: float, grad: float = 0.0) -> WorkerMetrics:
    by_kind = {"dispatch": exposed - grad, "combine": 0.0, "p2p": 0.0, "grad_sync": grad}
    return WorkerMetrics(
        step_s=10.0,
        compute_s=compute,
        overlapped_s=1.0,
        exposed_s=exposed,
        bubble_s=bubble,
        wait_s=0.5,
        exposed_by_kind_s=by_kind,
        worker=worker,
    )


def test_the_summary_weights_by_gpus_and_keeps_the_pools_apart() -> None:
    workers = (Worker("A0", "A", 6, 1, 50.0), Worker("A1", "A", 6, 1, 50.0), Worker("F0", "F", 4, 1, 50.0))
    placement = Placement(workers, (0, 1), (2, 2), 0, 2)
    metrics = (breakdown(0, 8, 1, 1), breakdown(1, 6, 2, 2), breakdown(2, 4, 3, 3, grad=1.0))
    summary = summarize(metrics, placement)
    assert summary.mean.compute_s == pytest.approx((6 * 8 + 6 * 6 + 4 * 4) / 16)
    assert summary.mean.exposed_s == pytest.approx((6 + 12 + 12) / 16)
    assert summary.mean.exposed_by_kind_s["grad_sync"] == pytest.approx(4 / 16)
    assert summary.mean.exposed_tokens_s == pytest.approx((6 + 12 + 8) / 16)
    assert summary.mean.compute_s + summary.mean.exposed_s + summary.mean.bubble_s == pytest.approx(10, rel=1e-12)
    assert (summary.maximum.compute_s, summary.maximum.exposed_s) == (8, 3)
    assert sorted(summary.pools) == ["A", "F"]
    assert summary.pools["A"].compute_s == pytest.approx(7)
    assert summary.pools["F"].stall_s == pytest.approx(6)
    row = summary.as_row()
    assert row["stall_s"] == summary.mean.stall_s
    assert isinstance(row["pools"], dict)
    assert row["pools"]["F"]["exposed_by_kind_s"]["grad_sync"] == 1.0


def test_a_colocated_summary_has_no_pools() -> None:
    placement = Placement((Worker("w", "AF", 8, 1, 50.0),), (0,), (0,), 0, 0)
    summary = summarize((breakdown(0, 8, 1, 1),), placement)
    assert summary.pools == {}
    assert summary.as_row()["pools"] is None
    fields = {"compute_s", "overlapped_comm_s", "exposed_comm_s", "bubble_s", "wait_s", "stall_s", "exposed_by_kind_s"}
    assert set(summary.mean.as_row()) == fields


def test_a_placement_of_another_size_is_refused() -> None:
    placement = Placement((Worker("w", "AF", 8, 1, 50.0),), (0,), (0,), 0, 0)
    with pytest.raises(ValueError, match="2 workers were measured, but the placement has 1"):
        summarize((breakdown(0, 8, 1, 1), breakdown(1, 8, 1, 1)), placement)
