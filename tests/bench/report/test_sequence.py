"""By-sequence pictures: grouping, order, what is missing, equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.report import by_sequence, records
from bench.report.sequence import METRICS, NEEDED, draw_metric, make_panels, shown_pairs
from bench.report.style import drawing

from .sample import sample


def runs(*lengths: int, model: str = "qwen3", cluster: str = "h800_128", used: int = 94) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for seq in lengths:
        results = sample(depth={"used": used, "of": 94})
        results["model"]["name"] = model
        results["cluster"]["name"] = cluster
        results["workload"].update(seq=seq, global_batch=8388608 // seq)
        lines += records(results)
    return lines


def test_one_panel_per_model_and_sequences_in_order() -> None:
    panels, superseded = make_panels([*runs(32768, 4096, 8192), *runs(4096, model="gpt_oss")])
    assert superseded == 0
    assert [panel.title.split(",")[0] for panel in panels] == ["gpt_oss", "qwen3"]
    assert panels[1].lengths == [4096, 8192, 32768]
    cell = panels[1].cells["native", "disagmoe", 8192]
    assert cell["speedup"] == pytest.approx(1.6)


def test_depths_and_batches_do_not_mix() -> None:
    rows = [*runs(4096), *runs(4096, used=72)]
    big = runs(4096)
    for row in big:
        row["global_batch"] *= 4
    titles = [panel.title for panel in make_panels([*rows, *big])[0]]
    assert titles == [
        "qwen3, 72 of 94 layers, 8.39 M tokens",
        "qwen3, 94 of 94 layers, 8.39 M tokens",
        "qwen3, 94 of 94 layers, 33.6 M tokens",
    ]


def test_rounded_batches_share_a_panel() -> None:
    odd = runs(6000)
    for row in odd:
        row["global_batch"] = 1408  # 8,448,000 tokens
    (panel,), _ = make_panels([*runs(4096), *odd])
    assert panel.lengths == [4096, 6000]
    assert "8.39–8.45 M tokens" in panel.title


def test_the_last_line_of_a_point_counts() -> None:
    first, again = runs(4096), runs(4096)
    for row in again:
        row["speedup"] = 9.0
    (panel,), superseded = make_panels([*first, *again])
    assert superseded == len(first)
    assert panel.cells["native", "tutel", 4096]["speedup"] == 9.0


def test_notes_of_the_runs_are_on_the_picture() -> None:
    rows = runs(4096)
    panels, _ = make_panels(rows)
    for row in rows:
        row["notes"] += " | a | b | c | d | e"
    with drawing():
        figure = draw_metric(METRICS[0], panels, rows, ("simulate", "h800_128", "h800"), 3)
    text = " ".join(text.get_text() for text in figure.texts)
    assert text.count("activation memory is not yet modelled") == 1
    assert "and 2 more notes" in text
    assert "3 earlier values of the same points are not shown" in text
    assert "simulated on h800_128 (calibration h800)" in text


def test_files_per_cluster_and_equal_bytes(tmp_path: Path) -> None:
    frame = pd.DataFrame([*runs(4096, 32768), *runs(4096, cluster="h100_128")])
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made.append(by_sequence(tmp_path / name, frame))
    assert [path.name for path in made[0]] == [
        f"by_sequence_{metric}_simulate_{cluster}_h800.{suffix}"
        for cluster in ("h100_128", "h800_128")
        for metric in ("speedup", "exposed", "bubble", "stall")
        for suffix in ("png", "svg")
    ]
    for first, second in zip(*made, strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_batches_and_settings_have_pictures_of_their_own(tmp_path: Path) -> None:
    big, skewed = runs(4096), runs(4096)
    for row in big:
        row["global_batch"] *= 4
    for row in skewed:
        row["settings"] = "skew=2"
    paths = by_sequence(tmp_path, pd.DataFrame([*runs(4096), *big, *skewed]))
    stem = "by_sequence_speedup_simulate_h800_128_h800"
    assert {f"{stem}.png", f"{stem}_33.6M-tokens.png", f"{stem}_skew-2.png"} <= {path.name for path in paths}
    assert len(paths) == 3 * 8


def test_long_settings_that_begin_alike_have_pictures_of_their_own(tmp_path: Path) -> None:
    one, other = runs(4096), runs(4096)
    for rows, end in ((one, "n:16"), (other, "n:32")):
        for row in rows:
            row["settings"] = "system.disagmoe.order=comm_stage " * 4 + end
    paths = by_sequence(tmp_path, pd.DataFrame([*one, *other]))
    assert len(set(paths)) == len(paths) == 2 * 8
    assert max(len(path.name) for path in paths) < 200


def test_a_frame_read_from_csv_will_do(tmp_path: Path) -> None:
    """Empty cells come back as NaN and counts as floats."""
    pd.DataFrame(runs(4096)).to_csv(tmp_path / "summary.csv", index=False)
    assert len(by_sequence(tmp_path, pd.read_csv(tmp_path / "summary.csv"))) == 8


def test_missing_columns_are_named(tmp_path: Path) -> None:
    frame = pd.DataFrame(runs(4096)).drop(columns=["stall_s"])
    with pytest.raises(ValueError, match="missing: stall_s"):
        by_sequence(tmp_path, frame)
    assert "stall_s" in NEEDED


def test_a_system_that_is_applicable_nowhere_takes_no_room() -> None:
    rows = runs(4096, 8192)
    pairs, idle = shown_pairs(rows)
    assert idle == ["comet"]  # not applicable in the sample
    assert "comet" not in {label for _, label in pairs}
    next(row for row in rows if row["system"] == "comet")["status"] = "oom"
    assert shown_pairs(rows)[1] == []
    panels, _ = make_panels(runs(4096))
    with drawing():
        figure = draw_metric(METRICS[0], panels, runs(4096), ("simulate", "h800_128", "h800"), 0)
    assert any("not applicable anywhere here: comet" in text.get_text() for text in figure.texts)
