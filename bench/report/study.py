"""Decides how a study is told: sensitivity.md, .csv and crossings.csv with the tornado chart, or claims.md and .csv.

Everything comes from the record; every title says that the numbers are simulated.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.axes import AXES
from bench.report.columns import DASH
from bench.report.facts import ORIGIN, REFERENCE, cluster_text, finite, settings_text
from bench.report.grid import Grid, escaped, markdown_lines, rich_table

Record = Mapping[str, Any]

CROSSINGS = "crossings.csv"
TITLES = {"sensitivity": "Sensitivity of DisagMoE's gain", "claims": "Runs for single claims of the DisagMoE paper"}
CLAIM_TITLES = {
    "ratio": "A:F GPU ratio, half of the NICs for each pool",
    "top_k": "top-k and expert-parallel size",
    "depth": "depth p of the ring, and virtual stages v = layers / p",
}
READ = (
    "One thing is changed at a time. Speed-ups are step times of the other system ÷ DisagMoE's, above 1 where DisagMoE"
    " is faster.",
    "Settings marked (disagmoe) change that system alone; the others stay as at the base.",
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
    _write_csv(paths[1], record["points"])
    if kind == "sensitivity":
        from bench.report.tornado import write_tornado

        paths.append(directory / CROSSINGS)
        _write_csv(paths[-1], record["crossings"])
        paths += write_tornado(record, directory)
    return paths


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
        return plan_text(value)
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "" if value is None else value


def plan_text(plan: Mapping[str, Any] | None) -> str:
    """A plan on one line, in the planner's own order."""
    return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in (plan or {}).items())


def header(record: Record) -> list[tuple[str, str]]:
    """Labelled lines above the tables."""
    workload = record["workload"]
    titles = ", ".join(f"{m['title']} ({m['name']}, {m['layers']} of {m['of']} layers)" for m in record["models"])
    origin = ORIGIN[str(record["backend"])]
    lines = [
        ("numbers", f"{origin} on {record['cluster']['name']} (calibration {record['calibration']})"),
        ("models", titles),
        ("cluster", cluster_text(record["cluster"])),
        ("base", f"seq {workload['seq']:,}, {workload['global_batch']:,} sequences per step, {record['view']} view"),
        ("run", str(record["run"]["id"])),
    ]
    if record["kind"] == "sensitivity":
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
    for grid in grids(record):
        lines += markdown_lines(grid)
    return "\n".join(lines) + "\n"


def print_study(record: Record) -> None:
    """The same on the terminal."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=160, color_system=None)
    for name, text in header(record):
        console.print(f"{name:<9} {text}", markup=False)
    for grid in grids(record):
        console.print()
        console.print(rich_table(grid))


def grids(record: Record) -> Iterator[Grid]:
    """The tables of a study, in order."""
    if record["kind"] == "sensitivity":
        yield crossing_grid(record)
        for model in record["models"]:
            yield _points_grid(record, str(model["name"]), str(model["title"]))
        return
    for axis in dict.fromkeys(str(point["axis"]) for point in record["points"]):
        yield _claim_grid(axis, [point for point in record["points"] if point["axis"] == axis])


# ---- sensitivity ----------------------------------------------------------------------------------------------------


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
        plan_text(row["plan"]) or str(row["reason"]),
    )


# ---- claims ---------------------------------------------------------------------------------------------------------


def _claim_grid(axis: str, rows: Sequence[Mapping[str, Any]]) -> Grid:
    headings = (
        *("model", "seq", "setting", "step [s]", f"over {REFERENCE}", "exposed [s]", "bubble [s]", "GPUs used"),
        *("memory [GiB]", "plan of disagmoe"),
    )
    cells = [
        (
            str(row["model"]),
            f"{row['seq']:,}",
            str(row["setting"]),
            seconds(row["step_s"]) if row["status"] == "ok" else str(row["status"]).replace("_", " "),
            times(row["speedup_over_reference"]),
            seconds(row["exposed_s"]),
            seconds(row["bubble_s"]),
            str(row["gpus_used"] or DASH),
            DASH if row["needed_gib"] is None else f"{row['needed_gib']:.1f}",
            plan_text(row["plan"]) or str(row["reason"]),
        )
        for row in rows
    ]
    return Grid(CLAIM_TITLES[axis], headings, tuple(cells), frozenset({0, 2, 9}))


def seconds(value: Any) -> str:
    number = finite(value)
    return DASH if number is None else f"{number:,.4g}"


def times(value: Any) -> str:
    number = finite(value)
    return DASH if number is None else f"{number:.3f}×"
