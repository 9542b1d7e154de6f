"""Decides how a grid of gains is drawn: blue above 1, red below, the number in its cell, grey where nothing ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.patches import Rectangle

from bench.report.style import INK

LOSS, DRAW, WIN = "#B2182B", "#F7F7F7", "#2166AC"
NOTHING = "#EEEEEE"
SMALLEST_REACH = 0.05
"""Gains differ in colour from 1 ± this on, so that noise is not painted as a win."""

Gains = Sequence[Sequence[float | None]]


def gain_norm(gains: Iterable[float | None]) -> TwoSlopeNorm:
    """Colours of equal strength on both sides of 1, for all cells of a figure."""
    reach = max([SMALLEST_REACH, *(abs(gain - 1.0) for gain in gains if gain is not None)])
    return TwoSlopeNorm(1.0, 1.0 - reach, 1.0 + reach)


def draw_cells(axes: Axes, gains: Gains, texts: Sequence[Sequence[str]], norm: TwoSlopeNorm, size: float = 8.5) -> None:
    """Cells of gains[y][x] with their texts, the first line at the bottom; no ticks or titles."""
    grid = np.array([[np.nan if gain is None else gain for gain in line] for line in gains], dtype=np.float64)
    blend = LinearSegmentedColormap.from_list("gain", [LOSS, "#F4A582", DRAW, "#92C5DE", WIN])
    colours = blend.with_extremes(bad=NOTHING)
    axes.imshow(grid, cmap=colours, norm=norm, aspect="auto", origin="lower", interpolation="nearest")
    for y, line in enumerate(gains):
        for x, gain in enumerate(line):
            dark = gain is not None and abs(norm(gain) - 0.5) > 0.33
            ink = "white" if dark else INK
            axes.annotate(texts[y][x], (x, y), ha="center", va="center", fontsize=size, color=ink, zorder=5)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def outline(axes: Axes, x: int, y: int) -> None:
    """A frame around one cell."""
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.8, zorder=6))
