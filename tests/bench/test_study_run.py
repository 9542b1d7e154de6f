"""A study on disk: files, skipping, failures, and the same rules as for a run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import crossing, sensitivity
from bench.collect import newest_runs
from bench.identity import identify
from bench.points import Answer, Task
from bench.run import Call
from bench.study_run import execute, failures, load_study
from tests.bench.helpers import config
from tests.bench.test_sensitivity import row

AXES = {"skew": [1, 1.5, 2], "merge": ["none", "rank"]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Tasks, answered by a formula: DisagMoE loses to tutel from skew 1.25 on; merge=rank does not fit."""
    seen: list[Task] = []

    def answers(tasks: Sequence[Task], *_: Any) -> list[tuple[Answer, ...]]:
        seen.extend(tasks)
        return [(reply(task),) for task in tasks]

    def reply(task: Task) -> Answer:
        if task.config.merge == "rank":
            return Answer(row(task.system, None, "oom"))
        step = task.config.workload.skew if task.system == "disagmoe" else {"tutel": 1.25}.get(task.system, 4.0)
        return Answer({**row(task.system, step), "plan": {"p": 2, "head": "last|F"}})

    for module in (sensitivity, crossing):
        monkeypatch.setattr(module, "answers", answers)
    return seen


def study(results_dir: Path, **changes: Any) -> Any:
    mapping = {"kind": "sensitivity", "axes": AXES}
    return config(results_dir, study=mapping, transport="native", systems="tutel,disagmoe", **changes)


def test_a_study_directory(tmp_path: Path, asked: list[Task], capsys: pytest.CaptureFixture[str]) -> None:
    outcome = execute(study(tmp_path), Call())
    assert outcome.failures == ()
    names = {path.name for path in outcome.directory.iterdir()}
    tables = {"study.json", "sensitivity.md", "sensitivity.csv", "crossings.csv"}
    assert names == tables | {"tornado.png", "tornado.svg", ".hydra"}
    record = load_study(outcome.directory)
    assert [point["axis"] for point in record["points"]] == ["base", "skew", "skew", "merge", "merge"]
    assert outcome.directory.name == f"sensitivity_512_simulate_{record['run']['id']}"
    assert record["run"]["id"] == identify(study(tmp_path)).run_id
    text = (outcome.directory / "sensitivity.md").read_text()
    assert "(simulated)" in text.splitlines()[0]
    assert "simulated on laptop" in text
    assert "ahead below 1.246 ± 0.005, behind above (in [1, 2])" in text
    assert "none in [1, 2]: ahead throughout" in text
    assert "last\\|F" in text
    with (outcome.directory / "sensitivity.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["speedup_over_best"] for line in lines] == ["1.25", str(1.25 / 1.5), "0.625", "1.25", ""]
    assert lines[-1]["status"] == "oom"
    printed = capsys.readouterr().out
    assert "Where DisagMoE stops winning (simulated, native view)" in printed
    assert str(outcome.directory) in printed


def test_a_repeated_study_is_skipped_and_is_no_run(tmp_path: Path, asked: list[Task]) -> None:
    first = execute(study(tmp_path), Call(tables=False))
    files = {path.name: path.read_bytes() for path in first.directory.iterdir() if path.is_file()}
    count = len(asked)
    again = execute(study(tmp_path), Call(tables=False))
    assert (again.skipped, len(asked)) == (True, count)
    forced = execute(study(tmp_path, force=True), Call(tables=False))
    assert not forced.skipped
    for name in set(files) - {"study.json"}:
        assert (forced.directory / name).read_bytes() == files[name], name
    assert newest_runs(tmp_path) == ([], [])


def test_other_axes_are_another_study(tmp_path: Path) -> None:
    plain = study(tmp_path)
    other = config(tmp_path, study={"kind": "sensitivity", "axes": {"skew": [2]}}, transport="native")
    assert len({identify(run).run_id for run in (plain, other, config(tmp_path, transport="native"))}) == 3


def test_what_failed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = ["failed"]

    def answers(tasks: Sequence[Task], *_: Any) -> list[tuple[Answer, ...]]:
        return [(Answer(row(task.system, 1.0 if status[0] == "ok" else None, status[0])),) for task in tasks]

    for module in (sensitivity, crossing):
        monkeypatch.setattr(module, "answers", answers)
    broken = execute(study(tmp_path), Call(tables=False))
    assert len(broken.failures) == len(failures(load_study(broken.directory))) == 5
    status[0] = "ok"
    mended = execute(study(tmp_path), Call(tables=False))
    assert (mended.skipped, mended.failures) == (False, ())


def test_a_broken_record_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no study\.json"):
        load_study(tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(ValueError, match=r"study\.json cannot be read"):
        load_study(tmp_path)
