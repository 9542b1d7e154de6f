"""Decides the picture of the paper page: our speed-ups beside the published ranges, by sequence length.

One panel per baseline. The grey band is what the paper measured, points are ours:
colour tells the model, shape the calibration, hollow points the larger batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.report import paper
from bench.report.style import GRID, INK, MUTED, axes_at, canvas, drawing, footer, headline, save
from bench.report.text import length

CLAIMS = paper.CLAIMS[:4]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SHAPES = ("o", "^", "s", "D")
PANEL_W, PANEL_H, LEFT, GAP_X, GAP_Y, TOP, FOOT = 5.2, 2.5, 0.75, 0.75, 0.75, 1.25, 0.75


class Point(Protocol):
    """What is read of an entry."""

    claim: str
    model: str
    seq: int
    calibration: str
    times: float
    ours: float | None


def write_figure(found: Sequence[Any], directory: Path) -> list[Path]:
    """Write paper.png and paper.svg; returns the paths."""
    paths = [directory / "paper.png", directory / "paper.svg"]
    with drawing():
        save(paper_figure(found), *paths)
    return paths


def paper_figure(found: Sequence[Point]) -> Figure:
    """The four speed-up claims."""
    points = [p for p in found if p.ours is not None and p.claim in {claim.text for claim in CLAIMS}]
    lengths = sorted({p.seq for p in points})
    models, calibrations = (list(dict.fromkeys(getattr(p, key) for p in points)) for key in ("model", "calibration"))
    series = sorted({(p.model, p.calibration, p.times) for p in points})
    figure = canvas(LEFT + 2 * PANEL_W + GAP_X + 0.3, TOP + 2 * PANEL_H + GAP_Y + FOOT)
    for index, claim in enumerate(CLAIMS):
        line, column = divmod(index, 2)
        bottom = FOOT + (1 - line) * (PANEL_H + GAP_Y)
        axes = axes_at(figure, LEFT + column * (PANEL_W + GAP_X), bottom, PANEL_W, PANEL_H)
        mine = [p for p in points if p.claim == claim.text]
        _panel(axes, claim, mine, lengths, series, models, calibrations)
    headline(
        figure,
        "DisagMoE's speed-up: the paper's ranges (measured) and ours (simulated)",
        "native view, 128 H800; a point per model, length, calibration and batch",
    )
    figure.legend(
        handles=_handles(models, calibrations, sorted({p.times for p in points})),
        loc="upper left",
        bbox_to_anchor=(0.15 / figure.get_figwidth(), 1 - 0.62 / figure.get_figheight()),
        ncols=8,
        columnspacing=1.3,
        handletextpad=0.4,
        borderaxespad=0.0,
    )
    footer(figure, "missing points: one of the two systems did not run there (see the tables)")
    return figure


def _panel(
    axes: Axes,
    claim: paper.Claim,
    mine: Sequence[Point],
    lengths: Sequence[int],
    series: Sequence[tuple[str, str, float]],
    models: Sequence[str],
    calibrations: Sequence[str],
) -> None:
    low, high = claim.low or 0.0, claim.high or 0.0
    axes.axhspan(low, high, color="#BBBBBB", alpha=0.55, linewidth=0, zorder=1)
    axes.axhline(1.0, color="#444444", linewidth=1.0, linestyle=(0, (4, 3)), zorder=2)
    for point in mine:
        place = series.index((point.model, point.calibration, point.times))
        x = lengths.index(point.seq) + (place - (len(series) - 1) / 2) * 0.8 / max(len(series), 1)
        colour = COLOURS[models.index(point.model) % len(COLOURS)]
        axes.plot(
            x,
            point.ours or 0.0,
            SHAPES[calibrations.index(point.calibration) % len(SHAPES)],
            markersize=5.5,
            markeredgecolor=colour,
            markerfacecolor=colour if point.times == 1 else "white",
            zorder=3,
        )
    published = paper.range_text({"low": claim.low, "high": claim.high, "unit": claim.unit})
    axes.set_title(f"{claim.text}: paper {published}", loc="left", fontsize=9.5)
    axes.set_xticks(range(len(lengths)), [length(seq) for seq in lengths])
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    for border in range(1, len(lengths)):
        axes.axvline(border - 0.5, color=GRID, linewidth=0.8, zorder=0)
    values = [point.ours or 1.0 for point in mine]
    axes.set_ylim(min([0.9, *values]) - 0.08, max([high, 1.1, *values]) + 0.08)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    axes.set_ylabel("speed-up")


def _handles(models: Sequence[str], calibrations: Sequence[str], times: Sequence[float]) -> list[Line2D]:
    colours = [
        Line2D([], [], linestyle="", marker="s", color=COLOURS[i % len(COLOURS)], label=model)
        for i, model in enumerate(models)
    ]
    shapes = [
        Line2D([], [], linestyle="", marker=SHAPES[i % len(SHAPES)], color=MUTED, label=f"calibration {name}")
        for i, name in enumerate(calibrations)
    ]
    batches = [
        Line2D(
            *([], []),
            linestyle="",
            marker="o",
            markeredgecolor=INK,
            markerfacecolor=INK if n == 1 else "white",
            label="default batch" if n == 1 else f"{n}× the batch",
        )
        for n in times
    ]
    return colours + shapes + batches
