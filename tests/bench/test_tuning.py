"""tuning.csv says what became of every candidate."""

from __future__ import annotations

import csv
from pathlib import Path

from bench.evaluate import Evaluation, Outcome
from bench.tuning import COLUMNS, write_tuning
from disagmoe.allocator import Trial, Tuned


def test_one_line_per_trial_with_empty_cells_where_nothing_applies(tmp_path: Path) -> None:
    trials = (
        Trial({"pp": 4, "ep": 16}, "timed", needed_gib=1.5, bound_s=0.25, step_s=0.5, origin="seed"),
        Trial({"pp": 2, "ep": 16}, "memory", needed_gib=99.0),
        Trial({"pp": 3, "ep": 16}, "not placeable", reason="3 does not divide, alas"),
    )
    rows = [
        {"view": "native", "system": "a", "variant": "x"},
        {"view": "native", "system": "b", "variant": ""},
    ]
    found = Tuned("ok", "", trials[0].candidate, None, 0.5, 1.5, trials)
    write_tuning(tmp_path / "t.csv", Evaluation(rows, [Outcome(None, None, found), Outcome(None, None)]))
    with (tmp_path / "t.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert lines == [
        list(COLUMNS),
        ["native", "a", "x", "seed", "timed", "0.5", "0.25", "1.5", "ep=16 pp=4", ""],
        ["native", "a", "x", "candidate", "memory", "", "", "99.0", "ep=16 pp=2", ""],
        ["native", "a", "x", "candidate", "not placeable", "", "", "", "ep=16 pp=3", "3 does not divide, alas"],
    ]
