"""Loss curves of training runs: read, compared, drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.curves import Curve, main, read_curve


def run(folder: Path, losses: list[float | None]) -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_differences_are_taken_where_both_have_a_loss(tmp_path: Path) -> None:
    one, other = (
        read_curve(run(tmp_path / "a", [3.0, 2.0, None, 1.0])),
        read_curve(run(tmp_path / "b", [3.5, 2.0, 1.0])),
    )
    assert one == Curve("a", {0: 3.0, 1: 2.0, 3: 1.0})
    assert one.differences(other) == {0: 0.5, 1: 0.0}


def test_the_picture_and_the_largest_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        str(run(tmp_path / name, losses)) for name, losses in (("a", [3.0, 2.0]), ("b", [3.25, 2.0]), ("c", [3.0, 2.5]))
    ]
    assert main([*runs, "--out", str(tmp_path / "curves.png")]) == 0
    out = capsys.readouterr().out
    assert "b and a: largest difference 0.25 over 2 steps" in out
    assert "c and a: largest difference 0.5 over 2 steps" in out
    first = (tmp_path / "curves.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    table = (tmp_path / "curves.csv").read_text().splitlines()
    assert table == ["step,a,b,c,|b - a|,|c - a|", "0,3.0,3.25,3.0,0.25,0.0", "1,2.0,2.0,2.5,0.0,0.5"]
    assert main([*runs, "--out", str(tmp_path / "again.png")]) == 0
    assert (tmp_path / "again.png").read_bytes() == first


@pytest.mark.parametrize("content", ["", "no json", '{"step": 0}', '{"step": 0, "loss": null}'])
def test_what_is_no_run_is_named(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path), "--out", str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'metrics.jsonl'}: ") and error.count("\n") == 1
