"""Decides how a small table of texts looks in Markdown and on the terminal; both say the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Grid:
    """A titled table; columns whose number is in `left` are texts, the others numbers."""

    title: str
    headings: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})


def escaped(text: str) -> str:
    """One line, no character that Markdown would read as a cell border, emphasis or a tag."""
    flat = " ".join(text.split())
    for mark in ("\\", "|", "*", "_", "<"):
        flat = flat.replace(mark, f"\\{mark}")
    return flat


def markdown_lines(grid: Grid, level: int = 2) -> Iterator[str]:
    """The lines of a table under its title."""
    yield from ("", f"{'#' * level} {escaped(grid.title)}", "")
    yield from table_lines(grid)


def table_lines(grid: Grid) -> Iterator[str]:
    """The table alone."""
    yield _row(grid.headings)
    yield f"|{'|'.join('---' if at in grid.left else '---:' for at in range(len(grid.headings)))}|"
    yield from map(_row, grid.cells)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


def rich_table(grid: Grid) -> Table:
    """The same table for the terminal; the last column folds where it is a text."""
    table = Table(title=Text(grid.title, style="italic"), title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    last = len(grid.headings) - 1
    for at, heading in enumerate(grid.headings):
        justify: JustifyMethod = "left" if at in grid.left else "right"
        table.add_column(Text(heading), justify=justify, no_wrap=at < last, overflow="fold")
    for row in grid.cells:
        table.add_row(*(Text(cell) for cell in row))
    return table
