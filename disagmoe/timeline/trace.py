"""A Timeline as a trace for https://ui.perfetto.dev (Chrome JSON, gzipped).

Decides what a reader sees: one process per worker, one track per stream, one
slice per operation, one arrow per transfer from the sender to the receiver.
Times are whole nanoseconds, so slices of a track never overlap by rounding. The
same Timeline gives the same bytes.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import COMPUTE_KINDS, RECV_STREAMS, SEND_STREAMS, Kind, Op, Phase, Stream
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.plan.text import op_token
from disagmoe.timeline.streams import stream_words
from disagmoe.timeline.timeline import Timeline

Event = dict[str, object]
Long = NDArray[np.int64]

MAX_SLICES = 150_000
"""At some 270 bytes a slice and its share of arrows, a trace stays below 50 MB before compression."""


def write_trace(
    timeline: Timeline,
    layout: Layout | None,
    path: Path | str,
    title: str,
    *,
    window_s: tuple[float, float] | None = None,
    max_slices: int = MAX_SLICES,
) -> None:
    """Write `path` (usually *.json.gz).

    `layout` names the workers; None numbers them. Only operations that overlap
    `window_s` are written, and of those the first `max_slices` to start; the
    trace's "otherData" says how many of how many.
    """
    start, end = _nanoseconds(timeline.start_s), _nanoseconds(timeline.end_s)
    rows, note = _select(start, end, window_s, max_slices)
    about = {
        "title": title,
        "origin": timeline.origin,
        "step_s": timeline.step_s,
        "operations": f"{rows.shape[0]} of {len(timeline.program)} rows{note}",
    }
    events = itertools.chain(
        map(_json, _names(timeline.program, layout, title)),
        _slices(timeline, rows, start, end),
        _arrows(timeline.program, rows, start, end),
    )
    text = f'{{"displayTimeUnit":"ms","otherData":{_json(about)},"traceEvents":[{",".join(events)}]}}'
    # No file name and no time in the gzip header: equal traces are equal files.
    with Path(path).open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed:
        packed.write(text.encode("ascii"))


_KIND = {int(kind): kind.name for kind in Kind}
_PHASE = {int(phase): phase.name for phase in Phase}
_CATEGORY = {int(kind): "compute" if kind in COMPUTE_KINDS else "comm" for kind in Kind}


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def _nanoseconds(seconds: NDArray[np.float64]) -> Long:
    """Whole nanoseconds."""
    return np.rint(seconds * 1e9).astype(np.int64)


def _microseconds(nanoseconds: int) -> float:
    """The unit of Chrome traces; three decimals that print exactly."""
    return nanoseconds / 1000


def _select(start: Long, end: Long, window_s: tuple[float, float] | None, max_slices: int) -> tuple[Long, str]:
    """Rows to write, in storage order, and what the reader is told about the others."""
    keep = np.ones(start.shape[0], dtype=np.bool_)
    note = ""
    if window_s is not None:
        low, high = _nanoseconds(np.array(window_s))
        keep = (end >= low) & (start <= high)
        note = f", those between {window_s[0]} s and {window_s[1]} s"
    rows = np.flatnonzero(keep)
    if rows.shape[0] > max_slices:
        rows = np.sort(rows[np.argsort(start[rows], kind="stable")[:max_slices]])
        note += f", cut after the first {max_slices} to start"
    return rows.astype(np.int64), note


def _names(program: Program, layout: Layout | None, title: str) -> Iterator[Event]:
    """Names and order of processes (workers) and threads (streams)."""
    present = np.unique(program.worker.astype(np.int64) * len(Stream) + program.stream)
    streams = defaultdict(list)
    words = stream_words(program)
    for key in present:
        streams[int(key) // len(Stream)].append(Stream(int(key) % len(Stream)))
    for worker in range(program.n_workers):
        name = f"worker {worker}"
        if layout is not None:
            w = layout.placement.workers[worker]
            name = f"{w.name} ({w.gpus} GPUs)"
        yield _meta("process_name", worker, 0, name=name)
        yield _meta("process_labels", worker, 0, labels=title)
        yield _meta("process_sort_index", worker, 0, sort_index=worker)
        for stream in streams[worker]:
            yield _meta("thread_name", worker, int(stream), name=words[stream])
            yield _meta("thread_sort_index", worker, int(stream), sort_index=int(stream))


def _meta(what: str, worker: int, stream: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": worker + 1, "tid": stream + 1, "args": args}


def _slices(timeline: Timeline, rows: Long, start: Long, end: Long) -> Iterator[str]:
    """One complete event per row, as JSON."""
    program = timeline.program
    ops = _Columns(program, rows)
    waited = np.where(np.isfinite(timeline.post_s), timeline.start_s - timeline.post_s, 0.0)[rows]
    posted = _nanoseconds(np.where(waited > 0.0, timeline.post_s[rows], 0.0))
    begun, lasted = start[rows], end[rows] - start[rows]
    times = zip(begun.tolist(), lasted.tolist(), np.where(waited > 0.0, begun - posted, -1).tolist(), strict=True)
    peers, kinds, phases = ops.of("peer"), ops.of("kind"), ops.of("phase")
    names, layers, microbatches = ops.tokens(), ops.of("layer"), ops.of("microbatch")
    for i, (at, lasts, waits) in enumerate(times):
        more = f',"peer":{peers[i]}' if peers[i] >= 0 else ""
        if waits >= 0:
            more += f',"waited_us":{_microseconds(waits)}'
        yield (
            f'{{"ph":"X","name":"{names[i]}","cat":"{_CATEGORY[kinds[i]]}",{ops.places[i]},'
            f'"ts":{_microseconds(at)},"dur":{_microseconds(lasts)},'
            f'"args":{{"kind":"{_KIND[kinds[i]]}","phase":"{_PHASE[phases[i]]}",'
            f'"layer":{layers[i]},"microbatch":{microbatches[i]}{more}}}}}'
        )


class _Columns:
    """Columns of some rows as plain numbers, and where each row is drawn."""

    def __init__(self, program: Program, rows: Long) -> None:
        self.program = program
        self.rows = rows
        workers, streams = self.of("worker"), self.of("stream")
        self.places = [f'"pid":{w + 1},"tid":{s + 1}' for w, s in zip(workers, streams, strict=True)]

    def of(self, name: str) -> list[int]:
        values: list[int] = getattr(self.program, name)[self.rows].tolist()
        return values

    def tokens(self) -> list[str]:
        """`op_token` of every row."""
        head = ("kind", "layer", "phase", "microbatch", "chunk", "replica")
        named = cache(
            lambda kind, layer, phase, microbatch, chunk, replica: op_token(
                Op(Kind(kind), Phase(phase), layer, microbatch, chunk, replica)
            )
        )
        return [named(*key) for key in zip(*(self.of(name) for name in head), strict=True)]


def _arrows(program: Program, rows: Long, start: Long, end: Long) -> Iterator[str]:
    """A flow from the send slice to the receive slice of every transfer whose two ends are written, as JSON."""
    sides = (SEND_STREAMS, RECV_STREAMS)
    sends, receives = (rows[np.isin(program.stream[rows], sorted(int(s) for s in side))] for side in sides)
    sent, received = _Columns(program, sends), _Columns(program, receives)
    named = ("kind", "phase", "layer", "microbatch", "chunk", "replica")
    waiting: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, key in enumerate(zip(*(sent.of(name) for name in (*named, "worker", "peer")), strict=True)):
        waiting[key].append(i)
    kinds, starts = received.of("kind"), start[sends].tolist()
    # The arrow must end inside the receiving slice, hence one nanosecond before its end.
    ends = np.maximum(start[receives], end[receives] - 1).tolist()
    number = 0
    for i, key in enumerate(zip(*(received.of(name) for name in (*named, "peer", "worker")), strict=True)):
        found = waiting.get(key)
        if not found:
            continue
        send, number = found.pop(0), number + 1
        about = f'"name":"{_KIND[kinds[i]].lower()}","cat":"transfer","id":{number}'
        yield f'{{"ph":"s",{about},{sent.places[send]},"ts":{_microseconds(starts[send])}}}'
        yield f'{{"ph":"f",{about},{received.places[i]},"ts":{_microseconds(ends[i])},"bp":"e"}}'
