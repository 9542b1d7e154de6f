"""The measured Timeline: what several ranks ran, as one record that metrics and traces accept."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.plan import Placement, Worker
from disagmoe.plan.program import Program, Row
from disagmoe.runtime.child import Context
from disagmoe.runtime.groups import RankMap
from disagmoe.runtime.measured import gather_timeline, timeline_of
from disagmoe.runtime.step import StepRunner
from disagmoe.timeline.metrics import summarize, worker_metrics
from disagmoe.timeline.timeline import Timeline
from disagmoe.train.plan import RingShape
from tests.runtime.conftest import Pools
from tests.runtime.trainer_cases import Run, train
from tests.runtime.training_cases import Case

DISPATCH = Op(Kind.DISPATCH, Phase.F, 0, 0)
TWO = Placement((Worker("A0", "A", 2, 1, 1.0), Worker("F0", "F", 1, 1, 1.0)), attn=(0,), ffn=(1,), embed=0, head=1)
PROGRAM = Program.from_rows(
    [
        Row(0, Stream.COMPUTE, Op(Kind.ATTN, Phase.F, 0, 0)),
        Row(0, Stream.SEND, DISPATCH, peer=1),
        Row(0, Stream.SYNC, Op(Kind.GRAD_SYNC, Phase.B, 0)),
        Row(1, Stream.COMPUTE, Op(Kind.FFN, Phase.F, 0, 0)),
        Row(1, Stream.RECV, DISPATCH, peer=0),
    ],
    n_workers=2,
    n_layers=1,
    n_microbatches=1,
)


def test_ranks_become_workers_and_waits_are_told_from_transfers() -> None:
    moments = np.full((3, 5, 3), np.nan)
    moments[0, :3] = [[0, 0, 4], [4, 4, 9], [9, 9, 14]]  # post, start, end of rank 0 (A0)
    moments[1, :3] = [[0, 0, 6], [6, 6, 9], [11, 11, 14]]  # rank 1 (A0) is slower
    moments[2, 3:] = [[9, 9, 12], [1, 1, 9]]  # the receiver is ready early
    timeline = timeline_of(PROGRAM, RankMap(TWO, 1), moments)
    assert timeline.origin == "measured"
    assert timeline.post_s.tolist() == [0, 5, 10, 9, 1]
    # Each sender starts when it is ready itself (the receiver was), the receiver when the later sender is.
    assert timeline.start_s.tolist() == [0, 5, 11, 9, 6]
    assert timeline.end_s.tolist() == [5, 9, 14, 12, 9]


def test_a_step_of_a_ring_gives_a_sound_timeline(pools: Pools) -> None:
    case = Case(m=2, n=2, layers=3, sequences=8, microbatches=4, streams=2)
    timeline = pools(4).run(_timeline, case)[0]
    assert timeline is not None
    program = case.plan.program
    timeline = replace(timeline, program=program)
    assert np.isfinite(timeline.start_s).all()
    assert (timeline.post_s <= timeline.start_s).all() and (timeline.start_s <= timeline.end_s).all()
    for worker in range(program.n_workers):
        for stream in Stream:
            rows = program.stream_rows(worker, stream)
            assert (timeline.start_s[rows][1:] >= timeline.end_s[rows][:-1] - 1e-9).all()
    summary = summarize(worker_metrics(timeline), case.plan.layout.placement)
    assert set(summary.pools) == {"A", "F"}
    mean = summary.mean
    assert mean.step_s == pytest.approx(mean.compute_s + mean.exposed_s + mean.bubble_s)
    assert mean.compute_s > 0 and mean.wait_s is not None


def _timeline(context: Context, case: Case) -> Timeline | None:
    tokens = case.tokens()
    with StepRunner(context, case.plan, case.model, case.cut, case.options) as runner:
        record = runner.step(lambda wanted: tokens[wanted.start : wanted.stop]).record
        return gather_timeline(case.plan.program, runner.site.groups.ranks, record, 0.0)


def test_a_run_leaves_metrics_and_a_trace(pools: Pools, tmp_path: Path) -> None:
    run = Run(shape=RingShape(n=2), folder=tmp_path, show_every=2, peak_device="laptop")
    ran = pools(3).run(train, run)[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["exposed_comm_s"] is not None for line in lines] == [False, True, True]
    assert [line["loss"] for line in lines] == ran.losses
    for line in lines:
        assert line["tokens"] == run.batch * run.seq
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_s"])
        assert 0 < line["mfu"] < 1
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert trace["otherData"]["origin"] == "measured"
    assert {event["args"]["kind"] for event in trace["traceEvents"] if event["ph"] == "X"} >= {
        "ATTN",
        "DISPATCH",
        "OPTIM",
    }
