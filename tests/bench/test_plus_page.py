"""The page of `disagmoe_plus`: its numbers are those of the committed record, and a study survives being kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import plus_page, plus_record
from bench.ablation import conduct
from bench.plus_page import PAGE, blocks, newest, render
from bench.report.ablation_cells import places
from disagmoe.systems.disagmoe_plus import SWITCHES
from tests.bench.test_ablation import MORE, record, study

__all__ = ["record"]  # the fixture


@pytest.fixture
def kept(record: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    run = dict.fromkeys(("id", "config_id", "command", "created", "git", "versions"), "")
    models = [{"name": "tiny", "title": "Tiny", "layers": 4, "of": 4}]
    plus_record.write({**record, "run": {**run, "git": None}, "models": models, "systems": ["tutel"]}, tmp_path)
    return plus_record.read(tmp_path)


def test_what_is_compared_comes_out_as_it_was(record: dict[str, Any], kept: dict[str, Any]) -> None:
    assert len(kept["points"]) == len(record["points"])
    for before, after in zip(record["points"], kept["points"], strict=True):
        for key in ("model", "seq", "at", "axis", "setting", "status"):
            assert after[key] == before[key]
        for key in ("step_s", "bound_ratio", "exposed_s", "gain_over_disagmoe", "speedup_over_best", "best_step_s"):
            if before["axis"] == "switch":
                assert after[key] == (None if before[key] is None else pytest.approx(before[key], rel=1e-5))
        if before["axis"] == "switch":
            assert after["best_baseline"] == before["best_baseline"] == "tutel"


def test_every_block_stands_between_its_markers(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plus_page, "MAIN", places(kept)[1])
    made = blocks(kept)
    assert set(SWITCHES) < set(made)
    empty = "\n".join(f"{plus_page.BEGIN.format(name)}\nold 123\n{plus_page.END.format(name)}" for name in made)
    page = render(f"# Title\n{empty}\nlast", kept)
    assert render(page, kept) == page
    assert "old 123" not in page
    assert all(block in page for block in made.values())
    with pytest.raises(ValueError, match="lacks the markers '<!-- run:begin"):
        render("# Title", kept)


def test_only_the_shipped_study_is_taken(tmp_path: Path, record: dict[str, Any]) -> None:
    assert newest(tmp_path) is None
    broken = tmp_path / "plus_ablation_512_simulate_0"
    broken.mkdir()
    (broken / "study.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"study\.json cannot be read"):
        newest(tmp_path)
    assert conduct(study(**MORE), lambda name: None)["points"] == record["points"]


def test_the_committed_page_is_made_of_the_committed_record() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert render(text, plus_record.read()) == text
    assert sum(path.stat().st_size for path in plus_record.FOLDER.iterdir()) < 300_000
