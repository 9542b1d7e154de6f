"""Decides how a run is told in tables: on the terminal, in table.md and in table.csv.

All three are rendered from the column definitions of `columns.py`, one section
per view, so a number can never differ between them by more than its rounding.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from bench.report.columns import (
    DASH,
    LEGEND,
    PLAN,
    SPEED,
    STAR,
    TABLES,
    Column,
    Row,
    Units,
    csv_header,
    records,
    units,
)
from bench.report.facts import Results, facts, finite, header, row_label, view_rows, views
from bench.report.paper import range_text, value_text

WIDTH = 140
"""Columns of a terminal the tables are made for, and the width used when piped."""

PAPER_TITLE = "Against the DisagMoE paper (arXiv 2605.11005)"
STATUS_STYLE = {"oom": "red", "failed": "red", "not_applicable": "dim"}


@dataclass(frozen=True)
class Section:
    """One rendered table: texts only, ready for any output."""

    title: str
    headings: tuple[str, ...]
    right: tuple[bool, ...]
    cells: tuple[tuple[str, ...], ...]
    styles: tuple[str, ...]


def sections(rows: Sequence[Row], unit: Units) -> Iterator[Section]:
    """The tables of one view. Only rows that ran appear where times are broken down."""
    ran = [row for row in rows if row["status"] == "ok"]
    steps = [step for step in (finite(row.get("step_time_s")) for row in ran) if step is not None]
    fastest = min(steps, default=None)
    for title, columns in TABLES:
        shown, kept = (rows if columns is SPEED else ran), columns
        if columns not in (SPEED, PLAN):
            kept = _filled(columns, shown, unit)
            shown = [row for row in shown if any(column.text(row, unit) != DASH for column in kept[1:])]
        if shown and len(kept) > 1:
            yield Section(
                title=unit.heading(title),
                headings=tuple(column.title(unit) for column in kept),
                right=tuple(column.right for column in kept),
                cells=tuple(tuple(column.text(row, unit) for column in kept) for row in shown),
                styles=tuple(_style(row, fastest) for row in shown),
            )


def _filled(columns: Sequence[Column], rows: Sequence[Row], unit: Units) -> tuple[Column, ...]:
    """Columns in which at least one row has a value (a system without pools has no pool columns)."""
    return tuple(column for column in columns if any(column.text(row, unit) != DASH for row in rows))


def _style(row: Row, fastest: float | None) -> str:
    if row["status"] != "ok":
        return STATUS_STYLE.get(str(row["status"]), "")
    return "bold" if fastest is not None and row.get("step_time_s") == fastest else ""


def remarks(rows: Sequence[Row]) -> list[str]:
    """One line for every row that has no step time, and one for tokens dropped: what happened and why."""
    lines = []
    for row in rows:
        reason = " ".join(str(row.get("reason") or "").split())
        if row["status"] == "oom":
            needed, limit = finite(row.get("peak_memory_gib")), finite(row.get("memory_limit_gib"))
            if needed is not None and limit is not None and f"{needed:.1f}" not in reason:
                sizes = f"needs {needed:.1f} GiB per GPU, {limit:.1f} GiB available"
                reason = f"{sizes}; {reason}" if reason else sizes
            lines.append(f"{row_label(row)}: out of memory: {reason}")
        elif row["status"] != "ok":
            lines.append(f"{row_label(row)}: {str(row['status']).replace('_', ' ')}: {reason or 'no reason recorded'}")
        elif finite(row.get("tokens_dropped")):
            lines.append(f"{row_label(row)}: {row['tokens_dropped']:,} tokens dropped")
    return lines


def legend(rows: Sequence[Row]) -> list[str]:
    """What the columns mean; the star is explained only where it appears."""
    starred = any(row["status"] == "ok" and finite(row.get("wait_s")) is None for row in rows)
    return [*LEGEND, STAR] if starred else list(LEGEND)


def paper_headings(results: Results) -> tuple[str, ...]:
    """Headings of the paper comparison; they say how either side came about."""
    return "claim", "paper, measured", f"ours, {facts(results).origin}", "verdict", "note"


def paper_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the paper comparison as text."""
    ours = value_text(finite(row["ours"]), str(row.get("unit", "x")))
    return str(row["claim"]), range_text(row), ours, str(row["verdict"]), str(row["note"])


# ---- terminal -------------------------------------------------------------------------------------------------------


def print_tables(results: Results, file: TextIO | None = None) -> None:
    """Print header, one section per view and the paper comparison.

    A terminal is used at its own width and with colours; anything else gets
    plain lines of at most WIDTH columns.
    """
    out = file or sys.stdout
    if out.isatty():
        _print(results, Console(file=out, highlight=False))
        return
    plain = io.StringIO()
    _print(results, Console(file=plain, highlight=False, width=WIDTH, color_system=None, legacy_windows=False))
    text = "".join(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines())
    encoding = getattr(out, "encoding", None) or "utf-8"
    # An ASCII pipe shows "?" for "×" instead of failing the run.
    out.write(text.encode(encoding, errors="replace").decode(encoding))


def _print(results: Results, out: Console) -> None:
    out.print(_heading("DisagMoE suite"))
    out.print(_header_grid(results))
    unit = units(results, results["rows"])
    for view in views(results["rows"]):
        rows = view_rows(results, view)
        out.print(_heading(f"{view} view, {facts(results).provenance}"))
        for section in sections(rows, unit):
            out.print(_rich_table(section))
            out.print()
        out.print(_lines(remarks(rows)))
    out.print(_lines(legend(results["rows"]), style="dim"))
    if results.get("paper"):
        out.print(_heading(PAPER_TITLE))
        out.print(_paper_table(results))


def _heading(text: str) -> Rule:
    return Rule(Text(text, style="bold"), align="left", style="dim")


def _lines(lines: Sequence[str], style: str = "") -> Padding:
    """Lines that stay indented where they wrap."""
    grid = Table.grid()
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row(Text(line, style=style))
    return Padding(grid, (0, 0, 1, 1) if lines else 0)


def _header_grid(results: Results) -> Padding:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in header(results):
        grid.add_row(name, Text(text))
    return Padding(grid, (0, 0, 1, 1))


def _bare_table(title: str | None = None) -> Table:
    shape = {"box": SIMPLE_HEAD, "show_edge": False, "padding": (0, 1), "pad_edge": True}
    return Table(title=Text(title, style="italic") if title else None, title_justify="left", **shape)  # type: ignore[arg-type]


def _rich_table(section: Section) -> Table:
    table = _bare_table(f" {section.title}")
    last = len(section.headings) - 1
    for index, (heading, right) in enumerate(zip(section.headings, section.right, strict=True)):
        folds = index == last and not right
        justify: JustifyMethod = "right" if right else "left"
        table.add_column(Text(heading), justify=justify, no_wrap=not folds, overflow="fold")
    for cells, style in zip(section.cells, section.styles, strict=True):
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _paper_table(results: Results) -> Table:
    table = _bare_table()
    for heading in paper_headings(results):
        justify: JustifyMethod = "right" if heading.startswith(("paper", "ours")) else "left"
        table.add_column(Text(heading.replace(", ", ",\n")), justify=justify, overflow="fold")
    for row in results["paper"]:
        style = {"inside": "green", "outside": "yellow"}.get(str(row["verdict"]), "dim")
        table.add_row(*(Text(cell) for cell in paper_cells(row)), style=style)
    return table


# ---- Markdown -------------------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    """The whole report as Markdown."""
    lines = ["# DisagMoE suite", ""]
    lines += [f"- **{name}**: {_escape(text)}" for name, text in header(results)]
    unit = units(results, results["rows"])
    for view in views(results["rows"]):
        rows = view_rows(results, view)
        lines += ["", f"## {view} view, {_escape(facts(results).provenance)}"]
        for section in sections(rows, unit):
            lines += ["", f"### {section.title}", ""]
            lines += _markdown_table(section.headings, section.right, section.cells)
        if remarks(rows):
            lines += ["", *(f"- {_escape(line)}" for line in remarks(rows))]
    lines += ["", "## How to read the columns", "", *(f"- {_escape(line)}" for line in legend(results["rows"]))]
    if results.get("paper"):
        lines += ["", f"## {PAPER_TITLE}", ""]
        cells = [paper_cells(row) for row in results["paper"]]
        lines += _markdown_table(paper_headings(results), (False, True, True, False, False), cells)
    return "\n".join(lines) + "\n"


def _markdown_table(headings: Sequence[str], right: Sequence[bool], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(_escape(heading) for heading in headings)} |"
    yield f"|{'|'.join('---:' if side else '---' for side in right)}|"
    for row in cells:
        yield f"| {' | '.join(_escape(cell) for cell in row)} |"


def _escape(text: str) -> str:
    """One line, no character that Markdown would read as a cell border, emphasis or a tag."""
    flat = " ".join(text.split())
    for mark in ("\\", "|", "*", "_", "<"):
        flat = flat.replace(mark, f"\\{mark}")
    return flat


# ---- CSV ------------------------------------------------------------------------------------------------------------


def csv_text(results: Results) -> str:
    """One header and one line per row; "." decimals in any locale, empty where there is no value."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=csv_header(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records(results))
    return out.getvalue()
