"""The committed record of the ablation: as little of study.json as the page of `disagmoe_plus` needs.

Decides what is kept: steps, losses, memory and the shape of every plan, to six digits.
What is compared (gains, the best baseline of a cell) is worked out again when it is
read, so that no number can disagree with those it comes from.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.identity import ROOT
from bench.report.facts import finite
from bench.results import Results
from bench.switch_trials import NONE

FOLDER = ROOT / "results" / "example" / "plus_ablation"
HEAD, POINTS = "record.json", "points.csv"
PLACE = ("calibration", "exchange", "batch")
WORDS = ("model", "axis", "setting", "status", "reason", "bound_by")
COUNTS = ("seq", "microbatches")
NUMBERS = ("step_s", "exposed_s", "bubble_s", "bound_ratio", "needed_gib")
SHAPE = (
    *("form", "schedule", "pp", "virtual_stages", "parts", "p", "dp", "A:F", "F_groups", "layers_apart", "layers"),
    *("recompute", "recompute_attention", "recompute_ffn"),
)
"""What is kept of a plan."""
COLUMNS = (*PLACE, *WORDS[:1], *COUNTS[:1], *WORDS[1:5], *NUMBERS, *WORDS[5:], *COUNTS[1:], "plan")


def write(record: Results, folder: Path = FOLDER) -> list[Path]:
    """Keep a study; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in record.items() if key != "points"}
    run = {key: head["run"][key] for key in ("id", "config_id", "command", "created", "git", "versions")}
    text = json.dumps({**head, "run": run}, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_line(point) for point in record["points"])
    paths = [folder / HEAD, folder / POINTS]
    for path, content in zip(paths, (text, file.getvalue()), strict=True):
        path.write_text(content, encoding="utf-8", newline="\n")
    return paths


def _line(point: Mapping[str, Any]) -> dict[str, str]:
    """A point as texts; what it does not have is empty."""
    told = point["axis"] not in ("system", "replay")  # of these only the numbers
    plan = (point.get("plan") or {}) if told else {}
    shape = ";".join(f"{key}={plan[key]}" for key in SHAPE if key in plan)
    line = {key: str(point["at"][key]) for key in PLACE if key != "batch"}
    line |= {"batch": f"{point['at']['batch']:g}", "plan": shape}
    line |= {key: str(point.get(key) or "") if told or key != "reason" else "" for key in WORDS}
    line |= {key: "" if point.get(key) is None else str(point[key]) for key in COUNTS}
    return line | {key: "" if finite(point.get(key)) is None else f"{point[key]:.6g}" for key in NUMBERS}


def read(folder: Path = FOLDER) -> Results:
    """The kept study, its points compared again. Raises ValueError (one line) where there is none."""
    try:
        record = json.loads((folder / HEAD).read_text(encoding="utf-8"))
        lines = list(csv.DictReader(io.StringIO((folder / POINTS).read_text(encoding="utf-8"))))
    except OSError as error:
        raise ValueError(f"{folder}: no record of the ablation: {error.strerror}") from None
    assert isinstance(record, dict)
    record["points"] = list(_compared([_point(line) for line in lines]))
    return record


def _point(line: Mapping[str, str]) -> dict[str, Any]:
    point: dict[str, Any] = {key: line[key] for key in WORDS}
    point |= {key: int(line[key]) if line[key] else None for key in COUNTS}
    point |= {key: float(line[key]) if line[key] else None for key in NUMBERS}
    at = {"calibration": line["calibration"], "exchange": line["exchange"], "batch": float(line["batch"])}
    return point | {"at": at, "plan": dict(pair.split("=", 1) for pair in line["plan"].split(";") if pair) or None}


def _compared(points: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The points with gains over `disagmoe` and over the best baseline of their cell."""
    plain: dict[tuple[Any, ...], float] = {}
    best: dict[tuple[Any, ...], tuple[float, str]] = {}
    for point in points:
        if point["status"] == "ok" and point["axis"] == "switch" and point["setting"] == NONE:
            plain[_cell(point)] = point["step_s"]
        if point["status"] == "ok" and point["axis"] == "system":
            found = (point["step_s"], point["setting"])
            best[_cell(point)] = min(best.get(_cell(point), found), found)
    for point in points:
        cell = _cell(point)
        step, (best_s, name) = point["step_s"], best.get(cell, (None, None))
        yield {
            **point,
            "gain_over_disagmoe": plain[cell] / step if step and cell in plain else None,
            "best_baseline": name,
            "best_step_s": best_s,
            "speedup_over_best": best_s / step if step and best_s else None,
        }


def _cell(point: Mapping[str, Any]) -> tuple[Any, ...]:
    return (point["model"], point["seq"], *(point["at"][key] for key in PLACE))
