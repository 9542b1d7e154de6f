"""Decides the two memory pictures of a plan: what every worker's GPU holds at its peak, and over the step.

Both carry the line of what a plan may use (memory minus reserve) and of what the
device has. Components have one colour each, static ones darker and below.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from bench.report.style import axes_at, canvas, drawing, footer, headline, legend_below_headline, save
from disagmoe.plan.memory_report import COMPONENTS, MemoryReport

FloatArray = NDArray[np.float64]

LOOKS: dict[str, tuple[str, str, str]] = {
    "weights": ("weights", "#153E75", ""),
    "gradients": ("gradients", "#2F6DB5", ""),
    "optimizer": ("optimizer state", "#93BBE6", ""),
    "workspace": ("workspaces", "#8C8C8C", ""),
    "communicators": ("communicators", "#C9C9C9", "...."),
    "attention": ("attention activations", "#0B8A83", ""),
    "ffn": ("expert activations", "#7CCBC4", ""),
    "exchange": ("exchange buffers", "#E69F00", ""),
    "head": ("head and logits", "#CC79A7", ""),
    "working": ("temporaries", "#F0E442", "////"),
}
"""Component -> label, colour, hatch."""
LIMIT, DEVICE = "#D55E00", "#222222"
MAX_BARS, MAX_CURVES = 24, 6
MAX_POINTS = 4000
"""More workers, curves and points than these would not be readable; the fullest are shown."""
LEFT, RIGHT, TOP, FOOT, GAP = 0.75, 0.3, 1.15, 0.85, 0.5


def write_memory(
    report: MemoryReport, directory: Path, stem: str, *, subtitle: str, limit_gib: float, device_gib: float
) -> list[Path]:
    """Write memory_<stem>.png|svg (bars) and memory_<stem>_over_time.png; returns the paths."""
    bars = [directory / f"memory_{stem}.{suffix}" for suffix in ("png", "svg")]
    curves = directory / f"memory_{stem}_over_time.png"
    with drawing():
        save(bars_figure(report, subtitle=subtitle, limit_gib=limit_gib, device_gib=device_gib), *bars)
        save(curves_figure(report, subtitle=subtitle, limit_gib=limit_gib, device_gib=device_gib), curves)
    return [*bars, curves]


def bars_figure(report: MemoryReport, *, subtitle: str, limit_gib: float, device_gib: float) -> Figure:
    """A stacked bar per worker: one GPU's memory at the worker's peak."""
    shown = _fullest(report, MAX_BARS)
    width = max(7.2, LEFT + RIGHT + 0.55 * len(shown))
    figure = canvas(width, 5.2)
    axes = axes_at(figure, LEFT, FOOT, width - LEFT - RIGHT, 5.2 - TOP - FOOT)
    below = np.zeros(len(shown))
    for component in COMPONENTS:
        _, colour, hatch = LOOKS[component]
        gib = np.array([max(report.workers[w].at_peak[component], 0.0) for w in shown])
        axes.bar(range(len(shown)), gib, 0.72, below, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
        below += gib
    for slot, w in enumerate(shown):
        peak = report.workers[w].peak_gib
        over = peak > limit_gib
        axes.annotate(
            f"{peak:.1f}",
            (slot, below[slot]),
            (0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            color=LIMIT if over else "#222222",
            fontweight="bold" if over else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            zorder=5,
        )
    axes.set_xticks(range(len(shown)), [report.workers[w].name for w in shown])
    axes.set_ylabel("memory of one GPU at its peak [GiB]")
    _lines(axes, limit_gib, device_gib, float(below.max(initial=0.0)))
    _key(figure, [c for c in COMPONENTS if any(report.workers[w].at_peak[c] > 0.0 for w in shown)])
    headline(figure, "Memory by worker", subtitle)
    footer(figure, _foot(report, len(shown), limit_gib, device_gib))
    return figure


def curves_figure(report: MemoryReport, *, subtitle: str, limit_gib: float, device_gib: float) -> Figure:
    """What the fullest workers hold over the step, stacked by component, one panel each; one time axis for all."""
    shown = _fullest(report, MAX_CURVES)
    panel = 1.55
    height = TOP + FOOT + len(shown) * panel + (len(shown) - 1) * GAP
    figure = canvas(10.0, height)
    highest = max(report.workers[w].peak_gib for w in shown)
    end_s = float(report.levels.where.max()) if report.unit == "seconds" else None
    for slot, w in enumerate(shown):
        bottom = height - TOP - (slot + 1) * panel - slot * GAP
        axes = axes_at(figure, LEFT, bottom, 10.0 - LEFT - RIGHT, panel)
        where, gib = _thinned(*report.curve(w))
        axes.stackplot(
            where,
            np.maximum(gib, 0.0),
            colors=[LOOKS[c][1] for c in COMPONENTS],
            step="post",
            linewidth=0,
        )
        _lines(axes, limit_gib, device_gib, highest, labelled=slot == 0)
        axes.set_title(
            f"{report.workers[w].name}: peak {report.workers[w].peak_gib:.1f} GiB", loc="left", fontsize=9, pad=2
        )
        axes.set_ylabel("GiB")
        axes.set_xlim(0.0, where[-1] if end_s is None else end_s)
        if slot == len(shown) - 1:
            unit = "time [s]" if report.unit == "seconds" else "operations of the worker's compute stream"
            axes.set_xlabel(unit)
    _key(figure, [c for c in COMPONENTS if any(report.workers[w].at_peak[c] > 0.0 for w in shown)])
    headline(figure, "Memory over the step", subtitle)
    footer(figure, _foot(report, len(shown), limit_gib, device_gib))
    return figure


def _fullest(report: MemoryReport, most: int) -> list[int]:
    """The workers shown, in their own order; of too many the fullest."""
    order = sorted(range(len(report.workers)), key=lambda w: (-report.workers[w].peak_gib, w))
    return sorted(order[:most])


def _thinned(where: FloatArray, gib: FloatArray) -> tuple[FloatArray, FloatArray]:
    """At most about MAX_POINTS events; of every run of events the one with the highest total stays."""
    n = where.shape[0]
    if n <= MAX_POINTS:
        return where, gib
    starts = np.linspace(0, n, MAX_POINTS, endpoint=False).astype(np.int64)
    total = gib.sum(axis=0)
    ends = np.append(starts[1:], n)
    kept = np.array([a + int(total[a:b].argmax()) for a, b in zip(starts, ends, strict=True)])
    return where[kept], gib[:, kept]


def _lines(axes: Axes, limit_gib: float, device_gib: float, highest: float, *, labelled: bool = True) -> None:
    """The limit of a plan and the memory of the device."""
    axes.axhline(device_gib, color=DEVICE, linewidth=1.0)
    axes.axhline(limit_gib, color=LIMIT, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_ylim(0, max(highest, device_gib) * 1.12)
    axes.grid(axis="y")
    if labelled:
        for gib, text, colour, place in (
            (device_gib, f"device {device_gib:g}", DEVICE, "bottom"),
            (limit_gib, f"limit {limit_gib:g}", LIMIT, "top"),
        ):
            axes.annotate(
                text,
                (1.0, gib),
                (-3, 2 if place == "bottom" else -2),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va=place,
                fontsize=7.5,
                color=colour,
            )


def _key(figure: Figure, components: list[str]) -> None:
    handles = [
        Patch(facecolor=LOOKS[c][1], hatch=LOOKS[c][2], edgecolor="white", linewidth=0.4, label=LOOKS[c][0])
        for c in components
    ]
    legend_below_headline(figure, handles, columns=5)


def _foot(report: MemoryReport, shown: int, limit_gib: float, device_gib: float) -> str:
    hidden = len(report.workers) - shown
    text = f"one GPU of each worker; limit = device memory {device_gib:g} - reserve {device_gib - limit_gib:g} GiB"
    how = (
        "buffers placed in simulated time" if report.unit == "seconds" else "buffers placed by the order of operations"
    )
    text += f"; communicators count; {how}"
    return text + (f"\n{hidden} workers with lower peaks are not shown" if hidden else "")
