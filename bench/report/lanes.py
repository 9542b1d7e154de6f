"""Decides what a Gantt shows of a long program: which workers, which excerpt of the step, and where each lane lies.

Geometry only; nothing here knows matplotlib. Heights are in units of one
compute lane, y grows downwards, times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.report.classes import communicates
from disagmoe.ops import COMPUTE_STREAMS, Kind, Phase, Stream
from disagmoe.plan.plan import Placement
from disagmoe.timeline.timeline import Timeline

FloatArray = NDArray[np.float64]

MAX_WORKERS = 16
WINDOW_STARTS = 401
"""Places at which an excerpt may begin."""
COMPUTE_HEIGHT, COMM_HEIGHT, WORKER_GAP = 1.0, 0.42, 0.45
LANE_ORDER = (
    *(Stream.COMPUTE, Stream.COMPUTE_B, Stream.COLL, Stream.SEND, Stream.RECV),
    *(Stream.SEND_B, Stream.RECV_B, Stream.NVLINK, Stream.SYNC),
)


@dataclass(frozen=True)
class Lane:
    """One stream of one worker as a strip of the picture."""

    worker: int
    stream: Stream
    top: float
    height: float

    @property
    def computes(self) -> bool:
        return self.stream in COMPUTE_STREAMS


@dataclass(frozen=True)
class Window:
    """The excerpt shown, in seconds from the step's start."""

    start_s: float
    end_s: float

    def touches(self, timeline: Timeline) -> NDArray[np.bool_]:
        """Rows of which a part lies inside. Shape [rows]."""
        inside: NDArray[np.bool_] = (timeline.end_s > self.start_s) & (timeline.start_s < self.end_s)
        return inside


def shown_workers(placement: Placement, chosen: Sequence[int] = ()) -> list[int]:
    """The chosen workers, by default at most MAX_WORKERS spread over the ring; A and F of one position side by side."""
    pools: dict[str, list[int]] = {}
    for index, worker in enumerate(placement.workers):
        pools.setdefault(worker.pool, []).append(index)
    depth = max(map(len, pools.values()))
    if chosen:
        aside = [members[at] for at in range(depth) for members in pools.values() if at < len(members)]
        return [worker for worker in aside if worker in chosen]
    kept = min(depth, max(1, MAX_WORKERS // len(pools)))
    positions = np.unique(np.linspace(0, depth - 1, kept).round().astype(int))
    return [members[at] for at in positions for members in pools.values() if at < len(members)]


def excerpt(timeline: Timeline, slots: int) -> Window:
    """About `slots` typical compute operations, where forward and backward are most evenly mixed.

    Chunks of one operation count together. The same rule for every system: of evenly spaced starts, the one that
    maximises (busy forward time) × (busy backward time) over all workers, the
    earliest of equals. A step hardly longer than the excerpt is shown whole.
    """
    program, step = timeline.program, timeline.step_s
    layered = np.isin(program.kind, (Kind.ATTN, Kind.FFN, Kind.STAGE)) & (timeline.end_s > timeline.start_s)
    if not layered.any():
        return Window(0.0, step)
    width = _typical_s(timeline, layered) * slots
    if width >= 0.75 * step:
        return Window(0.0, step)
    starts = np.linspace(0.0, step - width, WINDOW_STARTS)
    forward = layered & (program.phase == Phase.F)
    busy = [_busy_within(timeline, rows, starts, width) for rows in (forward, layered & ~forward)]
    score = busy[0] * busy[1]
    start = float(starts[np.argmax(score if score.any() else busy[0] + busy[1])])
    return Window(start, start + width)


def _typical_s(timeline: Timeline, rows: NDArray[np.bool_]) -> float:
    """Median time of an operation, its chunks added up."""
    program = timeline.program
    parts = (program.worker, program.replica, program.microbatch, program.layer, program.phase, program.kind)
    _, operation = np.unique(np.stack(parts)[:, rows], axis=1, return_inverse=True)
    return float(np.median(np.bincount(operation.ravel(), weights=(timeline.end_s - timeline.start_s)[rows])))


def _busy_within(timeline: Timeline, rows: NDArray[np.bool_], starts: FloatArray, width: float) -> FloatArray:
    """Seconds that the chosen rows run inside each window, summed over workers; rounded so that equals stay equal."""
    at_s = np.concatenate((starts, starts + width))
    busy = _busy_until(timeline.start_s[rows], timeline.end_s[rows], at_s)
    return np.round((busy[len(starts) :] - busy[: len(starts)]) / width, 9)


def lay_lanes(timeline: Timeline, workers: list[int], window: Window) -> list[Lane]:
    """Strips of the shown workers from top to bottom: streams that do something in the window, compute always."""
    visible = window.touches(timeline)
    program = timeline.program
    used = {(int(w), int(s)) for w, s in np.unique(np.stack((program.worker, program.stream))[:, visible], axis=1).T}
    lanes, top = [], 0.0
    for worker in workers:
        for stream in LANE_ORDER:
            if stream is Stream.COMPUTE or (worker, int(stream)) in used:
                height = COMPUTE_HEIGHT if stream in COMPUTE_STREAMS else COMM_HEIGHT
                lanes.append(Lane(worker, stream, top, height))
                top += height
        top += WORKER_GAP
    return lanes


@dataclass(frozen=True, eq=False)
class Boxes:
    """Visible rows as rectangles, clipped to the window: all arrays have shape [boxes]."""

    row: NDArray[np.intp]
    left_s: FloatArray
    right_s: FloatArray
    top: FloatArray
    height: FloatArray


def boxes(timeline: Timeline, lanes: list[Lane], window: Window) -> Boxes:
    """Rectangles of every operation that the lanes and the window show."""
    program = timeline.program
    top = np.full((program.n_workers, len(Stream)), np.nan)
    height = np.zeros_like(top)
    for lane in lanes:
        top[lane.worker, lane.stream], height[lane.worker, lane.stream] = lane.top, lane.height
    y = top[program.worker, program.stream]
    row = np.flatnonzero(window.touches(timeline) & ~np.isnan(y) & (timeline.end_s > timeline.start_s))
    return Boxes(
        row=row,
        left_s=np.maximum(timeline.start_s[row], window.start_s),
        right_s=np.minimum(timeline.end_s[row], window.end_s),
        top=y[row],
        height=height[program.worker, program.stream][row],
    )


def occupancy(
    timeline: Timeline, workers: list[int], codes: NDArray[np.int64], n_classes: int, bins: int
) -> FloatArray:
    """Share of time that each worker computes in each class, per bin of the whole step. Shape [workers, bins, classes].

    Two compute streams that run side by side are scaled to a sum of at most 1.
    """
    edges = np.linspace(0.0, timeline.step_s, bins + 1)
    share = np.zeros((len(workers), bins, n_classes))
    computes = ~communicates(timeline.program)
    for line, worker in enumerate(workers):
        mine = computes & (timeline.program.worker == worker)
        for code in np.unique(codes[mine]):
            rows = mine & (codes == code)
            share[line, :, code] = np.diff(_busy_until(timeline.start_s[rows], timeline.end_s[rows], edges))
    share /= max(timeline.step_s / bins, 1e-300)
    total: FloatArray = share.sum(axis=2, keepdims=True)
    return share / np.maximum(total, 1.0)


def _busy_until(start_s: FloatArray, end_s: FloatArray, at_s: FloatArray) -> FloatArray:
    """Seconds of all intervals that lie before each time: the integral of how many are running."""
    return _ramp(start_s, at_s) - _ramp(end_s, at_s)


def _ramp(from_s: FloatArray, at_s: FloatArray) -> FloatArray:
    """Sum of max(0, at - from) over all `from`, for each `at`."""
    ordered = np.sort(from_s)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    before = np.searchsorted(ordered, at_s, side="right")
    ramp: FloatArray = before * at_s - sums[before]
    return ramp
