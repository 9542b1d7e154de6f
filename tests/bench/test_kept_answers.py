"""Answers kept by content: the second time nothing is asked, and whatever decides an answer makes another question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import ablation
from bench.axes import with_options
from bench.kept_answers import kept
from bench.points import Answer, Task, answer, asked
from tests.bench.helpers import config
from tests.bench.test_ablation import study
from tests.bench.test_sensitivity import row

TASK = asked("place tutel", config(transport="uniform"), "tutel")


class Counted:
    """Answers with one row, and notes what was asked."""

    def __init__(self, status: str = "ok") -> None:
        self.seen: list[Task] = []
        self.status = status

    def __call__(self, task: Task) -> tuple[Answer, ...]:
        self.seen.append(task)
        best = ({"pp": 2, "micro_batch": 1},)
        return (Answer(row(task.system, 1.0 / 3.0 if self.status == "ok" else None, self.status), best, best),)


def test_what_was_answered_is_not_asked_again(tmp_path: Path) -> None:
    ask = Counted()
    first = kept(TASK, tmp_path, ask)
    again = kept(replace(TASK, name="another name"), tmp_path, ask)
    assert len(ask.seen) == 1
    assert again == first
    assert (first[0].row["step_time_s"], first[0].ranked) == (1.0 / 3.0, ())


def test_real_rows_survive(tmp_path: Path) -> None:
    (fresh,) = kept(asked("a", config(transport="uniform"), "megatron_1f1b"), tmp_path)
    (again,) = kept(asked("a", config(transport="uniform"), "megatron_1f1b"), tmp_path, Counted("failed"))
    (plain,) = answer(asked("a", config(transport="uniform"), "megatron_1f1b"))
    assert fresh == again
    assert fresh.row == plain.row
    assert fresh.best == plain.best


def test_another_question_is_asked(tmp_path: Path) -> None:
    ask = Counted()
    workload = replace(TASK.config.workload, seq=1024)
    others = [
        TASK,
        asked("b", replace(TASK.config, workload=workload), "tutel"),
        asked("c", replace(TASK.config, calibration="h800"), "tutel"),
        asked("d", replace(TASK.config, budget=3), "tutel"),
        asked("e", TASK.config, "megatron_1f1b"),
        asked("f", TASK.config, "tutel", {"": ({"pp": 1},)}),
        asked("g", with_options(TASK.config, "tutel", degree=2), "tutel"),
    ]
    for task in others:
        kept(task, tmp_path, ask)
    assert len(ask.seen) == len(others)


def test_failures_and_broken_files_are_asked_again(tmp_path: Path) -> None:
    ask = Counted("failed")
    kept(TASK, tmp_path, ask)
    kept(TASK, tmp_path, ask)
    assert len(ask.seen) == 2
    kept(TASK, tmp_path, Counted())
    (path,) = tmp_path.iterdir()
    path.write_text("[{")
    ask = Counted()
    kept(TASK, tmp_path, ask)
    assert len(ask.seen) == 1


def test_an_interrupted_study_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Counted()
    monkeypatch.setattr(ablation, "kept", lambda task: kept(task, tmp_path, ask))
    monkeypatch.setattr(ablation, "of_split", lambda *_: None)
    reported: list[str] = []

    def stop(name: str) -> None:
        reported.append(name)
        if len(reported) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ablation.conduct(study(), stop, 1)
    assert len(ask.seen) == 7
    whole = ablation.conduct(study(), lambda name: None, 1)
    names = [task.name for task in ask.seen]
    assert len(names) == len(set(names)) == ablation.parts(study())
    assert ablation.conduct(study(), lambda name: None, 1) == whole
    assert len(ask.seen) == len(names)
