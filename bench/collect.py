"""`python -m bench.collect [results_dir]`: all runs in one table, and over sequence length.

Of the runs of one configuration the newest counts. A directory without a whole
results.json is named and left out. Writes summary.md and summary.csv (one line
per row of every run) and the by-sequence figures into the results directory.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from bench.report import by_sequence, csv_header, records
from bench.results import STUDY_FILE, Results, load

SECTION = ["backend", "cluster", "calibration", "settings", "model", "depth_used", "view"]
"""What rows must share to stand in one table."""
EXAMPLE = "example"
"""The committed example among the results; its files come from runs beside it."""
ORDER = [*SECTION[:-1], "seq", "global_batch"]
DETAIL = (
    ("step [s]", "step_time_s", "{:.4g}"),
    ("tokens/s/GPU", "tokens_per_s_per_gpu", "{:,.0f}"),
    ("MFU", "mfu", "{:.1%}"),
    ("speedup", "speedup", "{:.2f}×"),
    ("step ÷ bound", "bound_ratio", "{:.2f}×"),
    ("compute [s]", "compute_s", "{:.4g}"),
    ("overlapped [s]", "overlapped_comm_s", "{:.4g}"),
    ("exposed [s]", "exposed_comm_s", "{:.4g}"),
    ("bubble [s]", "bubble_s", "{:.4g}"),
    ("stall [s]", "stall_s", "{:.4g}"),
    ("exposed comm removed by DisagMoE", "exposed_comm_reduction", "{:.1%}"),
    ("stall removed by DisagMoE", "stall_reduction", "{:.1%}"),
)
"""Heading, column and form of the numbers in the long table."""


def newest_runs(results_dir: Path) -> tuple[list[Results], list[str]]:
    """The newest run of every configuration, oldest first, and a line for each directory that holds none."""
    newest: dict[str, Results] = {}
    broken = []
    for directory in sorted(results_dir.iterdir()):
        if not directory.is_dir() or directory.name[0] == "." or directory.name == EXAMPLE:
            continue
        if (directory / STUDY_FILE).is_file():  # many points around one configuration: not a row of any table here
            continue
        try:
            results = load(directory)
        except ValueError as error:
            broken.append(str(error))
            continue
        key = results["run"]["config_id"]
        if key not in newest or _age(newest[key]) < _age(results):
            newest[key] = results
    return sorted(newest.values(), key=_age), broken


def _age(results: Results) -> tuple[str, str]:
    return results["run"]["created"], results["run"]["id"]


def frame_of(runs: Sequence[Results]) -> pd.DataFrame:
    """One line per row of every run, in a fixed order; where rows compare alike the newer run comes later."""
    frame = pd.DataFrame([record for results in runs for record in records(results)], columns=csv_header())
    return frame.sort_values(ORDER, kind="stable", ignore_index=True)


def sections(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Title and rows of every comparison of the summary."""
    for _, part in frame.groupby(SECTION, sort=False, dropna=False):
        row = part.iloc[0]
        yield (
            f"{row['model']} ({row['depth_used']} of {row['depth_of']} layers) on {row['cluster']}, "
            f"{row['view']} view, backend {row['backend']}, calibration {row['calibration']}"
            + (f", {row['settings']}" if _text(row["settings"]) else ""),
            part,
        )


def speedups(part: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table system × sequence length: speed-up, or why there is none."""
    points = list(dict.fromkeys(zip(part["seq"], part["global_batch"], strict=True)))
    several = len({seq for seq, _ in points}) < len(points)
    headings = ["speedup", *(f"{seq:,}{f' (batch {batch:,})' if several else ''}" for seq, batch in points)]
    last: dict[tuple[str, Any, Any], str] = {}
    for row in part.to_dict("records"):
        last[_label(row), row["seq"], row["global_batch"]] = _cell(row, "speedup", "{:.2f}×")
    labels = dict.fromkeys(label for label, _, _ in last)
    return headings, [[label, *(last.get((label, *point), "") for point in points)] for label in labels]


def details(part: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the long table of one comparison."""
    headings = ["seq", "batch", "system", *(heading for heading, _, _ in DETAIL), "plan", "run"]
    cells = [
        [f"{row['seq']:,}", f"{row['global_batch']:,}", _label(row)]
        + [_cell(row, column, form) for _, column, form in DETAIL]
        + [_text(row["plan"]), row["run_id"]]
        for row in part.to_dict("records")
    ]
    return headings, cells


def _label(row: dict[Any, Any]) -> str:
    return f"{row['system']} ({row['variant']})" if _text(row["variant"]) else str(row["system"])


def _cell(row: dict[Any, Any], column: str, form: str) -> str:
    """A number in its form; the status where the row did not run, empty where there is no such number."""
    if row["status"] != "ok":
        return str(row["status"]).replace("_", " ") if column in ("speedup", "step_time_s") else ""
    value = row[column]
    return form.format(value) if value is not None and math.isfinite(value) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def markdown(frame: pd.DataFrame, runs: int) -> str:
    """summary.md."""
    about = f"{runs} runs, the newest of each configuration. Speed-ups are over megatron_1f1b of the same view."
    lines = ["# Summary", "", about]
    for title, part in sections(frame):
        lines += ["", f"## {title}", "", *_grid(*speedups(part)), "", *_grid(*details(part))]
    return "\n".join(lines) + "\n"


def _grid(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---" if heading in ("speedup", "system", "plan", "run") else "---:" for heading in headings]
    rows = [[cell.replace("|", "\\|").replace("_", "\\_") for cell in row] for row in (headings, *cells)]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


def write_text(path: Path, text: str) -> None:
    """Write a file so that readers see the old content or the new."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    temporary.replace(path)


def collect(results_dir: Path) -> list[Path]:
    """Write the summary of a results directory; returns the files. Raises ValueError where it holds no run."""
    if not results_dir.is_dir():
        raise ValueError(f"nothing to collect: there is no directory {results_dir}")
    runs, broken = newest_runs(results_dir)
    for line in broken:
        print(f"warning: left out {line}", file=sys.stderr)
    if not runs:
        raise ValueError(f"nothing to collect: {results_dir} holds no whole run")
    frame = frame_of(runs)
    summary, table = results_dir / "summary.md", results_dir / "summary.csv"
    write_text(summary, markdown(frame, len(runs)))
    write_text(table, frame.to_csv(index=False, lineterminator="\n"))
    _show(frame)
    return [summary, table, *by_sequence(results_dir, frame)]


def _show(frame: pd.DataFrame) -> None:
    """The speed-ups on the terminal."""
    console = Console()
    for title, part in sections(frame):
        headings, cells = speedups(part)
        table = Table()
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place else "left")
        for row in cells:
            table.add_row(*row)
        console.print(f"\n{title}", highlight=False)
        console.print(table)


def results_command(
    module: str, doc: str | None, write: Callable[[Path], list[Path]], arguments: Sequence[str] | None
) -> int:
    """The command of a module that writes files from a results directory; the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").split("\n\n")[0])
    parser.add_argument("results_dir", nargs="?", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    try:
        for path in write(options.results_dir):
            print(path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return results_command("bench.collect", __doc__, collect, arguments)


if __name__ == "__main__":
    sys.exit(main())
