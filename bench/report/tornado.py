"""Decides the tornado chart: which assumptions and choices the gain of DisagMoE hangs on, and which can turn it.

One row of panels per model, one column per what the gain is taken over. A bar
spans the gains of all settings of an axis, the widest on top; its ends name their
settings, dots are settings between. The solid line is the base, the dashed line
break-even.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.axes import AXES
from bench.report.facts import ORIGIN, REFERENCE, finite
from bench.report.style import INK, MUTED, axes_at, canvas, drawing, footer, headline, legend_below_headline, save

OVERS = (("speedup_over_reference", REFERENCE), ("speedup_over_best", "the best baseline"))
WORSE, BETTER = "#D55E00", "#3B6FA0"
"""The part of a bar below and above the base."""
NO_CHANGE = "no change"
"""Of an axis whose settings all have one gain."""
LEFT, WIDTH, GAP_X, RIGHT, TOP, FOOT, GAP_Y = 2.35, 4.6, 0.55, 0.35, 1.2, 0.85, 0.95
PITCH, BAR = 0.42, 0.56


@dataclass(frozen=True)
class Span:
    """One axis: the gain at every setting that ran (setting, gain), and the settings that did not."""

    title: str
    gains: tuple[tuple[str, float], ...]
    lost: tuple[str, ...]

    @property
    def low(self) -> tuple[str, float]:
        return min(self.gains, key=lambda pair: pair[1])

    @property
    def high(self) -> tuple[str, float]:
        return max(self.gains, key=lambda pair: pair[1])

    @property
    def width(self) -> float:
        return self.high[1] - self.low[1] if self.gains else 0.0


def spans(record: Mapping[str, Any], model: str, measure: str) -> tuple[float | None, list[Span]]:
    """The gain at the base, and the axes by falling span. The base belongs to every numeric axis."""
    mine = [point for point in record["points"] if point["model"] == model]
    base = next((finite(point[measure]) for point in mine if point["axis"] == "base"), None)
    usual = next((point.get("ep") for point in mine if point["axis"] == "base"), None)
    found = []
    for axis in dict.fromkeys(str(point["axis"]) for point in mine if point["axis"] != "base"):
        rows = [point for point in mine if point["axis"] == axis]
        gains = [(_named(row, usual), gain) for row in rows if (gain := finite(row[measure])) is not None]
        if base is not None and axis in record["bases"]:
            gains.append((str(record["bases"][axis]), base))
        lost = tuple(str(row["setting"]) for row in rows if finite(row[measure]) is None)
        found.append(Span(AXES[axis].title, tuple(gains), lost))
    return base, sorted(found, key=lambda span: -span.width)


def _named(point: Mapping[str, Any], usual: int | None) -> str:
    """A setting, with the expert-parallel size where it differs from the base's."""
    setting, ep = str(point["setting"]), point.get("ep")
    return setting if ep in (None, usual) else f"{setting} (EP {ep})"


def write_tornado(record: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write tornado.png and tornado.svg; returns the paths."""
    paths = [directory / "tornado.png", directory / "tornado.svg"]
    with drawing():
        save(tornado_figure(record), *paths)
    return paths


def tornado_figure(record: Mapping[str, Any]) -> Figure:
    """The chart of one study."""
    models = record["models"]
    panels = [[spans(record, str(model["name"]), measure) for measure, _ in OVERS] for model in models]
    heights = [PITCH * max(1, *(len(bars) for _, bars in row)) for row in panels]
    body = sum(heights) + GAP_Y * (len(models) - 1)
    figure = canvas(2 * (LEFT + WIDTH) + GAP_X + RIGHT, TOP + body + FOOT)
    bottom = FOOT + body
    for model, row, height in zip(models, panels, heights, strict=True):
        bottom -= height
        for column, ((_, over), (base, bars)) in enumerate(zip(OVERS, row, strict=True)):
            axes = axes_at(figure, LEFT + column * (WIDTH + LEFT + GAP_X), bottom, WIDTH, height)
            axes.set_title(f"{model['title']}: over {over}", loc="left", fontsize=9.5, pad=15)
            axes.set_xlabel(f"step of {over} ÷ step of disagmoe", fontsize=8)
            _panel(axes, base, bars)
        bottom -= GAP_Y
    workload, origin = record["workload"], ORIGIN[str(record["backend"])]
    where = f"{origin} on {record['cluster']['name']} (calibration {record['calibration']})"
    work = f"seq {workload['seq']:,}, {workload['global_batch']:,} sequences per step, {record['view']} view"
    headline(figure, "What the gain of DisagMoE hangs on: one thing changed at a time", f"{where} · {work}")
    marks = [Patch(facecolor=WORSE, label="below the base"), Patch(facecolor=BETTER, label="above the base")]
    legend_below_headline(figure, marks, columns=2)
    footer(
        figure,
        "solid line: base; dashed line: break-even; bar ends name their settings, dots are settings between"
        f"\nrun {record['run']['id']}",
    )
    return figure


def _panel(axes: Axes, base: float | None, bars: Sequence[Span]) -> None:
    """Bars of one model over one rival."""
    values = [gain for bar in bars for _, gain in bar.gains] + [1.0] + ([base] if base is not None else [])
    room = 0.3 * (max(values) - min(values)) or 0.1
    axes.set_xlim(min(values) - room, max(values) + room)
    for slot, bar in enumerate(bars):
        _bar(axes, slot, bar, base)
    if base is not None:
        axes.axvline(base, color=INK, linewidth=1.2, zorder=3)
        axes.annotate(
            *(f"base {base:.2f}×", (base, 1.0)),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7.2,
        )
    axes.axvline(1.0, color="#444444", linewidth=1.0, linestyle=(0, (4, 3)), zorder=3)
    axes.set_yticks(range(len(bars)), [bar.title for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}×")


def _bar(axes: Axes, slot: int, bar: Span, base: float | None) -> None:
    """One axis: the span on both sides of the base, its ends with their settings, what did not run at the end."""
    words = f"{', '.join(bar.lost)}: did not run" if bar.lost else ""
    if not bar.gains:
        axes.annotate(words, (1.0, slot), (4, 0), textcoords="offset points", va="center", fontsize=7.5, color=MUTED)
        return
    (low_name, low), (high_name, high) = bar.low, bar.high
    middle = low if base is None else min(max(base, low), high)
    axes.barh(slot, middle - low, BAR, left=low, color=WORSE)
    axes.barh(slot, high - middle, BAR, left=middle, color=BETTER)
    if base is not None and not low <= base <= high:
        axes.plot(
            [base, low if base < low else high], [slot, slot], color=MUTED, linewidth=0.8, linestyle=":", zorder=2
        )
    between = [gain for _, gain in bar.gains if low < gain < high and gain != base]
    axes.plot(between, [slot] * len(between), "o", color="white", markeredgecolor=INK, markersize=3.5, zorder=4)
    for name, value, side in ((low_name, low, -1), (high_name, high, 1)):
        if side < 0 and high == low:
            continue
        name = NO_CHANGE if high == low and len(bar.gains) > 1 else name
        text = f"{name} ({words})" if side > 0 and words else name
        axes.annotate(
            text,
            (value, slot),
            (4 * side, 0),
            textcoords="offset points",
            va="center",
            ha="left" if side > 0 else "right",
            fontsize=7.5,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            zorder=5,
        )
