"""Tables and pictures of single claims: gains, marks of what did not fit, the paper beside ours."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from bench.report.point_figures import batch_figure, ratio_figure, stages_figure, top_k_figure, write_figures
from bench.report.points import grids, picture_stems, point_grid
from bench.report.study import write
from bench.report.style import drawing

NODES = {"name": "h800_32", "device": "H800", "groups": [{"count": 4, "gpus": 8, "nics": 8, "nic_gbit": 400.0}]}


def point(axis: str, at: dict[str, Any], step_s: float | None, reference_s: float | None = 3.0, **more: Any) -> Any:
    ran = step_s is not None
    return {
        "model": "deepseek_moe",
        "axis": axis,
        "setting": " ".join(f"{key}={value}" for key, value in at.items()),
        "at": at,
        "seq": 4096,
        "global_batch": 2048,
        "status": "ok" if ran else "oom",
        "reason": "" if ran else "needs 90.0 GiB per GPU at least",
        "step_s": step_s,
        "exposed_s": 0.1 if ran else None,
        "bubble_s": 0.2 if ran else None,
        "pool_compute": {"A": 0.5, "F": 0.9} if ran else {},
        "reference_step_s": reference_s,
        "speedup_over_reference": reference_s / step_s if ran and reference_s else None,
        "microbatches": 16 if ran else None,
        "gpus_used": 32 if ran else None,
        "needed_gib": 70.0 if ran else 90.0,
        "plan": {"ep": 16} if ran else None,
        **more,
    }


RATIOS = [
    *(
        point("ratio", {"ratio": "16:16", "nics": "halves"}, 2.0),
        point("ratio", {"ratio": "16:10", "nics": "halves"}, 2.5),
    ),
    *(point("ratio", {"ratio": "16:16", "nics": "free"}, 2.0), point("ratio", {"ratio": "16:10", "nics": "free"}, 1.6)),
]
STAGES = [point("depth", {"p": 2, "v": 14}, 2.0), point("depth", {"p": 1, "v": 28}, None)]
TOP_K = [point("top_k", {"top_k": k, "ep": ep}, 1.0 + ep / k / 10) for k in (2, 4) for ep in (8, 16)]
BATCHES = [point("batch", {"batch": 0.5}, 2.0, microbatches=8), point("batch", {"batch": 4.0}, None)]


def record(*points: Any, kind: str = "claims") -> dict[str, Any]:
    return {
        "kind": kind,
        "run": {"id": "0123456789ab"},
        "models": [{"name": "deepseek_moe", "title": "DeepSeek-MoE", "layers": 20, "of": 28}],
        "cluster": NODES,
        "workload": {"seq": 4096, "global_batch": 2048},
        "backend": "simulate",
        "calibration": "h800",
        "view": "native",
        "settings": {},
        "notes": [],
        "points": list(points),
        "paper": [],
    }


def words(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_ratios_are_told_over_the_reference_over_the_equal_split_and_per_gpu() -> None:
    grid = point_grid("ratio", RATIOS, "ratios")
    cells = [dict(zip(grid.headings, row, strict=True)) for row in grid.cells]
    assert [row["over megatron_1f1b"] for row in cells] == ["1.500×", "1.200×", "1.500×", "1.875×"]
    # Each rule for the NICs has a 16:16 of its own; 16:10 uses 26 GPUs instead of 32.
    assert [row["over 16:16"] for row in cells] == ["1.000×", "0.800×", "1.000×", "1.250×"]
    assert (cells[0]["A computes"], cells[0]["F computes"]) == ("50 %", "90 %")
    assert cells[1]["per GPU of a group"] == f"{0.8 * 32 / 26:.3f}×"


def test_what_did_not_fit_has_its_reason_in_the_place_of_a_plan() -> None:
    (_, lost) = point_grid("depth", STAGES, "stages").cells
    assert "oom" in lost
    assert lost[-1] == "needs 90.0 GiB per GPU at least"
    (_, brief) = point_grid("depth", STAGES, "stages", brief=True).cells
    assert brief[-1] == "needs 90.0 GiB per GPU at least"


def test_the_fastest_ratio_of_every_length_is_framed() -> None:
    with drawing():
        figure = ratio_figure(record(*RATIOS), RATIOS)
    halves, free, equal_halves, equal_free = figure.axes
    assert words(halves) == ["1.50×", "1.20×"]
    assert words(free) == ["1.50×", "1.88×"]
    assert words(equal_halves) == ["1.00×", "0.80×"]
    assert words(equal_free) == ["1.00×", "1.25×"]
    frames = [[p.get_y() for p in axes.patches if isinstance(p, Rectangle)] for axes in figure.axes]
    assert frames == [[-0.5], [0.5], [-0.5], [0.5]]
    said = " ".join(text.get_text() for text in figure.texts)
    assert "simulated on h800_32" in said
    assert "20 of 28 layers" in said
    assert "32/26 = 1.23×" in said.replace("\n", " ")


def test_stages_are_tokens_per_gpu_with_marks_where_nothing_fits() -> None:
    with drawing():
        (axes,) = stages_figure(record(*STAGES), STAGES).axes
    marks = {line.get_marker(): line.get_xydata().tolist() for line in axes.lines if line.get_marker() in ("o", "x")}
    assert marks["o"] == [[14, pytest.approx(4096 * 2048 / 2.0 / 32)]]
    assert marks["x"][0][0] == 28
    assert words(axes) == ["p=2", "OOM, p=1"]
    reference = next(line for line in axes.lines if line.get_linestyle() == "--")
    assert reference.get_ydata()[0] == pytest.approx(4096 * 2048 / 3.0 / 32)


def test_top_k_names_another_expert_parallel_size() -> None:
    with drawing():
        (axes,) = top_k_figure(record(*TOP_K), TOP_K).axes
    # Every plan has EP 16: said where 8 was asked for.
    assert words(axes) == [f"{3 / 1.4:.2f}×\nEP 16", f"{3 / 1.8:.2f}×", f"{3 / 1.2:.2f}×\nEP 16", f"{3 / 1.4:.2f}×"]


def test_batches_name_their_micro_batches() -> None:
    with drawing():
        (axes,) = batch_figure(record(*BATCHES), BATCHES).axes
    assert words(axes) == ["n=8", "OOM"]


def test_a_study_with_every_group_has_a_picture_each(tmp_path: Path) -> None:
    whole = record(*RATIOS, *TOP_K, *STAGES, *BATCHES)
    assert [stem for _, _, stem in picture_stems(whole)] == [
        *("ratio_deepseek_moe", "topk_ep", "virtual_stages", "microbatches"),
    ]
    paths = write_figures(whole, tmp_path)
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_figures(whole, tmp_path)] == first
    assert next(grids(whole)).title == "Beside the paper"
    assert len(list(grids(whole))) == 5


def test_files_of_a_study(tmp_path: Path) -> None:
    verdict = {
        "claim": "best",
        "low": 1.0,
        "high": 1.0,
        "unit": "ratio",
        "ours": 1.0,
        "model": "deepseek_moe",
        "seq": 4096,
    }
    verdict |= {"setting": "16:16", "verdict": "inside", "note": "model not stated"}
    made = record(*RATIOS, kind="ratio_sweep") | {"paper": [verdict]}
    names = [path.name for path in write(tmp_path, made)]
    assert names == [
        *("ratio_sweep.md", "ratio_sweep.csv", "verdicts.csv", "ratio_deepseek_moe.png", "ratio_deepseek_moe.svg"),
    ]
    text = (tmp_path / "ratio_sweep.md").read_text()
    assert text.startswith("# A:F GPU ratio by sequence length (simulated)")
    assert "| best | 1 | 1 | deepseek\\_moe | 4K | 16:16 | inside | model not stated |" in text
    with (tmp_path / "ratio_sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["ratio"], line["nics"]) for line in lines[:2]] == [("16:16", "halves"), ("16:10", "halves")]
