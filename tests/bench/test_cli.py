"""The command: exit statuses, one line per mistake, sweeps that go on, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import bench.evaluate
from bench.cli import main
from bench.config import RunConfig
from tests.bench import helpers
from tests.bench.helpers import CONF

SMOKE = ["experiment=smoke"]
ROOT = CONF.parent


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation by a stand-in; a batch of 13 makes its last row fail, 14 is a fault, 15 a mistake."""

    def evaluate(run: RunConfig, progress: Any = None) -> helpers.FakeEvaluation:
        if run.workload.global_batch == 14:
            raise RuntimeError("a fault")
        if run.workload.global_batch == 15:
            raise ValueError("batch 15 cannot be")
        return helpers.evaluation(run, failed=run.workload.global_batch == 13)

    monkeypatch.setattr(bench.evaluate, "evaluate", evaluate)


def run(tmp_path: Path, *arguments: str) -> int:
    return main([*SMOKE, f"results_dir={tmp_path / 'results'}", *arguments])


def runs(tmp_path: Path) -> list[str]:
    directory = tmp_path / "results"
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model=nope"], ["model 'nope'", "qwen3", "tiny", "path"]),
        (["cluster=nope"], ["cluster 'nope'", "h800_128"]),
        (["calibration=nope"], ["calibration 'nope'", "h800"]),
        (["experiment=nope"], ["experiment 'nope'", "smoke"]),
        (["hydra/launcher=nope"], ["launcher 'nope'", "joblib"]),
        (["seq=0"], ["seq=0", "positive"]),
        (["seq=32kk"], ["32kk"]),
        (["seq="], ["seq=''"]),
        (["sqe=8192"], ["'sqe'", "did you mean seq?"]),
        (["+foo=1"], ["'foo'", "seq"]),
        (["~seq"], ["no value for 'seq'"]),
        (["qwen3"], ["'qwen3'", "setting=value"]),
        (["ep=${nope}"], ["nope"]),
        (["model.sqe=1"], ["model.sqe"]),
        (["systems=foo"], ["foo", "disagmoe"]),
        (["systems=a,b"], ["systems=[a,b]", "-m"]),
        (["system=tutel"], ["systems=[tutel]"]),
        (["system.tutel.speed=1"], ["speed", "degree"]),
        (["tag=x,y"], ["tag='x,y'", "-m"]),
        (["tag=a=b"], ["tag=a=b", "quotes"]),
        (["tag=[1,2]"], ["tag"]),
        (["backend=guess"], ["simulate, emulate, measure"]),
        (["model=no/config.json"], ["no/config.json", "qwen3"]),
        (["model=qwen3,x/config.json"], ["not both"]),
        (["model.top_k=9"], ["9", "8"]),
        (["model.heads=3"], ["3", "kv_heads"]),
        (["results_dir=/dev/null/x"], ["/dev/null/x"]),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMOKE, *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tag", ["a/b", "'c,d'", "a b", "'[1,2]'", "'x=y'"])
def test_tags_never_shape_directories(tmp_path: Path, fake: None, tag: str) -> None:
    assert run(tmp_path, f"tag={tag}") == 0
    (name,) = runs(tmp_path)
    assert name.startswith("tiny_512_simulate_")
    assert json.loads((tmp_path / "results" / name / "results.json").read_text())["run"]["tag"] == tag.strip("'")


def test_nothing_but_the_run_appears(tmp_path: Path, fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMOKE, "artifacts=tables"]) == 0
    assert main([*SMOKE, "-m", "seq=256,512"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert len(runs(tmp_path)) == 2


def test_a_model_by_path(tmp_path: Path, fake: None) -> None:
    path = tmp_path / "my models" / "own.yaml"
    path.parent.mkdir()
    shutil.copy(CONF / "model" / "tiny.yaml", path)
    path.write_text(path.read_text().replace("name: tiny\n", "name: own\n"))
    assert run(tmp_path, f"model={path}") == 0
    (name,) = runs(tmp_path)
    assert name.startswith("own_512_")


def test_options_of_a_system_reach_the_configuration(tmp_path: Path, fake: None) -> None:
    assert run(tmp_path, "systems=[tutel]", "system.tutel.degree=4") == 0
    (name,) = runs(tmp_path)
    stored = (tmp_path / "results" / name / ".hydra" / "config.yaml").read_text()
    assert "degree: 4" in stored


def test_one_job_of_a_sweep_fails_and_the_others_run(
    tmp_path: Path, fake: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "-m", "seq=256,0,1k") == 1
    out, err = capfd.readouterr()
    assert [name.split("_")[1] for name in runs(tmp_path)] == ["1024", "256"]
    assert "3 jobs: 2 done, 0 already there, 1 failed" in out
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "job 1 " in line
    assert "seq=0" in line
    assert run(tmp_path, "-m", "seq=256,1k") == 0
    assert "2 jobs: 0 done, 2 already there, 0 failed" in capfd.readouterr().out


def test_a_sweep_with_an_unknown_model_does_not_start(
    tmp_path: Path, fake: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "-m", "model=tiny,nope") == 2
    assert "unknown model 'nope'" in capfd.readouterr().err
    assert runs(tmp_path) == []


def test_faults_mistakes_and_failed_rows(tmp_path: Path, fake: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "batch=14") == 1
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "error: RuntimeError: a fault"
    assert run(tmp_path, "batch=15") == 2
    assert capfd.readouterr().err == "error: batch 15 cannot be\n"
    assert runs(tmp_path) == []
    assert run(tmp_path, "batch=13", "artifacts=tables") == 1
    assert "1 row failed in " in capfd.readouterr().err
    assert len(runs(tmp_path)) == 1


def test_hydra_help_and_config_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--cfg", "job") == 0
    assert "name: tiny" in capfd.readouterr().out


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bench", *SMOKE, *arguments]


def test_a_real_run_end_to_end(tmp_path: Path) -> None:
    results = tmp_path / "results"
    done = subprocess.run(
        command(f"results_dir={results}", "systems=[tutel,disagmoe]"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (directory,) = results.iterdir()
    written = {path.name for path in directory.iterdir()}
    assert {"results.json", "table.md", "table.csv", "speedup.png", "speedup.svg", "breakdown.png", ".hydra"} <= written
    record = json.loads((directory / "results.json").read_text())
    ran = [row for row in record["rows"] if row["status"] == "ok"]
    assert {"megatron_1f1b", "tutel", "disagmoe"} <= {row["system"] for row in ran}
    assert all(row["reason"] for row in record["rows"] if row not in ran)
    for row in ran:
        stem = "_".join([row["view"], row["system"]]) + (
            f"-{row['variant']}".replace(" ", "-") if row["variant"] else ""
        )
        assert f"timeline_{stem}.png" in written
        assert f"trace_{stem}.json.gz" in written
    assert "megatron_1f1b" in done.stdout
    assert str(directory) in done.stdout


@pytest.mark.slow
def test_joblib_runs_the_jobs_and_survives_a_failing_one(tmp_path: Path) -> None:
    results = tmp_path / "results"
    arguments = command(f"results_dir={results}", "-m", "hydra/launcher=joblib", "seq=256,0,512,1k")
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert len(list(results.iterdir())) == 3
    assert "4 jobs: 3 done, 0 already there, 1 failed" in done.stdout
    assert "job 1 " in done.stderr
    assert "seq=0" in done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_submitit_runs_the_jobs(tmp_path: Path) -> None:
    results = tmp_path / "results"
    arguments = command(f"results_dir={results}", "-m", "hydra/launcher=submitit_local", "seq=256,512")
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 jobs: 2 done" in done.stdout


@pytest.mark.slow
def test_equal_runs_at_once_give_one_directory(tmp_path: Path) -> None:
    arguments = command(f"results_dir={tmp_path / 'results'}", "artifacts=tables")
    both = [subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(runs(tmp_path)) == 1
    assert sorted("already there" in text for text in said) == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    results = tmp_path / "results"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    arguments = [sys.executable, "-m", "bench", f"results_dir={results}"]
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )
    deadline = time.monotonic() + 60
    while not (results.exists() and any(results.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=60)
    # CPython leaves by the signal itself where Ctrl-C met an exec(), as of a new dataclass: 130 to a shell.
    assert process.returncode in (128 + number, *([-number] if number == signal.SIGINT else []))
    assert not results.exists()
    assert list(tmp_path.iterdir()) == []
