"""Which part of a schedule is shown: spellings, refusals, and that a run without it is not enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.identity import identify
from bench.overrides import rewrite
from bench.run import CONFIG_FILE, finished
from bench.selection import WHOLE, Selection, read_selection
from tests.bench.helpers import config


def test_spellings() -> None:
    assert read_selection(None, None) == WHOLE
    assert read_selection("120:180.5", [0, "F1"]) == Selection((120.0, 180.5), ("0", "F1"))
    assert read_selection(None, "0, A1").workers == ("0", "A1")
    assert read_selection("0:1500", None).window_s == (0.0, 1.5)


def test_workers_by_number_or_name_in_the_order_of_the_system() -> None:
    chosen = read_selection(None, ["F0", 0, 9])
    assert chosen.indices(["A0", "A1", "F0", "F1"]) == [0, 2]
    assert chosen.indices(["P0", "P1"]) == [0]
    assert WHOLE.indices(["A0"]) == []


@pytest.mark.parametrize("window", ["10", "20:10", "a:b", "-1:5", "1:2:3", "0:inf", 7, ""])
def test_windows_that_are_none_are_refused(window: Any) -> None:
    with pytest.raises(ValueError, match=r"gantt_window=.*allowed: start:stop in ms"):
        read_selection(window, None)


@pytest.mark.parametrize("workers", [[], "", "0,,1", ["A 0"], [[0]]])
def test_workers_that_are_none_are_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match=r"gantt_workers=.*allowed"):
        read_selection(None, workers)


def test_a_list_without_brackets_is_a_list_and_no_sweep() -> None:
    assert rewrite(["gantt_workers=0,1,2", "gantt_window=1:2"]) == ["gantt_workers=[0,1,2]", "gantt_window=1:2"]
    assert rewrite(["gantt_workers=[0,1]"]) == ["gantt_workers=[0,1]"]


def test_it_changes_no_number_but_asks_for_other_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = config(), config(gantt_window="1:2", gantt_workers=[0])
    assert identify(whole) == identify(part)
    (tmp_path / CONFIG_FILE).parent.mkdir()
    stored = {"artifacts": "all", "selection": {"window_ms": None, "workers": []}}
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump(stored))
    monkeypatch.setattr("bench.run.load", lambda directory: {"rows": []})
    assert finished(tmp_path, whole) is not None
    assert finished(tmp_path, part) is None
    assert finished(tmp_path, config(gantt_window="1:2", artifacts="tables")) is not None
