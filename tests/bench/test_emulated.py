"""Rows of emulated cuts: what they say, and what becomes of a system whose ranks fail."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench.emulated
import bench.emulation
from bench.cli import main
from bench.config import RunConfig
from bench.cut import CutPlan
from bench.emulated import cut_of
from bench.emulation import Ran, pace_of, run_cut, without_overlap
from bench.evaluate import cost_model, evaluate, run_system
from bench.identity import identify
from bench.report import print_tables
from bench.results import assemble, failed_rows, text_of
from disagmoe.runtime.child import Context
from disagmoe.runtime.emulate import EmulatedStep, Emulation, emulate
from disagmoe.runtime.errors import RankError
from disagmoe.runtime.pacing import Pace
from disagmoe.simulator import simulate
from tests.bench.helpers import config

SLOWER = 1.25
"""What the stand-in below makes of a simulated step."""


def emulated(**changes: Any) -> RunConfig:
    return config(backend="emulate", systems="dualpipe_v,disagmoe", **changes)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> list[CutPlan]:
    """Cuts that were run, by a stand-in that starts no process and is a quarter slower than the simulator."""
    seen: list[CutPlan] = []

    def run(cut: CutPlan, processes: int, repeats: int, **options: Any) -> Ran:
        seen.append(cut)
        timeline = simulate(cut.plan.program, cut.pricing)
        slow = replace(
            *(timeline,),
            **{name: SLOWER * getattr(timeline, name) for name in ("start_s", "end_s", "post_s")},
            origin="emulated",
        )
        slower = replace(slow, end_s=1.1 * slow.end_s)
        steps = [EmulatedStep(t, 3.0, 0.0, 0.0, 0.5, None) for t in (slower, slow, slower)]
        return Ran(cut, Pace(2.0, 1e-6), timeline, steps)

    monkeypatch.setattr(bench.emulated, "run_cut", run)
    return seen


def test_a_row_is_the_best_repeat_beside_the_simulation_of_the_same_cut(no_processes: list[CutPlan]) -> None:
    found = evaluate(emulated())
    assert [row["status"] for row in found.rows] == ["ok"] * 3
    assert found.layers == 4  # the tiny model is no deeper
    assert found.execution["processes"] == 4
    for row, outcome, cut in zip(found.rows, found.outcomes, no_processes, strict=True):
        assert row["step_time_s"] == pytest.approx(SLOWER * row["simulated"]["step_time_s"])
        assert (row["repeats"], row["microbatches"], row["peak_memory_gib"]) == (3, 8, None)
        assert row["spread"] == pytest.approx(0.1)
        parts = row["compute_s"] + row["exposed_comm_s"] + row["bubble_s"]
        assert parts == pytest.approx(row["step_time_s"])
        assert row["tokens_per_s_per_gpu"] == pytest.approx(cut.sequences * 512 / cut.gpus / row["step_time_s"])
        assert outcome.timeline is not None
        assert outcome.timeline.origin == "emulated"
        assert outcome.layout is cut.plan.layout


def test_speed_ups_count_gpus_and_tokens_not_seconds(no_processes: list[CutPlan]) -> None:
    rows = evaluate(emulated()).rows
    reference = rows[0]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["tokens_per_s_per_gpu"] / reference["tokens_per_s_per_gpu"])
    own = rows[-1]
    per_token = [row["stall_s"] / row["step_time_s"] / row["tokens_per_s_per_gpu"] for row in (own, reference)]
    assert reference["stall_reduction"] == pytest.approx(1.0 - per_token[0] / per_token[1])


def test_the_record_is_valid_and_says_that_it_is_emulated(
    no_processes: list[CutPlan], capsys: pytest.CaptureFixture[str]
) -> None:
    run = emulated()
    record = assemble(run, identify(run), ("bench",), evaluate(run)) | {"paper": []}
    assert json.loads(text_of(record))["execution"]["microbatches"] == 8
    print_tables(record)
    said = " ".join(capsys.readouterr().out.split())
    assert "emulated on 4 processes at the pace of laptop (calibration laptop)" in said
    assert "4 of 4 layers, emulated" in said
    assert "Emulated beside the simulation of the same cut" in said
    assert "1.250" in said


def test_a_system_whose_ranks_fail_leaves_the_others_alone(
    no_processes: list[CutPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench.emulated.run_cut

    def fail(cut: CutPlan, *arguments: Any) -> Ran:
        if cut.full.system == "dualpipe_v":
            raise RankError(1, 4, "was killed by signal 9 (SIGKILL)")
        return run(cut, *arguments)

    monkeypatch.setattr(bench.emulated, "run_cut", fail)
    configuration = emulated()
    found = evaluate(configuration)
    assert [row["status"] for row in found.rows] == ["ok", "failed", "ok"]
    assert found.rows[1]["reason"] == "RankError: rank 1 of 4 was killed by signal 9 (SIGKILL)"
    record = assemble(configuration, identify(configuration), ("bench",), found) | {"paper": []}
    assert len(failed_rows(json.loads(text_of(record)))) == 1


def test_what_does_not_fit_is_cut_from_the_plan_that_needs_least(no_processes: list[CutPlan]) -> None:
    tight = emulated(seq=4096, batch=4096)
    small = replace(tight, cluster=replace(tight.cluster, memory_gib=2.0), systems=("megatron_1f1b",))
    found = evaluate(small)
    (row,) = found.rows
    assert row["status"] == "ok"
    assert row["plan"]["needs_gib"] > small.cluster.limit_gib
    (note,) = [note for note in found.notes if "out of memory" in note]
    assert "megatron_1f1b (needs" in note


def cut(name: str) -> CutPlan:
    run = emulated()
    costs = cost_model(run)
    ((row, outcome),) = run_system(run, costs, name, "native")
    found = cut_of(run, costs, row, outcome, 4)
    assert found is not None
    return found


def test_the_pace_lets_the_smallest_exchange_and_the_host_have_their_time() -> None:
    found = cut("megatron_1f1b")
    smallest = found.smallest_exchange_s
    assert smallest is not None
    fast = pace_of(found, simulated_step_s=1e6, processes=4, cores=2)
    assert fast.dilation * smallest == pytest.approx(5e-3)
    assert fast.slack_s == pytest.approx(smallest / 4)
    assert pace_of(found, 1e6, processes=8, cores=2).dilation * smallest == pytest.approx(10e-3)
    rows = 2 * len(found.plan.program)  # two ranks per worker
    slow = pace_of(found, simulated_step_s=1e-3, processes=4, cores=2)
    assert slow.dilation * 1e-3 == pytest.approx(rows * 1.4e-3 / (0.4 * 2))


def test_the_control_simulates_slower() -> None:
    found = cut("disagmoe")
    blocked = without_overlap(found)
    assert simulate(blocked.plan.program, blocked.pricing).step_s > simulate(found.plan.program, found.pricing).step_s


@pytest.mark.slow
def test_a_killed_rank_fails_its_row_and_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(context: Context, emulation: Emulation) -> list[EmulatedStep]:
        if emulation.plan.layout.system == "dualpipe_v" and context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        quick = replace(emulation.pacing, pace=Pace(dilation=1.0, slack_s=60.0))
        return emulate(context, replace(emulation, pacing=quick, warm_ups=0, repeats=1))

    monkeypatch.setattr(bench.emulation, "emulate", die)
    settings = ["model=tiny", "cluster=laptop", "seq=512", "batch=32", "ep=2", "systems=[dualpipe_v,disagmoe]"]
    assert main([*settings, "backend=emulate", f"results_dir={tmp_path}"]) == 1
    (directory,) = tmp_path.glob("tiny_512_emulate_*")
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert "killed by signal 9" in rows[1]["reason"]
    drawn = {path.name for path in directory.iterdir()}
    assert {"timeline_native_disagmoe.png", "trace_native_megatron_1f1b.json.gz", "breakdown.svg"} <= drawn
    assert not any("dualpipe" in name for name in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron_1f1b", "disagmoe"])
def test_an_emulated_step_lies_between_the_simulations_with_and_without_contention(name: str) -> None:
    """With slack for any host: what registers a moment late slows what ends in that moment less than it should."""
    found = cut(name)
    alone = replace(
        found.pricing,
        slows_compute=np.ones_like(found.pricing.slows_compute),
        slowed_by_compute=np.ones_like(found.pricing.slowed_by_compute),
    )
    most = simulate(found.plan.program, found.pricing).step_s
    least = simulate(found.plan.program, alone).step_s
    ran = run_cut(found, 4, 2, pace=Pace(dilation=4.0 / most, slack_s=100.0 * most))
    for step in ran.steps:
        assert 0.95 * least < step.timeline.step_s < 1.1 * most
        assert step.wall_s > 0.9 * 4.0
        assert step.late_share == 0.0
