"""A Timeline as a trace for https://ui.perfetto.dev (Chrome JSON, gzipped).

Decides what a reader sees: one process per worker, one track per stream, one
slice per operation, one arrow per transfer from the sender to the receiver.
Times are whole nanoseconds, so slices of a track never overlap by rounding. The
same Timeline gives the same bytes.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import COMPUTE_KINDS, RECV_STREAMS, SEND_STREAMS, Stream
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
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "title": title,
            "origin": timeline.origin,
            "step_s": timeline.step_s,
            "operations": f"{rows.shape[0]} of {len(timeline.program)} rows{note}",
        },
        "traceEvents": [
            *_names(timeline.program, layout, title),
            *_slices(timeline, rows, start, end),
            *_arrows(timeline.program, rows, start, end),
        ],
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    # No file name and no time in the gzip header: equal traces are equal files.
    with Path(path).open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed:
        packed.write(text.encode("ascii"))


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


def _slices(timeline: Timeline, rows: Long, start: Long, end: Long) -> Iterator[Event]:
    """One complete event per row."""
    program = timeline.program
    post = timeline.post_s
    for row in rows.tolist():
        op = program.op(row)
        args: dict[str, object] = {
            "kind": op.kind.name,
            "phase": op.phase.name,
            "layer": op.layer,
            "microbatch": op.microbatch,
        }
        if program.peer[row] >= 0:
            args["peer"] = int(program.peer[row])
        if np.isfinite(post[row]) and timeline.start_s[row] > post[row]:
            args["waited_us"] = _microseconds(int(start[row] - np.rint(post[row] * 1e9)))
        yield {
            "ph": "X",
            "name": op_token(op),
            "cat": "compute" if op.kind in COMPUTE_KINDS else "comm",
            "pid": int(program.worker[row]) + 1,
            "tid": int(program.stream[row]) + 1,
            "ts": _microseconds(int(start[row])),
            "dur": _microseconds(int(end[row] - start[row])),
            "args": args,
        }


def _arrows(program: Program, rows: Long, start: Long, end: Long) -> Iterator[Event]:
    """A flow from the send slice to the receive slice of every transfer whose two ends are written."""
    waiting: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for row in rows[np.isin(program.stream[rows], sorted(SEND_STREAMS))].tolist():
        waiting[program.op(row), int(program.worker[row]), int(program.peer[row])].append(row)
    receives = rows[np.isin(program.stream[rows], sorted(RECV_STREAMS))].tolist()
    number = 0
    for receive in receives:
        sends = waiting.get((program.op(receive), int(program.peer[receive]), int(program.worker[receive])))
        if not sends:
            continue
        send, number = sends.pop(0), number + 1
        # The arrow must end inside the receiving slice, hence one nanosecond before its end.
        ends = max(int(start[receive]), int(end[receive]) - 1)
        for phase, row, at in (("s", send, int(start[send])), ("f", receive, ends)):
            event: Event = {
                "ph": phase,
                "name": program.op(row).kind.name.lower(),
                "cat": "transfer",
                "id": number,
                "pid": int(program.worker[row]) + 1,
                "tid": int(program.stream[row]) + 1,
                "ts": _microseconds(at),
            }
            if phase == "f":
                event["bp"] = "e"
            yield event
