"""Decides how a study is told: <kind>.md and .csv with its pictures, and crossings.csv or verdicts.csv beside them.

Everything comes from the record; every title says that the numbers are simulated.
The tables of single claims are `points.py`'s.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.axes import AXES
from bench.report import ablation, points
from bench.report.columns import DASH
from bench.report.facts import ORIGIN, REFERENCE, cluster_text, settings_text
from bench.report.grid import Grid, escaped, markdown_lines, rich_table
from bench.report.text import plan_line, seconds, times

Record = Mapping[str, Any]

CROSSINGS = "crossings.csv"
VERDICTS = "verdicts.csv"
TITLES = {
    "sensitivity": "Sensitivity of DisagMoE's gain",
    "claims": "Runs for single claims of the DisagMoE paper",
    "ratio_sweep": "A:F GPU ratio by sequence length",
    "virtual_stages": "Throughput by virtual stages",
    "topk_ep": "Speed-up by top-k and expert-parallel size",
    "microbatches": "Speed-up by number of micro-batches",
    "plus_ablation": "What every switch of disagmoe_plus is worth",
}
READ = (
    "One thing is changed at a time. Speed-ups are step times of the other system ÷ DisagMoE's, above 1 where DisagMoE"
    " is faster.",
    "Settings marked (disagmoe) change that system alone; full recompute is varied for the baselines that overlap a"
    " forward with a backward (hidden: no combine is repeated, so that a repeat overlaps too). Others stay as at"
    " the base.",
    "Where disagmoe does not fit with the expert-parallel size asked for, it takes the smallest that fits (column EP).",
)


def _effort(record: Record) -> list[str]:
    """How hard the systems were tuned at the points."""
    plans = record["plans"]
    point = "Every point is tuned anew."
    if plans is not None:
        point = (
            "The base is tuned in full. At the other points disagmoe is tuned anew, and every baseline tries the"
            f" {plans} most promising plans of its search at the base."
        )
    return [
        point,
        "Crossings are found by halving between the points: there every system tries the best plans of both ends.",
    ]


def write(directory: Path, record: Record) -> list[Path]:
    """Write the tables and pictures of a study into an existing directory and return the files."""
    kind = str(record["kind"])
    paths = [directory / f"{kind}.md", directory / f"{kind}.csv"]
    paths[0].write_text(markdown(record), encoding="utf-8", newline="\n")
    _write_csv(paths[1], [flat(point) for point in record["points"]])
    if kind == "sensitivity":
        from bench.report.tornado import write_tornado

        paths.append(directory / CROSSINGS)
        _write_csv(paths[-1], record["crossings"])
        return paths + write_tornado(record, directory)
    if kind == ablation.STEM:
        return paths + ablation.write_figures(record, directory)
    from bench.report.point_figures import write_figures

    paths.append(directory / VERDICTS)
    _write_csv(paths[-1], record["paper"])
    return paths + write_figures(record, directory)


def flat(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point with what it was set to as columns of its own."""
    return {key: value for key, value in point.items() if key != "at"} | dict(point.get("at") or {})


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All columns any row has, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _cell(value) for key, value in row.items()})


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plan_line(value)
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "" if value is None else value


def header(record: Record) -> list[tuple[str, str]]:
    """Labelled lines above the tables."""
    workload, kind = record["workload"], str(record["kind"])
    base = f"{workload['global_batch']:,} sequences per step, {record['view']} view"
    lengths = sorted({int(point["seq"]) for point in record["points"] if "seq" in point}) or [int(workload["seq"])]
    titles = ", ".join(f"{m['title']} ({m['name']}, {m['layers']} of {m['of']} layers)" for m in record["models"])
    origin = ORIGIN[str(record["backend"])]
    lines = [
        ("numbers", f"{origin} on {record['cluster']['name']} (calibration {record['calibration']})"),
        ("models", titles),
        ("cluster", cluster_text(record["cluster"])),
        ("base", f"seq {workload['seq']:,}, {base}")
        if kind == "sensitivity"
        else ("points", f"seq {', '.join(f'{seq:,}' for seq in lengths)}, {record['view']} view"),
        ("run", str(record["run"]["id"])),
    ]
    if kind == "sensitivity":
        lines.append(("compared", ", ".join(record["systems"])))
    if settings_text(record):
        lines.append(("settings", settings_text(record)))
    return lines + [("note", str(note)) for note in record["notes"]]


def markdown(record: Record) -> str:
    """The whole report."""
    origin = ORIGIN[str(record["backend"])]
    lines = [f"# {TITLES[str(record['kind'])]} ({origin})", ""]
    lines += [f"- **{name}**: {escaped(text)}" for name, text in header(record)]
    if record["kind"] == "sensitivity":
        lines += ["", *(escaped(text) for text in (*READ, *_effort(record))), "", "![tornado chart](tornado.png)"]
    else:
        told = ablation if record["kind"] == ablation.STEM else points
        effort = [ablation.effort(record)] if told is ablation else []
        lines += ["", *(escaped(text) for text in (*told.READ, *effort)), *told.picture_lines(record)]
    for grid in grids(record):
        lines += markdown_lines(grid)
    return "\n".join(lines) + "\n"


def print_study(record: Record) -> None:
    """The same on the terminal."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=160, color_system=None)
    for name, text in header(record):
        console.print(f"{name:<9} {text}", markup=False)
    for grid in grids(record, brief=True):
        console.print()
        console.print(rich_table(grid))


def grids(record: Record, *, brief: bool = False) -> Iterator[Grid]:
    """The tables of a study, in order; `brief` ones fit a terminal."""
    if record["kind"] == "sensitivity":
        yield crossing_grid(record)
        for model in record["models"]:
            yield _points_grid(record, str(model["name"]), str(model["title"]))
        return
    yield from (ablation if record["kind"] == ablation.STEM else points).grids(record, brief=brief)


def crossing_grid(record: Record) -> Grid:
    """Where DisagMoE stops winning, one line per model and numeric axis."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for crossing in record["crossings"]:
        cells = found.setdefault((str(crossing["model"]), str(crossing["axis"])), {})
        cells[str(crossing["over"])] = crossing_text(crossing)
    overs = list(dict.fromkeys(str(crossing["over"]) for crossing in record["crossings"]))
    return Grid(
        f"Where DisagMoE stops winning ({ORIGIN[str(record['backend'])]}, {record['view']} view)",
        ("model", "varied", *(f"against {'the ' if over != REFERENCE else ''}{over}" for over in overs)),
        tuple((model, AXES[axis].title, *(cells[over] for over in overs)) for (model, axis), cells in found.items()),
        frozenset(range(2 + len(overs))),
    )


def crossing_text(crossing: Mapping[str, Any]) -> str:
    """The crossings of one axis, or that there is none in the range looked at."""
    axis = AXES[str(crossing["axis"])]
    span = f"[{axis.text(float(crossing['low']))}, {axis.text(float(crossing['high']))}]"
    note = f"; {crossing['note']}" if crossing["note"] else ""
    if crossing["ahead"] is None:
        return f"unknown{note}"
    values = [float(value) for value in crossing["values"]]
    if not values:
        return f"none in {span}: {'ahead' if crossing['ahead'] else 'behind'} throughout{note}"
    within = f" ± {axis.text(float(crossing['tolerance']) / 2)}"
    sides = ["ahead" if crossing["ahead"] == (at % 2 == 0) else "behind" for at in range(len(values) + 1)]
    steps = [f"{sides[0]} below {axis.text(values[0])}{within}"]
    steps += [f"{side} up to {axis.text(value)}{within}" for side, value in zip(sides[1:], values[1:], strict=False)]
    return f"{', '.join(steps)}, {sides[-1]} above (in {span}){note}"


def _points_grid(record: Record, name: str, title: str) -> Grid:
    rows = [point for point in record["points"] if point["model"] == name]
    headings = (
        *(
            "varied",
            "setting",
            "EP",
            "step [s]",
            f"over {REFERENCE}",
            "over the best baseline",
            "which is",
            "its step [s]",
        ),
        *("exposed [s]", "bubble [s]", "micro-batches", "plan of disagmoe"),
    )
    return Grid(f"{title} ({name})", headings, tuple(_point_cells(row) for row in rows), frozenset({0, 1, 6, 11}))


def _point_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    axis = AXES[row["axis"]].title if row["axis"] in AXES else "base"
    status = str(row["status"]).replace("_", " ")
    return (
        axis,
        str(row["setting"]) or DASH,
        str(row.get("ep") or DASH),
        seconds(row["step_s"]) if row["status"] == "ok" else status,
        times(row["speedup_over_reference"]),
        times(row["speedup_over_best"]),
        str(row["best_baseline"] or DASH),
        seconds(row["best_step_s"]),
        seconds(row["exposed_s"]),
        seconds(row["bubble_s"]),
        str(row["microbatches"] or DASH),
        plan_line(row["plan"]) or str(row["reason"]),
    )
