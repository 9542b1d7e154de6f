"""Collecting: the newest run of each configuration, broken ones named, and a summary of all."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bench.evaluate
from bench.collect import collect, frame_of, main, markdown, newest_runs, speedups
from bench.run import Call, execute
from tests.bench import helpers
from tests.bench.helpers import CONF, config

SYSTEMS = ["tutel", "disagmoe"]
"""The rows of every run here, beside the reference."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of two lengths, with speed-ups that tell them apart."""

    def evaluate(run: Any, progress: Any) -> helpers.FakeEvaluation:
        evaluation = helpers.evaluation(run)
        for number, row in enumerate(evaluation.rows):
            row["speedup"] = 1.0 + number / 4 + run.workload.seq / 1024
        return evaluation

    monkeypatch.setattr(bench.evaluate, "evaluate", evaluate)
    for seq in (512, 1024):
        execute(config(tmp_path, seq=seq, artifacts="tables", transport="native", systems=SYSTEMS), Call(tables=False))
    return tmp_path


def rewritten(directory: Path, copy: Path, **run: str) -> None:
    """A copy of a run with another run block."""
    shutil.copytree(directory, copy)
    results = json.loads((copy / "results.json").read_text())
    results["run"] |= run
    (copy / "results.json").write_text(json.dumps(results))


def run_directory(results_dir: Path, seq: int) -> Path:
    (directory,) = results_dir.glob(f"tiny_{seq}_*")
    return directory


def test_the_newest_run_of_a_configuration_counts(runs: Path) -> None:
    rewritten(run_directory(runs, 512), runs / "newer", id="a" * 12, created="2999-01-01T00:00:00+00:00")
    rewritten(run_directory(runs, 512), runs / "older", id="b" * 12, created="1999-01-01T00:00:00+00:00")
    rewritten(run_directory(runs, 512), runs / "other", config_id="c" * 12)
    found, broken = newest_runs(runs)
    assert broken == []
    assert len(found) == 3
    assert found[-1]["run"]["id"] == "a" * 12
    assert "b" * 12 not in {results["run"]["id"] for results in found}


def test_broken_runs_are_named_and_left_out(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "empty").mkdir()
    half = run_directory(runs, 512) / "results.json"
    half.write_text(half.read_text()[:300])
    assert main([str(runs)]) == 0
    err = capsys.readouterr().err
    assert "left out" in err
    assert str(runs / "empty") in err
    assert str(half.parent) in err
    with (runs / "summary.csv").open() as lines:
        assert {row["seq"] for row in csv.DictReader(lines)} == {"1024"}


def test_summary_files(runs: Path) -> None:
    files = collect(runs)
    assert [path.name for path in files[:2]] == ["summary.md", "summary.csv"]
    assert any(path.suffix == ".png" for path in files[2:])
    assert all(path.is_file() for path in files)
    assert not [path for path in runs.iterdir() if path.name.startswith(".")]
    with (runs / "summary.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["seq"] for row in rows] == ["512"] * 3 + ["1024"] * 3
    assert [float(row["speedup"]) for row in rows] == [1.5, 1.75, 2.0, 2.0, 2.25, 2.5]
    text = (runs / "summary.md").read_text()
    assert "tiny (4 of 4 layers) on laptop, native view" in text
    assert "| tutel | 1.75× | 2.25× |" in text


def test_a_status_stands_where_there_is_no_speedup(runs: Path) -> None:
    path = run_directory(runs, 1024) / "results.json"
    results = json.loads(path.read_text())
    row = results["rows"][1]
    numbers = {key: None for key, value in row.items() if isinstance(value, int | float)}
    row |= {**numbers, "status": "oom", "reason": "needs 90 GiB", "peak_memory_gib": 90.0, "memory_limit_gib": 75.6}
    row |= {"pools": None, "exposed_by_kind_s": None, "plan": None}
    path.write_text(json.dumps(results))
    frame = frame_of(newest_runs(runs)[0])
    headings, cells = speedups(frame)
    assert headings == ["speedup", "512", "1,024"]
    assert cells[1] == ["tutel", "1.75×", "oom"]
    assert "nan" not in markdown(frame, 2)


def test_order_does_not_depend_on_the_file_system(runs: Path) -> None:
    one = frame_of(newest_runs(runs)[0])
    directory = run_directory(runs, 512)
    directory.rename(runs / "zzz")
    assert frame_of(newest_runs(runs)[0]).equals(one)


def test_nothing_to_collect_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        assert main([str(directory)]) == 2
        assert capsys.readouterr().err.startswith("error: nothing to collect: ")
    assert list(tmp_path.iterdir()) == []


def test_another_locale_changes_no_number(runs: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C"}
    environment.pop("PYTHONUTF8", None)
    command = [sys.executable, "-m", "bench.collect", str(runs)]
    done = subprocess.run(command, cwd=CONF.parent, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1.75×" in (runs / "summary.md").read_text(encoding="utf-8")


def test_runs_with_other_settings_stand_in_tables_of_their_own(runs: Path) -> None:
    execute(
        config(runs, seq=512, artifacts="tables", transport="native", systems=SYSTEMS, skew=2.0), Call(tables=False)
    )
    found, _ = newest_runs(runs)
    text = markdown(frame_of(found), len(found))
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(titles) == 2
    assert {title.split("calibration laptop, ")[1] for title in titles} == {"ep=2", "ep=2 skew=2"}
