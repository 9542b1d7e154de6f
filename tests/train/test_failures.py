"""A rank that dies or hangs: the command ends in time, says which, and the same command goes on afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = ["model=tiny", "layers=2", "seq=16", "batch=8", "microbatches=2", "n=2", "precision=fp64", "warmup=1"]
STEPS = "steps=200"


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "disagmoe.train", *COMMAND, f"out={folder}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(folder: Path) -> list[float]:
    file = folder / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(folder: Path, steps: int, running: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while len(losses(folder)) < steps:
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.02)


def ranks_of(running: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, by rank."""
    return [int(pid) for pid in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    _, error = start(folder, STEPS).communicate(timeout=300)
    assert len(losses(folder)) == 200, error
    return losses(folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 2)])
def test_a_lost_rank_ends_the_run_and_the_same_command_goes_on(
    tmp_path: Path, uninterrupted: list[float], number: signal.Signals, rank: int
) -> None:
    running = start(tmp_path / "cut", STEPS, "save_every=5", "timeout_s=8")
    wait_for(tmp_path / "cut", 8, running)
    children = ranks_of(running)
    assert len(children) == 3
    os.kill(children[rank], number)
    begin = time.monotonic()
    _, error = running.communicate(timeout=60)
    assert time.monotonic() - begin < 30
    assert running.returncode == 1
    assert error.strip().count("\n") == 0
    what = "was killed by signal 9" if number == signal.SIGKILL else "(the process is stopped)"
    assert f"rank {rank} of 3" in error and what in error
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    again = start(tmp_path / "cut", STEPS, "save_every=5")
    _, error = again.communicate(timeout=300)
    assert again.returncode == 0, error
    assert losses(tmp_path / "cut") == uninterrupted


@pytest.mark.slow
def test_three_runs_at_once(tmp_path: Path) -> None:
    running = [start(tmp_path / str(i), "steps=5", f"seed={i}") for i in range(3)]
    for i, run in enumerate(running):
        _, error = run.communicate(timeout=120)
        assert run.returncode == 0, error
        assert len(losses(tmp_path / str(i))) == 5


@pytest.mark.slow
def test_a_text_is_learnt_and_the_curve_is_that_of_one_process(tmp_path: Path) -> None:
    """Two attention and two expert ranks, fp64, a hundred steps; then the same in one process."""
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{i} and {i} make {2 * i}; " for i in range(150)))
    what = [f"path={file}", "data=text", "steps=100", "m=2", "batch=16", "seq=32", "balance=0.01"]
    kept = [a for a in COMMAND if a.partition("=")[0] not in {w.partition("=")[0] for w in what}]
    for folder, where in (("many", []), ("one", ["single=true"])):
        command = [sys.executable, "-m", "disagmoe.train", *kept, *what, *where, f"out={tmp_path / folder}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=280)
    many, one = losses(tmp_path / "many"), losses(tmp_path / "one")
    assert many == pytest.approx(one, abs=1e-8)
    assert many[-1] < many[0] / 2


@pytest.mark.slow
def test_torchrun_starts_the_same_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command += ["-m", "disagmoe.train", *COMMAND, "steps=3", f"out={tmp_path / 'torchrun'}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert start(tmp_path / "forked", "steps=3").wait(120) == 0
    assert losses(tmp_path / "torchrun") == losses(tmp_path / "forked")


@pytest.mark.slow
def test_a_world_of_the_wrong_size_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "disagmoe.train", *COMMAND, "steps=3", f"out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "error: 2 processes were started, the plan needs 3: 1 x (A0 1 + F0 2)" in done.stderr
