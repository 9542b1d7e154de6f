"""Decides how the points of single claims are tabulated, in the report of a study and on the paper page alike.

One table per group of points, then every claim beside ours with its verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.report import paper
from bench.report.columns import DASH
from bench.report.facts import REFERENCE
from bench.report.grid import Grid
from bench.report.text import length, plan_line, seconds, times

Point = Mapping[str, Any]
Record = Mapping[str, Any]
Cell = Callable[[Point], str]

AXIS_TITLES = {
    "ratio": "A:F GPU ratio",
    "top_k": "top-k and expert-parallel size",
    "depth": "depth p of the ring, and virtual stages v = layers / p",
    "batch": "global batch, and with it the number of micro-batches",
}
PICTURES = {"ratio": "ratio", "top_k": "topk_ep", "depth": "virtual_stages", "batch": "microbatches"}
"""Stem of the picture of each group; the ratio has one per model."""
READ = (
    "disagmoe has what the setting says and is tuned in everything else; the reference is tuned on the same model,"
    " length, batch and cluster.",
)
EQUAL = "16:16"
"""The split that others are compared with."""


def picture_stems(record: Record) -> Iterator[tuple[str, str, str]]:
    """(axis, model, stem of the file) of every picture of a study; the model is "" where one shows all."""
    for axis in axes_of(record):
        models = [str(m["name"]) for m in record["models"]] if axis == "ratio" else [""]
        for model in models:
            if any(p["axis"] == axis and model in ("", p["model"]) for p in record["points"]):
                yield axis, model, f"{PICTURES[axis]}_{model}" if model else PICTURES[axis]


def picture_lines(record: Record) -> list[str]:
    """The pictures in Markdown."""
    return [line for axis, _, stem in picture_stems(record) for line in ("", f"![{AXIS_TITLES[axis]}]({stem}.png)")]


def axes_of(record: Record) -> list[str]:
    """Groups of points that a study has, in order."""
    return list(dict.fromkeys(str(point["axis"]) for point in record["points"]))


def grids(record: Record, *, brief: bool = False) -> Iterator[Grid]:
    """All tables of a study; see `point_grid`."""
    yield verdict_grid(record["paper"])
    for axis in axes_of(record):
        mine = [point for point in record["points"] if point["axis"] == axis]
        yield point_grid(axis, mine, AXIS_TITLES[axis], brief=brief)


def point_grid(axis: str, points: Sequence[Point], title: str, *, brief: bool = False) -> Grid:
    """The points of one group; `brief` without where the step goes and without the plan."""
    equal = equal_steps(points)
    columns: dict[str, Cell] = {
        "model": lambda p: str(p["model"]),
        "seq": lambda p: length(int(p["seq"])),
        "setting": lambda p: str(p["setting"]),
        "step [s]": step_text,
        f"over {REFERENCE}": lambda p: times(p["speedup_over_reference"]),
    }
    if axis == "ratio":
        columns["over 16:16"] = lambda p: times(gain_over_equal(p, equal))
        columns["per GPU of a group"] = lambda p: times(gain_per_gpu(p, equal))
    for pool in ("A", "F"):
        columns[f"{pool} computes"] = lambda p, pool=pool: _share(p, pool)  # type: ignore[misc]
    columns["EP"] = lambda p: str((p["plan"] or {}).get("ep", DASH))
    columns["memory [GiB]"] = lambda p: DASH if p["needed_gib"] is None else f"{p['needed_gib']:.1f}"
    if brief:
        columns[""] = lambda p: "" if p["status"] == "ok" else str(p["reason"])
    else:
        columns["exposed [s]"] = lambda p: seconds(p["exposed_s"])
        columns["bubble [s]"] = lambda p: seconds(p["bubble_s"])
        columns["micro-batches"] = lambda p: str(p["microbatches"] or DASH)
        columns["GPUs used"] = lambda p: str(p["gpus_used"] or DASH)
        columns["plan of disagmoe"] = lambda p: plan_line(p["plan"]) or str(p["reason"])
    cells = tuple(tuple(cell(point) for cell in columns.values()) for point in points)
    return Grid(title, tuple(columns), cells, frozenset({0, 2, len(columns) - 1}))


def _share(point: Point, pool: str) -> str:
    """How much of the step the GPUs of a pool compute."""
    share = point["pool_compute"].get(pool)
    return DASH if share is None else f"{100 * share:.0f} %"


def _where(point: Point) -> tuple[str, int, str]:
    """What points must share to be compared by their ratio."""
    return str(point["model"]), int(point["seq"]), str(point["at"].get("nics", ""))


def equal_steps(points: Sequence[Point]) -> dict[tuple[str, int, str], float]:
    """Seconds of the equal split, by model, length and NIC rule."""
    return {_where(p): float(p["step_s"]) for p in points if p["at"].get("ratio") == EQUAL and p["status"] == "ok"}


def gain_over_equal(point: Point, equal: Mapping[tuple[str, int, str], float]) -> float | None:
    """Step at 16:16 ÷ step here; None where one of them did not run."""
    base = equal.get(_where(point))
    return None if base is None or point["status"] != "ok" else base / float(point["step_s"])


def gain_per_gpu(point: Point, equal: Mapping[tuple[str, int, str], float]) -> float | None:
    """The same per GPU of the two groups."""
    gain = gain_over_equal(point, equal)
    return None if gain is None else gain * 32 / sum(int(part) for part in str(point["at"]["ratio"]).split(":"))


def step_text(point: Point) -> str:
    """Seconds of a step, or why there is none."""
    return seconds(point["step_s"]) if point["status"] == "ok" else str(point["status"]).replace("_", " ")


def verdict_grid(entries: Sequence[Mapping[str, Any]]) -> Grid:
    """Every claim beside ours."""
    cells = [
        (
            *(str(entry["claim"]), paper.range_text(entry), paper.value_text(entry["ours"], str(entry["unit"]))),
            *(str(entry["model"]), length(int(entry["seq"])), str(entry["setting"]) or DASH),
            *(str(entry["verdict"]), str(entry["note"])),
        )
        for entry in entries
    ]
    headings = ("claim", "paper, measured", "ours", "model", "seq", "setting", "verdict", "note")
    return Grid("Beside the paper", headings, tuple(cells), frozenset({0, 3, 5, 6, 7}))
