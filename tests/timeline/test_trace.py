"""The Perfetto trace: strict JSON, disjoint slices, one arrow per transfer, equal bytes."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.plan import Batch, Layout, Placement, Worker
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program, Row
from disagmoe.simulator import simulate
from disagmoe.timeline.timeline import Timeline
from disagmoe.timeline.trace import MAX_SLICES, write_trace


def ping(n: int, seconds: float = 1 / 3) -> Timeline:
    """Worker 0 computes and sends n micro-batches to worker 1, which computes; nothing of it divides into µs."""
    rows = []
    for i in range(n):
        rows += [
            Row(0, Stream.COMPUTE, Op(Kind.ATTN, Phase.F, 0, i)),
            Row(0, Stream.SEND, Op(Kind.DISPATCH, Phase.F, 0, i), peer=1),
            Row(1, Stream.RECV, Op(Kind.DISPATCH, Phase.F, 0, i), peer=0),
            Row(1, Stream.COMPUTE, Op(Kind.FFN, Phase.F, 0, i)),
        ]
    program = Program.from_rows(rows, n_workers=2, n_layers=1, n_microbatches=n)
    return simulate(program, Pricing.ideal(np.where(program.kind == int(Kind.FFN), 1.7, 1.0) * seconds))


def layout() -> Layout:
    workers = (Worker("A0", "A", 8, 1, 50.0), Worker("F0", "F", 16, 2, 25.0))
    return Layout(
        "disagmoe", "", Placement(workers, (0,), (1,), 0, 1), Batch(1, 1, 8), ep=16, transport="m2n_rdma", merge="node"
    )


def read(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(gzip.decompress(path.read_bytes()), parse_constant=refuse)
    assert isinstance(document, dict)
    return document


def events(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["ph"] == phase]


def test_slices_names_and_arrows(tmp_path: Path) -> None:
    timeline = ping(5)
    write_trace(timeline, layout(), tmp_path / "t.json.gz", "qwen3 32k")
    document = read(tmp_path / "t.json.gz")
    slices = events(document, "X")
    assert len(slices) == len(timeline.program) == 20
    first = next(e for e in slices if e["name"] == "A0F1")
    assert (first["ts"], first["dur"], first["cat"]) == (333333.333, 333333.334, "compute")  # ns: 333333333-666666667
    assert {e["cat"] for e in slices if e["name"].startswith("D")} == {"comm"}

    meta = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events(document, "M")}
    assert meta["process_name", 1, 1] == {"name": "A0 (8 GPUs)"}
    assert meta["process_name", 2, 1] == {"name": "F0 (16 GPUs)"}
    assert {args["name"] for (what, pid, _), args in meta.items() if (what, pid) == ("thread_name", 2)} == {
        "compute",
        "receive",
    }
    starts, ends = events(document, "s"), events(document, "f")
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == [1, 2, 3, 4, 5]
    assert {(e["pid"], e["bp"]) for e in ends} == {(2, "e")}
    by_track = {(e["pid"], e["tid"], e["name"]): e for e in slices}
    for i, (s, f) in enumerate(zip(starts, ends, strict=True)):
        sent = by_track[s["pid"], s["tid"], f"D0F{i}"]
        received = by_track[f["pid"], f["tid"], f"D0F{i}"]
        assert s["ts"] == sent["ts"]
        assert received["ts"] <= f["ts"] < received["ts"] + received["dur"]


def test_the_header_says_what_it_is(tmp_path: Path) -> None:
    write_trace(ping(2), None, tmp_path / "t.json.gz", "two")
    document = read(tmp_path / "t.json.gz")
    other = document["otherData"]
    assert (other["title"], other["origin"], other["operations"]) == ("two", "simulated", "8 of 8 rows")
    assert {e["args"]["name"] for e in events(document, "M") if e["name"] == "process_name"} == {"worker 0", "worker 1"}


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 30), seconds=st.floats(1e-8, 50.0))
def test_slices_of_a_track_are_disjoint_and_ids_small(
    tmp_path_factory: pytest.TempPathFactory, n: int, seconds: float
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.json.gz"
    write_trace(ping(n, seconds), None, path, "t")
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for e in events(read(path), "X"):
        assert isinstance(e["pid"], int)
        assert 0 < e["pid"] < 100
        assert 0 < e["tid"] < 100
        tracks[e["pid"], e["tid"]].append((round(e["ts"] * 1000), round(e["dur"] * 1000)))
    for spans in tracks.values():
        spans.sort()
        assert all(a + b <= c for (a, b), (c, _) in pairwise(spans))


def test_equal_timelines_are_equal_files(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        write_trace(ping(9), layout(), tmp_path / name, "t")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_the_largest_trace_is_below_50_mb(tmp_path: Path) -> None:
    """A step of as many slices as are written at most, a third of it transfers with arrows, as a ring has."""
    n = 2000
    rows = []
    for i in range(n):
        rows += [
            Row(0, Stream.COMPUTE, Op(Kind.ATTN, Phase.B, 93, 500 + i)),
            Row(0, Stream.SEND, Op(Kind.DISPATCH, Phase.B, 93, 500 + i), peer=1),
            Row(1, Stream.RECV, Op(Kind.DISPATCH, Phase.B, 93, 500 + i), peer=0),
        ]
    program = Program.from_rows(rows, n_workers=2, n_layers=94, n_microbatches=500 + n)
    start = 123.456789012 + np.arange(len(program)) * 0.012345678
    path = tmp_path / "trace.json.gz"
    write_trace(
        Timeline(program, start, start + 0.012345678, start - 0.011111111), layout(), path, "comet, native view"
    )
    one = len(gzip.decompress(path.read_bytes())) / len(program)
    assert one * MAX_SLICES < 50e6


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    write_trace(ping(50, 1.0), None, path, "t", max_slices=10)
    document = read(path)
    assert document["otherData"]["operations"] == "10 of 200 rows, cut after the first 10 to start"
    kept = events(document, "X")
    assert len(kept) == 10
    assert max(e["ts"] for e in kept) <= 5e6
    assert len(events(document, "s")) == len(events(document, "f"))

    write_trace(ping(50, 1.0), None, path, "t", window_s=(10.0, 12.5))
    document = read(path)
    assert "those between 10.0 s and 12.5 s" in document["otherData"]["operations"]
    assert all(e["ts"] <= 12.5e6 and e["ts"] + e["dur"] >= 10e6 for e in events(document, "X"))
