"""Decides how the switches of `disagmoe_plus` are told: which tables, and a heat map of gains and one of margins.

All gains are of simulated steps. "Before" is `disagmoe`, "after" the search over all
switches, both over the fastest baseline of their cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.report.ablation_cells import (
    ALL,
    NONE,
    Cell,
    Place,
    Point,
    Record,
    by_cell,
    places,
    switches_of,
)
from bench.report.ablation_tables import tables
from bench.report.columns import DASH
from bench.report.facts import ORIGIN, finite
from bench.report.grid import Grid
from bench.report.heat import draw_cells, gain_norm
from bench.report.style import axes_at, canvas, drawing, footer, headline, save
from bench.report.text import length

READ = (
    "Every switch alone has all others off, so that it stands beside disagmoe; `all` is the search as it is shipped."
    " Gains are step times of the other system ÷ own: above 1 where ours is faster.",
    "A switch that is on may find no plan: it forces what it says (hybrid: attention and experts together;"
    " balanced_map: only where layers differ).",
)
STEM = "plus_ablation"


def effort(record: Record) -> str:
    """How hard each row was tuned."""
    plans = record["plans"]
    anew = "in full" if plans is None else f"with {plans} plans per round"
    return (
        "disagmoe, the baselines and `all` are tuned in full in every cell. A switch alone is tried on the split that"
        " disagmoe chose there, with every refinement the planner has for it; free_groups, shared_nodes, other_depths"
        f" and hybrid, which are about the split, are searched for {anew} too, and the faster plan counts. At another"
        " batch disagmoe and `all` try their best plans of the default batch too."
    )


def grids(record: Record, *, brief: bool = False) -> Iterator[Grid]:
    """All tables: what is won, every cell, every switch, every bound."""
    yield from tables(record, brief=brief)


def figures(record: Record) -> Iterator[tuple[str, Figure]]:
    """Stem and picture."""
    for place in places(record):
        if len(switches_of(record, place)) > 1:
            yield f"{STEM}_{place.exchange}_{place.calibration}", heat_map(record, place)
    for calibration in dict.fromkeys(place.calibration for place in places(record)):
        yield f"{STEM}_margins_{calibration}", margin_map(record, calibration)


def picture_lines(record: Record) -> list[str]:
    """The pictures in Markdown."""
    return [line for stem, _ in figures(record) for line in ("", f"![{stem.replace('_', ' ')}]({stem}.png)")]


def write_figures(record: Record, directory: Path) -> list[Path]:
    """Heat maps of switches by cells per exchange and calibration, and of margins, as PNG and SVG."""
    paths: list[Path] = []
    with drawing():
        for stem, figure in figures(record):
            both = [directory / f"{stem}.png", directory / f"{stem}.svg"]
            save(figure, *both)
            paths += both
    return paths


def heat_map(record: Record, place: Place) -> Figure:
    """Gain over disagmoe of every switch (lines) in every cell (columns)."""
    cells, switches = by_cell(record, place), switches_of(record, place)
    points = [[cell.get(switch) for cell in cells.values()] for switch in switches]
    figure = _map(list(cells), switches, points, "gain_over_disagmoe")
    headline(figure, "Gain of every switch over DisagMoE", f"{_origin(record)}, {place.text}")
    footer(figure, f"step of disagmoe ÷ own; each alone, and the search over all\nrun {record['run']['id']}")
    return figure


def margin_map(record: Record, calibration: str) -> Figure:
    """Over the fastest baseline, before and after, by exchange and batch (lines) in every cell (columns)."""
    chosen = [place for place in places(record) if place.calibration == calibration]
    columns = list(dict.fromkeys(cell for place in chosen for cell in by_cell(record, place)))
    lines, points = [], []
    for place in chosen:
        found = by_cell(record, place)
        for name, title in ((NONE, "disagmoe"), (ALL, "disagmoe_plus")):
            batch = "" if place.batch == 1.0 else f", {place.batch:g}×"
            lines.append(f"{title}, {place.exchange}{batch}")
            points.append([found.get(cell, {}).get(name) for cell in columns])
    figure = _map(columns, lines, points, "speedup_over_best")
    headline(figure, "Over the fastest baseline", f"{_origin(record)}, calibration {calibration}")
    footer(figure, f"step of the fastest baseline of the cell ÷ own\nrun {record['run']['id']}")
    return figure


def _origin(record: Record) -> str:
    return f"{ORIGIN[str(record['backend'])]} on {record['cluster']['name']}"


def _map(columns: Sequence[Cell], lines: Sequence[str], points: Sequence[Sequence[Point | None]], key: str) -> Figure:
    """One number of points as coloured cells, the first line on top."""
    upwards, titles = list(points)[::-1], list(lines)[::-1]
    gains = [[None if point is None else finite(point[key]) for point in line] for line in upwards]
    texts = [
        [_short(point) if gain is None else f"{gain:.2f}" for point, gain in zip(line, values, strict=True)]
        for line, values in zip(upwards, gains, strict=True)
    ]
    across, down = 0.84 * len(columns), 0.32 * len(lines)
    width, height = 2.2 + across + 0.5, 1.75 + down
    figure = canvas(width, height)
    axes = axes_at(figure, 2.2, 0.95, across, down)
    draw_cells(axes, gains, texts, gain_norm(gain for line in gains for gain in line), 7.5)
    axes.set_yticks(range(len(titles)), titles)
    axes.set_xticks(range(len(columns)), [f"{model}\n{length(seq)}" for model, seq in columns], fontsize=7)
    return figure


def _short(point: Point | None) -> str:
    words = {"oom": "OOM", "not_applicable": "n/a", "failed": "failed", "ok": "runs"}
    return DASH if point is None else words[str(point["status"])]
