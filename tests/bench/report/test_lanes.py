"""What a Gantt shows of a program: workers, excerpt, lanes, boxes, shares."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report.classes import CLASSES, class_codes, communicates
from bench.report.lanes import (
    COMM_HEIGHT,
    COMPUTE_HEIGHT,
    MAX_WORKERS,
    Window,
    boxes,
    excerpt,
    lay_lanes,
    occupancy,
    shown_workers,
)
from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.program import Program, Row
from disagmoe.timeline.timeline import Timeline

from .sample import layout, pipeline


def timeline(rows: list[tuple[Row, float, float]], workers: int = 1) -> Timeline:
    """A timeline of rows given in storage order (by worker and stream)."""
    program = Program.from_rows([row for row, _, _ in rows], n_workers=workers, n_layers=1, n_microbatches=999)
    start, end = (np.array([times[i] for times in rows], dtype=float) for i in (1, 2))
    return Timeline(program, start, end, start)


def compute(phase: Phase, start: float, end: float, stream: Stream = Stream.COMPUTE) -> tuple[Row, float, float]:
    return Row(0, stream, Op(Kind.ATTN, phase, 0, int(start))), start, end


def test_pairs_of_a_ring_stand_together() -> None:
    placement = layout(("A",) * 3 + ("F",) * 3).placement
    assert shown_workers(placement) == [0, 3, 1, 4, 2, 5]


def test_uneven_pools_keep_every_worker() -> None:
    assert shown_workers(layout(("A", "A", "A", "F")).placement) == [0, 3, 1, 2]


@pytest.mark.parametrize("depth", [8, 9, 30, 94])
def test_long_rings_are_thinned_evenly(depth: int) -> None:
    shown = shown_workers(layout(("A",) * depth + ("F",) * depth).placement)
    assert len(shown) == MAX_WORKERS
    assert shown[:2] == [0, depth]
    assert shown[-2:] == [depth - 1, 2 * depth - 1]
    assert all(f - a == depth for a, f in zip(shown[::2], shown[1::2], strict=True))


def test_short_steps_are_shown_whole() -> None:
    assert excerpt(pipeline(4, 2), slots=60) == Window(0.0, 2 * 4 * 0.007)


def test_a_program_without_layers_is_shown_whole() -> None:
    only = timeline([(Row(0, Stream.COMPUTE, Op(Kind.OPTIM, Phase.F)), 0.0, 2.0)])
    assert excerpt(only, slots=1) == Window(0.0, 2.0)


def test_excerpt_lies_where_both_passes_run() -> None:
    """100 forwards, then 10 forward/backward pairs from 100 s to 120 s, then 100 backwards: the pairs are shown."""
    rows = [compute(Phase.F, t, t + 1.0) for t in range(100)]
    rows += [compute(Phase.F if t % 2 == 0 else Phase.B, 100.0 + t, 101.0 + t) for t in range(20)]
    rows += [compute(Phase.B, t, t + 1.0) for t in range(120, 220)]
    window = excerpt(timeline(rows), slots=10)
    assert window.end_s - window.start_s == pytest.approx(10.0)
    assert window.start_s >= 99.0
    assert window.end_s <= 121.0


def test_chunks_of_an_operation_count_together() -> None:
    """Operations of one second in four chunks: ten of them are ten seconds."""
    rows = [
        (Row(0, Stream.COMPUTE, Op(Kind.FFN, Phase.F, 0, t, chunk)), t + chunk / 4, t + (chunk + 1) / 4)
        for t in range(100)
        for chunk in range(4)
    ]
    window = excerpt(timeline(rows), slots=10)
    assert window.end_s - window.start_s == pytest.approx(10.0)


def test_chosen_workers_stay_in_the_order_of_the_picture() -> None:
    placement = layout(("A",) * 3 + ("F",) * 3).placement
    assert shown_workers(placement, [5, 0, 3]) == [0, 3, 5]


def test_excerpt_without_backward_is_the_busiest() -> None:
    rows = [compute(Phase.F, t * 10.0, t * 10.0 + 1.0) for t in range(10)]
    rows += [compute(Phase.F, 100.0 + t, 101.0 + t) for t in range(10)]
    assert excerpt(timeline(rows), slots=5).start_s >= 95.0


def test_lanes_follow_what_runs_in_the_window() -> None:
    run = pipeline(2, 30)
    lanes = lay_lanes(run, [0, 1], Window(0.0, 0.0065))  # worker 1 has not started
    assert [(lane.worker, lane.stream) for lane in lanes] == [
        (0, Stream.COMPUTE),
        (0, Stream.COLL),
        (1, Stream.COMPUTE),
    ]
    assert [lane.height for lane in lanes] == [COMPUTE_HEIGHT, COMM_HEIGHT, COMPUTE_HEIGHT]
    for upper, lower in pairwise(lanes):
        assert lower.top >= upper.top + upper.height


def test_boxes_are_clipped_and_lie_in_their_lane() -> None:
    run = pipeline(2, 30)
    window = Window(0.001, 0.005)
    lanes = lay_lanes(run, [0], window)
    found = boxes(run, lanes, window)
    spans = {(int(run.program.phase[r]), int(run.program.kind[r])): i for i, r in enumerate(found.row)}
    assert len(found.row) == 3
    forward = spans[Phase.F, Kind.ATTN]
    assert (found.left_s[forward], found.right_s[forward]) == (0.001, 0.002)
    assert found.right_s[spans[Phase.B, Kind.ATTN]] == 0.005
    assert found.top[spans[Phase.F, Kind.DISPATCH]] == lanes[1].top


def test_occupancy_by_hand() -> None:
    """4 s in 4 bins: forward 0-1.5 s, backward 2-3 s, idle, and communication that does not count."""
    run = timeline(
        [
            compute(Phase.F, 0.0, 1.5),
            compute(Phase.B, 2.0, 3.0),
            (Row(0, Stream.COLL, Op(Kind.DISPATCH, Phase.F, 0, 0)), 1.5, 4.0),
        ]
    )
    codes = class_codes(run.program)
    share = occupancy(run, [0], codes, len(CLASSES), bins=4)[0]
    assert share[:, codes[0]] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert share[:, codes[1]] == pytest.approx([0.0, 0.0, 1.0, 0.0])
    assert share.sum() == pytest.approx(2.5)


def test_two_full_compute_streams_share_one_row() -> None:
    run = timeline([compute(Phase.F, 0.0, 1.0), compute(Phase.B, 0.0, 1.0, Stream.COMPUTE_B)])
    share = occupancy(run, [0], class_codes(run.program), len(CLASSES), bins=2)
    assert share.sum(axis=2) == pytest.approx(np.ones((1, 2)))


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), min_size=1, max_size=20),
    st.integers(1, 50),
)
def test_occupancy_keeps_the_total_of_one_stream(gaps: list[tuple[int, int]], bins: int) -> None:
    rows, clock = [], 0.0
    for gap, length in gaps:
        rows.append(compute(Phase.F, clock + gap, clock + gap + length))
        clock += gap + length
    run = timeline(rows)
    share = occupancy(run, [0], class_codes(run.program), len(CLASSES), bins)
    assert share.sum() * run.step_s / bins == pytest.approx(sum(length for _, length in gaps))
    assert share.min() >= -1e-9


def test_every_operation_has_a_class() -> None:
    rows = [Row(0, Stream.COMPUTE, Op(kind, phase)) for kind in Kind for phase in Phase]
    program = Program.from_rows(rows, n_workers=1, n_layers=1, n_microbatches=1)
    labels = [CLASSES[code].label for code in class_codes(program)]
    named = {(Kind(k), Phase(p)): label for k, p, label in zip(program.kind, program.phase, labels, strict=True)}
    assert named[Kind.ATTN, Phase.F] == "forward: attention"
    assert named[Kind.FFN, Phase.W] == "weight gradient: FFN"
    assert named[Kind.DISPATCH, Phase.R] == "dispatch"
    assert named[Kind.OPTIM, Phase.F] == "optimizer"
    moves = {"DISPATCH", "COMBINE", "P2P", "GRAD_SYNC"}
    assert communicates(program).tolist() == [Kind(k).name in moves for k in program.kind]
