"""Reports of a run: tables always, pictures and traces where they are asked for.

`write` fills a run directory, `print_tables` talks to the terminal,
`by_sequence` draws a collection of runs, `records` gives the rows of a run as
flat records with the columns of table.csv, and `compare` holds a run against
the published DisagMoE results. All of them read the results record and add no
number of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.report.columns import csv_header, records
from bench.report.facts import Results, facts, row_label
from bench.report.paper import compare
from bench.report.tables import csv_text, markdown, print_tables
from bench.selection import WHOLE, Selection
from bench.side_by_side import in_order
from disagmoe.plan.memory_report import MemoryReport
from disagmoe.plan.plan import Layout
from disagmoe.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["by_sequence", "compare", "csv_header", "print_tables", "records", "write"]

ARTIFACTS = ("tables", "all")


class Drawable(Protocol):
    """What stands behind a row: enough to draw it; None where nothing ran."""

    @property
    def layout(self) -> Layout | None: ...

    @property
    def timeline(self) -> Timeline | None: ...

    @property
    def memory(self) -> MemoryReport | None: ...


class Drawables(Protocol):
    """Outcomes parallel to the rows of the results."""

    @property
    def outcomes(self) -> Sequence[Drawable]: ...


def write(
    directory: Path,
    results: Results,
    evaluation: Drawables,
    artifacts: str = "all",
    on_file: Callable[[str], None] | None = None,
    selection: Selection = WHOLE,
) -> list[Path]:
    """Write the report of one run into an existing directory and return the files, in order.

    `artifacts` is "tables" (table.md, table.csv) or "all" (also the bar
    pictures, and one Gantt and one Perfetto trace per row that ran, both of the
    part that `selection` names). `on_file` hears which files come next.
    """
    if artifacts not in ARTIFACTS:
        raise ValueError(f"artifacts={artifacts!r}: allowed are {', '.join(ARTIFACTS)}")
    if len(evaluation.outcomes) != len(results["rows"]):
        raise ValueError(f"{len(evaluation.outcomes)} outcomes for {len(results['rows'])} rows: there must be one each")
    hear = on_file or (lambda name: None)
    paths = []
    for name, text in (("table.md", markdown), ("table.csv", csv_text)):
        hear(name)
        paths.append(directory / name)
        paths[-1].write_text(text(results), encoding="utf-8", newline="\n")
    if artifacts == "all":
        paths += _pictures(directory, results, evaluation, hear, selection)
    return paths


def _pictures(
    directory: Path, results: Results, evaluation: Drawables, hear: Callable[[str], None], selection: Selection
) -> list[Path]:
    # Imported here so that tables need no matplotlib, and before there are processes, so that it is loaded once.
    from bench.report.bars import write_bars

    hear("speedup, breakdown")
    paths = write_bars(results, directory)
    drawn = [
        (row, outcome)
        for row, outcome in zip(results["rows"], evaluation.outcomes, strict=True)
        if outcome.layout is not None and outcome.timeline is not None
    ]
    # A process that has executed plans may have threads, which do not survive a fork.
    forked = all(outcome.timeline.origin == "simulated" for _, outcome in drawn if outcome.timeline is not None)
    work = [partial(_pictures_of, directory, results, *pair, selection) for pair in drawn]
    made = in_order(work, None if forked else 1)
    for row, _ in drawn:
        hear(f"timeline_{file_stem(row)}.png")
        paths += next(made)
    return paths


def _pictures_of(
    directory: Path, results: Results, row: Mapping[str, Any], outcome: Drawable, selection: Selection
) -> list[Path]:
    """Timeline, memory and trace of one row that ran."""
    from bench.report.gantt import write_gantt
    from bench.report.memory import write_memory
    from disagmoe.timeline.trace import write_trace

    if outcome.layout is None or outcome.timeline is None:
        return []
    text, stem, view = facts(results), file_stem(row), str(row["view"])
    picture = directory / f"timeline_{stem}.png"
    paths = [write_gantt(results, row_label(row), view, outcome.timeline, outcome.layout, picture, selection)]
    if outcome.memory is not None:
        paths += write_memory(
            outcome.memory,
            directory,
            stem,
            # The narrowest picture has room for about 75 characters.
            subtitle=f"{row_label(row)}, {view} view · {results['model']['name']} · {text.sequence} · {text.where}",
            limit_gib=float(row["memory_limit_gib"]),
            device_gib=float(results["cluster"]["memory_gib"]),
        )
    trace = directory / f"trace_{stem}.json.gz"
    title = f"{row_label(row)}, {view} view, {outcome.timeline.origin}, {results['model']['name']}"
    write_trace(outcome.timeline, outcome.layout, trace, title, window_s=selection.window_s)
    return [*paths, trace]


def file_stem(row: Mapping[str, Any]) -> str:
    """ "<view>_<system>[-<variant>][-native]" with characters that are safe in file names."""
    parts = [str(row["system"])]
    if row.get("variant"):
        parts.append(str(row["variant"]))
    if row.get("implementation") == "native":
        parts.append("native")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{row['view']}_{'-'.join(parts)}")


def by_sequence(results_dir: Path, frame: pd.DataFrame) -> list[Path]:
    """Draw speed-up, exposed communication and stall over sequence length; see bench/report/sequence.py."""
    from bench.report.sequence import by_sequence as draw

    return draw(results_dir, frame)
