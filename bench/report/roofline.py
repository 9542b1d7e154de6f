"""Decides how the communication roofline and the region map are drawn.

Roofline: FLOP/s a GPU can reach over FLOPs per byte on its NICs. Left of a
turning point the network binds, right of it the GPU. Both pools stand on the
roof of an even split (before) and on the roof of the tuned plan's own NICs
(after); where both are the same roof, it is drawn once and said so.

Map: gain of the best disaggregated over the best colocated system, with the
line on which they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from bench.advice import Advice, Roofline
from bench.region import Map, Region
from bench.report.heat import draw_cells, gain_norm
from bench.report.style import INK, MUTED, axes_at, canvas, drawing, footer, headline
from bench.report.text import length

ATTENTION, EXPERTS = "#2F6DB5", "#D55E00"


def roofline_figure(advice: Advice, roofline: Roofline) -> Figure:
    """The roofline of one problem."""
    with drawing():
        figure = canvas(8.6, 5.2)
        axes = axes_at(figure, 0.95, 1.25, 7.35, 3.15)
        _roofs(axes, roofline)
        config = advice.config
        headline(
            figure,
            "Communication roofline of attention (A) and experts (F)",
            f"{config.model.title} · seq {config.workload.seq:,} · {config.cluster.name} · by formula, not measured",
        )
        paper = (
            "" if roofline.paper is None else " Open marks: the paper's intensity formula (forward, unmerged, no gate)."
        )
        footer(
            figure,
            "Filled marks: our FLOP count of a training step over the bytes of one direction.\n"
            "Before (grey): as many A as F GPUs, half of the NICs each. After: the tuned plan's NICs per GPU;\n"
            f"dotted: the formula's split with half of the NICs each.{paper}",
        )
        return figure


@dataclass(frozen=True)
class _Pool:
    """One pool on the roofline: its intensity (ours and the paper's) and its turning points."""

    name: str
    colour: str
    intensity: float
    paper: float | None
    formula: float
    tuned: float | None
    label_points: int
    """Where its label goes, in points above the mark."""


def _pools(roofline: Roofline) -> tuple[_Pool, _Pool]:
    need, paper, split = roofline.work, roofline.paper, roofline.formula
    a, f = need.attention_intensity, need.expert_intensity
    of_paper = (None, None) if paper is None else (paper.attention, paper.expert)
    close = max(a / f, f / a) < 4.0  # their labels would meet
    return (
        _Pool("A", ATTENTION, a, of_paper[0], split.attention_point, roofline.attention_point, 10),
        _Pool("F", EXPERTS, f, of_paper[1], split.expert_point, roofline.expert_point, -28 if close else 10),
    )


def _roofs(axes: Axes, roofline: Roofline) -> None:
    peak, even = roofline.machine.peak_flops / 1e12, roofline.even.attention_point
    pools = _pools(roofline)
    marks = [value for pool in pools for value in (pool.intensity, pool.paper) if value is not None]
    points = [even, *(v for pool in pools for v in (pool.formula, pool.tuned) if v is not None)]
    low, high = min([*marks, *points]) / 3.0, max([*marks, *points]) * 4.0
    x = np.geomspace(low, high, 400)

    def roof(point: float, label: str, **style: Any) -> None:
        axes.plot(x, peak * np.minimum(1.0, x / point), label=label, **style)

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(peak * min(1.0, low / max(points)), peak * 2.6)
    roof(even, f"before, even split: Î = {even:,.0f}", color=MUTED, linewidth=2.0)
    for pool in pools:
        name = f"{pool.name}: Î_{pool.name} ="
        roof(pool.formula, f"formula, {name} {pool.formula:,.0f}", color=pool.colour, linewidth=1.1, linestyle=":")
        if pool.tuned is not None:
            label = f"tuned, {name} {pool.tuned:,.0f}"
            roof(pool.tuned, label, color=pool.colour, linewidth=1.4, linestyle=(0, (5, 3)), zorder=3)
        _mark(axes, pool, peak, even)
    axes.annotate(f"peak {peak:,.0f} TFLOP/s", (low, peak), (4, 4), textcoords="offset points", fontsize=8, color=MUTED)
    axes.grid(which="major")
    axes.set_xlabel("FLOPs per byte on the NIC")
    axes.set_ylabel("reachable TFLOP/s per GPU")
    axes.legend(loc="lower right", fontsize=8)


def _mark(axes: Axes, pool: _Pool, peak: float, even: float) -> None:
    """A pool before (grey) and after (its colour), and where the paper's formula puts it."""
    before = peak * min(1.0, pool.intensity / even)
    after = peak * min(1.0, pool.intensity / (even if pool.tuned is None else pool.tuned))
    axes.plot([pool.intensity], [before], "o", color=MUTED, markersize=6, zorder=4)
    axes.plot([pool.intensity], [after], "o", color=pool.colour, markersize=8, zorder=5)
    if abs(after / before - 1.0) > 0.02:
        arrow = {"arrowstyle": "->", "color": pool.colour}
        axes.annotate("", (pool.intensity, after), (pool.intensity, before), arrowprops=arrow, zorder=4)
    axes.annotate(
        f"{pool.name}: {pool.intensity:,.0f} FLOPs/B, {after:,.0f} TFLOP/s",
        (pool.intensity, after),
        (0, pool.label_points if after >= 0.95 * peak or pool.label_points < 0 else -28),
        textcoords="offset points",
        ha="center",
        color=pool.colour,
        fontsize=8.5,
        fontweight="bold",
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        zorder=6,
    )
    if pool.paper is not None:
        height = peak * min(1.0, pool.paper / even)
        axes.plot([pool.paper], [height], "s", color=pool.colour, markerfacecolor="white", markersize=6, zorder=4)
        side = (-6, "right") if pool.name == "A" else (7, "left")
        where: Any = {"textcoords": "offset points", "ha": side[1], "va": "center", "fontsize": 7.5}
        axes.annotate(f"{pool.name}, paper's I", (pool.paper, height), (side[0], 0), color=pool.colour, **where)


def region_figure(region: Region) -> Figure:
    """One heat map per map of the region."""
    columns, rows = len(region.maps[0].x_values), len(region.maps[0].y_values)
    across = min(len(region.maps), 2)
    width, height = max(5.4 if across == 1 else 2.8, 0.86 * columns), max(1.0, 0.62 * rows)
    down = -(-len(region.maps) // across)
    with drawing():
        total_w = 1.1 + across * width + (across - 1) * 1.2 + 1.5
        figure = canvas(max(7.2, total_w), 1.25 + down * height + (down - 1) * 0.95 + 1.15)
        norm = gain_norm(gain for part in region.maps for line in part.gains for gain in line)
        for index, part in enumerate(region.maps):
            line, column = divmod(index, across)
            bottom = figure.get_figheight() - 1.2 - (line + 1) * height - line * 0.95
            axes = axes_at(figure, 1.1 + column * (width + 1.2), bottom, width, height)
            _heat(axes, part, norm, region)
        headline(figure, "Where disaggregation pays", region.subtitle, top_in=0.28)
        footer(figure, region.footer)
        return figure


def _heat(axes: Axes, part: Map, norm: TwoSlopeNorm, region: Region) -> None:
    texts = [
        [part.reasons[y][x] if gain is None else f"{gain:.2f}×" for x, gain in enumerate(line)]
        for y, line in enumerate(part.gains)
    ]
    draw_cells(axes, part.gains, texts, norm)
    grid = np.array([[np.nan if g is None else g for g in line] for line in part.gains], dtype=np.float64)
    _break_even(axes, grid)
    axes.set_xticks(range(len(part.x_values)), [_tick(region.x_name, v) for v in part.x_values])
    axes.set_yticks(range(len(part.y_values)), [_tick(region.y_name, v) for v in part.y_values])
    axes.set_xlabel(region.x_label)
    axes.set_ylabel(region.y_label)
    axes.set_title(part.title, loc="left", fontsize=9)


def _break_even(axes: Axes, grid: np.ndarray) -> None:
    """The line on which both are equally fast: between points it is interpolated."""
    finite = grid[np.isfinite(grid)]
    if min(grid.shape) < 2:
        line = grid.reshape(-1)
        for i in range(len(line) - 1):
            a, b = line[i] - 1.0, line[i + 1] - 1.0
            if np.isfinite(a) and np.isfinite(b) and a * b < 0.0:
                at = i + a / (a - b)
                (axes.axvline if grid.shape[0] == 1 else axes.axhline)(at, color=INK, linewidth=2.0)
        return
    if finite.size and finite.min() < 1.0 < finite.max():
        x, y = (np.clip(np.arange(-1, n + 1), -0.5, n - 0.5) for n in (grid.shape[1], grid.shape[0]))
        to_the_edge = np.ma.masked_invalid(np.pad(grid, 1, mode="edge"))
        axes.contour(x, y, to_the_edge, levels=[1.0], colors=INK, linewidths=2.0)


def _tick(name: str, value: float) -> str:
    return length(int(value)) if name == "seq" else f"{value:g}"


__all__: Sequence[str] = ("region_figure", "roofline_figure")
