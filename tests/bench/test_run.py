"""A run on disk: what it holds, when it is done, and that a repetition writes equal bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import bench.evaluate
from baselines import system_names
from bench.config import RunConfig
from bench.results import InvalidResults, load
from bench.run import Call, execute
from tests.bench import helpers
from tests.bench.helpers import config


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Configurations that were evaluated (by a stand-in that neither plans nor simulates)."""
    seen: list[RunConfig] = []

    def evaluate(run: RunConfig, progress: Any = None) -> helpers.FakeEvaluation:
        seen.append(run)
        progress("native: megatron_1f1b")
        return helpers.evaluation(run)

    monkeypatch.setattr(bench.evaluate, "evaluate", evaluate)
    return seen


def tables(results_dir: Path, **changes: Any) -> RunConfig:
    return config(results_dir, artifacts="tables", **changes)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_run_directory(tmp_path: Path, evaluated: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    call = Call(command=("python", "-m", "bench", "tag=a b"), overrides=("tag=a b",))
    outcome = execute(tables(tmp_path / "results", tag="a b"), call)
    assert not outcome.skipped
    assert outcome.failures == ()
    assert outcome.directory.parent == tmp_path / "results"
    assert names(outcome.directory) == {"results.json", "table.md", "table.csv", "tuning.csv", "memory.csv", ".hydra"}
    results = load(outcome.directory)
    assert list(results) == sorted(results)
    assert results["schema"] == "disagmoe.results/1"
    assert results["run"]["command"] == "python -m bench 'tag=a b'"
    assert outcome.directory.name == f"tiny_512_simulate_{results['run']['id']}"
    assert results["depth"] == {"used": 4, "of": 4}
    assert results["model"]["parameters_total"] > results["model"]["parameters_active"] > 0
    assert results["calibration"] == "laptop"
    assert len(results["rows"]) == len(evaluated[0].systems) * 2
    assert yaml.safe_load((outcome.directory / ".hydra" / "overrides.yaml").read_text()) == ["tag=a b"]
    stored = yaml.safe_load((outcome.directory / ".hydra" / "config.yaml").read_text())
    assert stored["workload"]["seq"] == 512
    assert stored["systems"] == list(evaluated[0].systems)
    assert str(outcome.directory) in capsys.readouterr().out


def test_a_finished_run_is_skipped_and_shown(
    tmp_path: Path, evaluated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    first = execute(tables(tmp_path))
    capsys.readouterr()
    again = execute(tables(tmp_path))
    assert again.skipped
    assert again.directory == first.directory
    assert len(evaluated) == 1
    said = capsys.readouterr().out
    assert "already there" in said
    assert "megatron_1f1b" in said


def test_force_replaces_and_only_the_run_block_differs(tmp_path: Path, evaluated: list[RunConfig]) -> None:
    directory = execute(tables(tmp_path)).directory
    one = (directory / "results.json").read_bytes()
    (directory / "stray").touch()
    assert not execute(tables(tmp_path, force=True)).skipped
    two = (directory / "results.json").read_bytes()
    assert len(evaluated) == 2
    assert not (directory / "stray").exists()
    records = [json.loads(text) for text in (one, two)]
    for record in records:
        record.pop("run")
    assert json.dumps(records[0]) == json.dumps(records[1])
    assert names(tmp_path) == {directory.name}


def break_json(directory: Path) -> None:
    path = directory / "results.json"
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def nan_in_json(directory: Path) -> None:
    path = directory / "results.json"
    path.write_text(path.read_text().replace('"mfu": 0', '"mfu": NaN, "x": 0', 1))


def drop_json(directory: Path) -> None:
    (directory / "results.json").unlink()


def break_schema(directory: Path) -> None:
    results = load(directory)
    del results["depth"]
    (directory / "results.json").write_text(json.dumps(results))


def fail_a_row(directory: Path) -> None:
    results = load(directory)
    row = results["rows"][0]
    row |= {key: None for key in row if key.endswith(("_s", "_gpu")) or key in ("speedup", "mfu", "pools", "plan")}
    row |= {"status": "failed", "reason": "x"}
    (directory / "results.json").write_text(json.dumps(results))


@pytest.mark.parametrize("damage", [break_json, nan_in_json, drop_json, break_schema, fail_a_row])
def test_what_is_not_whole_runs_again(tmp_path: Path, evaluated: list[RunConfig], damage: Any) -> None:
    directory = execute(tables(tmp_path)).directory
    good = load(directory)["rows"]
    damage(directory)
    assert not execute(tables(tmp_path)).skipped
    assert len(evaluated) == 2
    assert load(directory)["rows"] == good


def test_a_run_of_tables_does_not_stand_for_one_with_figures(
    tmp_path: Path, evaluated: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = execute(tables(tmp_path)).directory
    assert not execute(config(tmp_path)).skipped
    assert (directory / "speedup.png").is_file()
    assert execute(config(tmp_path)).skipped
    assert execute(tables(tmp_path)).skipped
    assert len(evaluated) == 2


def test_failed_rows_are_reported_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.evaluate, "evaluate", lambda run, progress: helpers.evaluation(run, failed=True))
    outcome = execute(tables(tmp_path))
    assert outcome.failures == (f"uniform {system_names()[-1]}: out of luck",)
    assert not execute(tables(tmp_path)).skipped


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["bench.evaluate.evaluate", "bench.report.write", "bench.report.compare"])
def test_whatever_ends_a_run_leaves_nothing(
    tmp_path: Path,
    evaluated: list[RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    place: str,
) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(place, fail)
    results_dir = tmp_path / "results"
    with pytest.raises(type(error)):
        execute(tables(results_dir))
    assert not results_dir.exists()


def test_numbers_that_json_cannot_hold_are_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(run: RunConfig, progress: Any) -> helpers.FakeEvaluation:
        evaluation = helpers.evaluation(run)
        evaluation.rows[0]["mfu"] = float("nan")
        return evaluation

    monkeypatch.setattr(bench.evaluate, "evaluate", evaluate)
    with pytest.raises(InvalidResults, match="no form for"):
        execute(tables(tmp_path))
    assert names(tmp_path) == set()


def test_results_that_break_the_schema_are_a_fault_that_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(run: RunConfig, progress: Any) -> helpers.FakeEvaluation:
        evaluation = helpers.evaluation(run)
        evaluation.rows[1]["view"] = "sideways"
        return evaluation

    monkeypatch.setattr(bench.evaluate, "evaluate", evaluate)
    with pytest.raises(InvalidResults, match=r"rows\[1\]\.view"):
        execute(tables(tmp_path))


def test_warnings_go_to_stderr(tmp_path: Path, evaluated: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    execute(tables(tmp_path, seq=8192))
    assert capsys.readouterr().err.startswith("warning: seq 8192")
