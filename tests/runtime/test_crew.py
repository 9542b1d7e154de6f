"""Calling functions on ranks, forked or started by torchrun; measured steps of one plan."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from disagmoe.runtime.child import Context
from disagmoe.runtime.crew import Forked
from disagmoe.runtime.errors import RankError
from disagmoe.runtime.measure import GIB, RankReport, Trial, measure, peak_memory_gib
from disagmoe.runtime.optimizer import Recipe
from disagmoe.runtime.step import RunOptions
from disagmoe.timeline.metrics import worker_metrics
from tests.runtime.colocated_cases import Colocated
from tests.runtime.training_cases import Case


def trial(case: Case, repeats: int = 2) -> Trial:
    options = RunOptions(precision="fp64", weights=case.weights, recipe=Recipe(steps=4), timeout_s=20.0)
    return Trial(case.plan, case.model, case.cut, options, warm_up=1, repeats=repeats)


def number(context: Context, base: int) -> int:
    return base + context.rank


def dies(context: Context) -> int:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.mark.parametrize("case", [Case(), Colocated(gpus=2, ep=2, capacity=1.0, seq=9)], ids=["ring", "colocated"])
def test_a_measured_step(case: Case) -> None:
    reports = Forked(2).call(measure, trial(case), timeout_s=60.0)
    for report in reports:
        assert len(report.steps_s) == 3 and min(report.steps_s) > 0.0
        assert report.losses == reports[0].losses and report.losses[0] != report.losses[1]  # the optimizer moved
        assert 0.01 < report.peak_memory_gib < 8.0
        assert report.wire_bytes is not None and report.wire_bytes > 0.0
    assert not reports[1].timelines
    for step, timeline in enumerate(reports[0].timelines, start=1):
        assert timeline.origin == "measured"
        # The slowest rank's time is the step's, and the breakdown adds up to it.
        assert timeline.step_s == pytest.approx(max(report.steps_s[step] for report in reports))
        for worker in worker_metrics(timeline):
            assert worker.compute_s + worker.exposed_s + worker.bubble_s == pytest.approx(timeline.step_s)
            assert worker.compute_s > 0.0
    if isinstance(case, Colocated):
        assert all(report.dropped == reports[0].dropped for report in reports) and min(reports[0].dropped) > 0


def test_a_killed_rank_is_named_and_the_next_call_has_fresh_ones() -> None:
    crew = Forked(2)
    with pytest.raises(RankError, match=r"rank 1 of 2 was killed by signal 9 \(SIGKILL\)"):
        crew.call(dies, timeout_s=30.0)
    assert crew.call(number, 5, timeout_s=30.0) == [5, 6]


def test_memory_is_a_high_water_mark() -> None:
    before = peak_memory_gib(torch.device("cpu"))
    block = np.ones(int(0.2 * GIB / 8))
    assert peak_memory_gib(torch.device("cpu")) >= before
    del block
    assert peak_memory_gib(torch.device("cpu")) >= before


LEAD = """
import sys
from disagmoe.runtime.crew import under_launcher
from disagmoe.runtime.errors import RankError
from tests.runtime.test_crew import number, raises

def lead(crew):
    try:
        crew.call(raises, timeout_s=30.0)
    except RankError as error:
        first = str(error)
    with open(sys.argv[1], "w") as file:
        print(first, crew.call(number, 7, timeout_s=30.0), crew.size, file=file)
    return 3

sys.exit(under_launcher(lead))
"""


def raises(context: Context) -> None:
    if context.rank == 1:
        raise ValueError("no such luck")


@pytest.mark.slow
def test_ranks_that_torchrun_started_serve_the_first_one_and_outlive_an_error(tmp_path: Path) -> None:
    script, said = tmp_path / "lead.py", tmp_path / "said"
    script.write_text(LEAD)
    root = Path(__file__).resolve().parents[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
    command = [sys.executable, "-m", "torch.distributed.run", *address, str(script), str(said)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert said.read_text().strip() == "rank 1 of 2 failed: ValueError: no such luck [7, 8] 2"
    assert done.returncode == 1  # torchrun's own, for the first rank's 3


def test_a_report_of_another_implementation_needs_no_timeline() -> None:
    assert RankReport((1.0,), (2.0,), 0.5).timelines == ()
