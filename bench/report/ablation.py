"""Decides how the switches of `disagmoe_plus` are told: cells won, every cell with what binds it, gains and a heat map.

All gains are of simulated steps. "Before" is `disagmoe`, "after" the search over all
switches, both over the fastest baseline of their cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from bench.report.columns import DASH
from bench.report.facts import ORIGIN, finite
from bench.report.grid import Grid
from bench.report.heat import draw_cells, gain_norm
from bench.report.style import canvas, drawing, footer, headline, save
from bench.report.text import length, seconds, times

Point = Mapping[str, Any]
Record = Mapping[str, Any]
Place = tuple[str, str]
"""Calibration and exchange: what the cells of one table share."""

NONE, ALL = "none", "all"
READ = (
    "Every switch alone has all others off, so that it stands beside disagmoe; `all` is the search as it is shipped."
    " Gains are step times of the other system ÷ own: above 1 where ours is faster.",
    "A switch that is on may find no plan: it forces what it says (hybrid: attention and experts together;"
    " balanced_map: only where layers differ).",
)
STEM = "plus_ablation"


def places(record: Record) -> list[Place]:
    """What tables there are, in the order of the points."""
    found = ((str(p["at"]["calibration"]), str(p["at"]["exchange"])) for p in record["points"])
    return list(dict.fromkeys(found))


def _of(record: Record, place: Place) -> list[Point]:
    at = {"calibration": place[0], "exchange": place[1]}
    return [point for point in record["points"] if point["at"] == at]


def _by_cell(points: Sequence[Point]) -> dict[tuple[str, int], dict[str, Point]]:
    """Model and length -> switch -> point."""
    found: dict[tuple[str, int], dict[str, Point]] = {}
    for point in points:
        found.setdefault((str(point["model"]), int(point["seq"])), {})[str(point["setting"])] = point
    return found


def _switches(points: Sequence[Point]) -> list[str]:
    return [name for name in dict.fromkeys(str(p["setting"]) for p in points) if name != NONE]


def grids(record: Record, *, brief: bool = False) -> Iterator[Grid]:
    """All tables: what is won, every cell, every switch."""
    yield won_grid(record)
    for place in places(record):
        points = _of(record, place)
        yield cell_grid(place, points)
        if len(_switches(points)) > 1 and not brief:
            yield switch_grid(place, points)


def won_grid(record: Record) -> Grid:
    """Cells won over the fastest baseline, before and after, with the margins after."""
    lines = []
    for place in places(record):
        cells = _by_cell(_of(record, place)).values()
        before, after = ([finite(cell[name]["speedup_over_best"]) for cell in cells] for name in (NONE, ALL))
        margins = [gain for gain in after if gain is not None]
        lines.append(
            (
                *place,
                f"{_won(before)} of {len(before)}",
                f"{_won(after)} of {len(after)}",
                *(times(pick(margins)) if margins else DASH for pick in (min, median, max)),
            )
        )
    headings = ("calibration", "exchange", "won by disagmoe", "by disagmoe_plus", "least", "median", "most")
    return Grid("Cells won over the fastest baseline", headings, tuple(lines), frozenset({0, 1}))


def _won(gains: Sequence[float | None]) -> int:
    return sum(gain is not None and gain > 1.0 for gain in gains)


def cell_grid(place: Place, points: Sequence[Point]) -> Grid:
    """Every cell before and after, and by which resource what is left is lost."""
    lines = []
    for (model, seq), cell in _by_cell(points).items():
        before, after = cell[NONE], cell[ALL]
        lines.append(
            (
                model,
                length(seq),
                str(after["best_baseline"] or DASH),
                seconds(after["best_step_s"]),
                times(before["speedup_over_best"]),
                seconds(after["step_s"]),
                times(after["speedup_over_best"]),
                times(after["bound_ratio"]),
                reason(after),
            )
        )
    headings = (
        *("model", "seq", "best baseline", "its step [s]", "disagmoe over it", "disagmoe_plus [s]"),
        *("over best baseline", "step ÷ bound", "what is above the bound"),
    )
    return Grid(f"Every cell: {place[1]}, calibration {place[0]}", headings, tuple(lines), frozenset({0, 1, 2, 8}))


def reason(point: Point) -> str:
    """What binds, what is exposed and what idles."""
    step = finite(point["step_s"])
    if step is None:
        return str(point["reason"] or point["status"])
    plan = point["plan"] or {}
    shares = [
        f"{name} {100.0 * float(value) / step:.0f} %"
        for name, value in (("exposed", finite(point["exposed_s"])), ("idle", finite(point["bubble_s"])))
        if value is not None
    ]
    again = "recompute" if any(str(key).startswith("recompute") for key in plan) else ""
    form = " ".join(str(plan[key]) for key in ("form", "schedule") if key in plan)
    return ", ".join(part for part in (f"{point['bound_by']} binds", *shares, again, form) if part)


def switch_grid(place: Place, points: Sequence[Point]) -> Grid:
    """Gain over disagmoe of every switch in every cell, with its memory, and the median."""
    cells = _by_cell(points)
    lines = []
    for switch in _switches(points):
        found = [cell[switch] for cell in cells.values() if switch in cell]
        gains = [gain for gain in (finite(point["gain_over_disagmoe"]) for point in found) if gain is not None]
        texts = [_gain_text(cell.get(switch)) for cell in cells.values()]
        lines.append((switch, times(median(gains)) if gains else DASH, *texts))
    headings = ("switch", "median", *(f"{model} {length(seq)}" for model, seq in cells))
    title = f"Gain over disagmoe, and GiB of the fullest GPU: {place[1]}, calibration {place[0]}"
    return Grid(title, headings, tuple(lines))


def _gain_text(point: Point | None) -> str:
    if point is None:
        return DASH
    if point["status"] != "ok":
        return str(point["status"]).replace("_", " ")
    gain, needed = finite(point["gain_over_disagmoe"]), finite(point["needed_gib"])
    memory = "" if needed is None else f" ({needed:.0f})"
    return f"{'runs' if gain is None else f'{gain:.2f}×'}{memory}"


def figures(record: Record) -> Iterator[tuple[str, Place]]:
    """Stem and place of every picture."""
    for place in places(record):
        if len(_switches(_of(record, place))) > 1:
            yield f"{STEM}_{place[1]}_{place[0]}", place


def picture_lines(record: Record) -> list[str]:
    """The pictures in Markdown."""
    return [line for stem, place in figures(record) for line in ("", f"![gains, {place[1]}, {place[0]}]({stem}.png)")]


def write_figures(record: Record, directory: Path) -> list[Path]:
    """One heat map of switches by cells per exchange and calibration, as PNG and SVG."""
    paths: list[Path] = []
    for stem, place in figures(record):
        both = [directory / f"{stem}.png", directory / f"{stem}.svg"]
        with drawing():
            save(heat_map(record, place), *both)
        paths += both
    return paths


def heat_map(record: Record, place: Place) -> Figure:
    """Gain over disagmoe of every switch (lines) in every cell (columns)."""
    points = _of(record, place)
    cells, switches = _by_cell(points), _switches(points)[::-1]
    gains = [
        [finite(cell[s]["gain_over_disagmoe"]) if s in cell else None for cell in cells.values()] for s in switches
    ]
    texts = [
        [
            f"{gain:.2f}" if gain is not None else _short(cell.get(s))
            for gain, cell in zip(line, cells.values(), strict=True)
        ]
        for s, line in zip(switches, gains, strict=True)
    ]
    figure = canvas(2.2 + 0.72 * len(cells), 2.3 + 0.34 * len(switches))
    axes = figure.add_axes((0.17, 0.27, 0.81, 0.56))
    draw_cells(axes, gains, texts, gain_norm(gain for line in gains for gain in line), 7.5)
    axes.set_yticks(range(len(switches)), switches)
    axes.set_xticks(range(len(cells)), [f"{model}\n{length(seq)}" for model, seq in cells], fontsize=7)
    origin = f"{ORIGIN[str(record['backend'])]} on {record['cluster']['name']}"
    headline(figure, "Gain of every switch over DisagMoE", f"{origin}, calibration {place[0]}, exchange: {place[1]}")
    footer(figure, f"step of disagmoe ÷ own; each alone, and the search over all\nrun {record['run']['id']}")
    return figure


def _short(point: Point | None) -> str:
    words = {"oom": "OOM", "not_applicable": "n/a", "failed": "failed", "ok": "runs"}
    return DASH if point is None else words[str(point["status"])]
