"""Decides the two bar pictures of a run: how much faster each system is, and where its step goes.

Bars lie on their side so that long system names stay readable; every view has
its own panel, since speed-ups mean something only inside one view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.report.columns import units
from bench.report.facts import REFERENCE, Results, facts, finite, notes, row_label, view_rows, views
from bench.report.style import (
    COMPONENTS,
    MUTED,
    axes_at,
    canvas,
    drawing,
    footer,
    hatches,
    headline,
    ink_on,
    legend_below_headline,
    save,
    system_colours,
)

Row = Mapping[str, Any]

BAR, PITCH = 0.68, 0.36
"""Bar thickness as a share of its slot, and the slot's height in inches."""
RIGHT, TOP, FOOT, GAP = 0.35, 1.0, 0.62, 0.75
"""Margins around and between panels, in inches."""
LETTER = 0.082
"""Room for one letter of a system's name, in inches."""
FAILURES = {"oom": "out of memory", "not_applicable": "not applicable", "failed": "failed"}


def write_bars(results: Results, directory: Path) -> list[Path]:
    """Write speedup.png|svg and breakdown.png|svg; returns the paths."""
    paths = [directory / f"{name}.{suffix}" for name in ("speedup", "breakdown") for suffix in ("png", "svg")]
    with drawing():
        save(speedup_figure(results), *paths[:2])
        save(breakdown_figure(results), *paths[2:])
    return paths


def speedup_figure(results: Results) -> Figure:
    """Speed-up of every system over the reference, one panel per view, on one scale."""
    best = max((finite(row.get("speedup")) or 0.0 for row in results["rows"]), default=0.0)
    figure, panels = _panels(results, panel_width=5.2, side_by_side=True, key_height=0.0)
    colours = system_colours(str(row["system"]) for row in results["rows"])
    for view, axes in panels:
        rows = view_rows(results, view)
        fastest = max((finite(row.get("speedup")) or 0.0 for row in rows), default=0.0)
        marks = hatches([(str(row["system"]), row_label(row)) for row in rows])
        for slot, row in enumerate(rows):
            value = finite(row.get("speedup"))
            if value is None:
                _say_why(axes, slot, row)
                continue
            hatch = marks[str(row["system"]), row_label(row)]
            axes.barh(slot, value, BAR, color=colours[str(row["system"])], hatch=hatch, edgecolor="white", linewidth=0)
            axes.annotate(
                f"{value:.2f}×",
                (value, slot),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontweight="bold" if value == fastest else "normal",
            )
        axes.axvline(1.0, color="#444444", linewidth=1.0, linestyle=(0, (4, 3)), zorder=3)
        axes.set_xlim(0, max(best, 1.0) * 1.16)
        axes.set_xlabel(f"speed-up over {REFERENCE} (its step time ÷ own, same view)")
    headline(figure, "Speed-up by system", facts(results).subtitle)
    footer(figure, _foot(results))
    return figure


def breakdown_figure(results: Results) -> Figure:
    """Stacked parts of every system's step; the parts add up to the step time."""
    unit = units(results, results["rows"])
    longest = max((finite(row.get("step_time_s")) or 0.0 for row in results["rows"]), default=0.0) * unit.per_second
    figure, panels = _panels(results, panel_width=8.4, side_by_side=False, key_height=0.3)
    for view, axes in panels:
        for slot, row in enumerate(view_rows(results, view)):
            parts = step_parts(row)
            if parts is None:
                _say_why(axes, slot, row)
                continue
            _stack(axes, slot, parts, unit.per_second, longest or 1.0)
            step = finite(row.get("step_time_s")) or sum(parts.values())
            axes.annotate(
                f"{unit.seconds(step)} {unit.time}",
                (sum(parts.values()) * unit.per_second, slot),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontweight="bold",
            )
        axes.set_xlim(0, (longest or 1.0) * 1.13)
        axes.set_xlabel(f"time per step [{unit.time}], mean over GPUs")
    _component_key(figure)
    headline(figure, "Where the step goes", facts(results).subtitle)
    footer(figure, "step = compute (both blues) + exposed + bubble; stall = exposed + bubble\n" + _foot(results))
    return figure


def step_parts(row: Row) -> dict[str, float] | None:
    """Seconds of each component of COMPONENTS; None where the row has no breakdown.

    Overlapped communication runs inside compute, so compute is drawn in two
    parts: alone, and with communication under it.
    """
    read = [finite(row.get(key)) for key in ("compute_s", "overlapped_comm_s", "exposed_comm_s", "bubble_s")]
    if any(value is None for value in read):
        return None
    compute, overlapped, exposed, bubble = (value or 0.0 for value in read)
    return {
        "compute": max(compute - overlapped, 0.0),
        "overlapped": overlapped,
        "exposed": exposed,
        "bubble": bubble,
    }


def _stack(axes: Axes, slot: int, parts: Mapping[str, float], scale: float, longest: float) -> None:
    """One stacked bar, with its share of the step written where it fits."""
    total, left = sum(parts.values()), 0.0
    for key, _, colour, hatch in COMPONENTS:
        width = parts[key] * scale
        axes.barh(slot, width, BAR, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.6)
        if width > 0.055 * longest:
            box = {"boxstyle": "round,pad=0.12", "facecolor": colour, "edgecolor": "none"} if hatch else None
            share = f"{100 * parts[key] / total:.0f} %"
            middle = left + width / 2
            axes.text(middle, slot, share, ha="center", va="center", fontsize=8, color=ink_on(colour), bbox=box)
        left += width


def _panels(
    results: Results, *, panel_width: float, side_by_side: bool, key_height: float
) -> tuple[Figure, list[tuple[str, Axes]]]:
    """A figure with one horizontal bar panel per view; system names on the left of each."""
    names = views(results["rows"])
    slots = {view: len(view_rows(results, view)) for view in names}
    heights = {view: PITCH * slots[view] for view in names}
    left = 0.5 + LETTER * max((len(row_label(row)) for row in results["rows"]), default=0)
    foot = FOOT + 0.13 * _foot(results).count("\n") + 0.4
    top = TOP + key_height
    if side_by_side:
        tallest = max(heights.values(), default=1.0)
        figure = canvas(len(names) * (left + panel_width) + RIGHT, top + tallest + foot)
        slot = left + panel_width
        spots = [(i * slot + left, foot + tallest - heights[v], heights[v]) for i, v in enumerate(names)]
    else:
        body = sum(heights.values()) + (len(names) - 1) * (GAP + 0.1)
        figure = canvas(left + panel_width + RIGHT, top + body + foot)
        spots, cursor = [], foot + body
        for view in names:
            cursor -= heights[view]
            spots.append((left, cursor, heights[view]))
            cursor -= GAP + 0.1
    panels = []
    for view, (x, bottom, height) in zip(names, spots, strict=True):
        axes = axes_at(figure, x, bottom, panel_width - 0.1, height)
        _dress(axes, view, [row_label(row) for row in view_rows(results, view)])
        panels.append((view, axes))
    return figure, panels


def _dress(axes: Axes, view: str, labels: Sequence[str]) -> None:
    axes.set_title(f"{view} view", loc="left", pad=6)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def _say_why(axes: Axes, slot: int, row: Row) -> None:
    """Words in place of a bar."""
    text = FAILURES.get(str(row["status"]), "no value")
    needed, limit = finite(row.get("peak_memory_gib")), finite(row.get("memory_limit_gib"))
    if row["status"] == "oom" and needed is not None and limit is not None:
        text += f": needs {needed:.1f} GiB, has {limit:.1f}"
    axes.annotate(text, (0, slot), (5, 0), textcoords="offset points", va="center", style="italic", color=MUTED)


def _component_key(figure: Figure) -> None:
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=label) for _, label, c, h in COMPONENTS]
    legend_below_headline(figure, handles, columns=len(handles))


def _foot(results: Results) -> str:
    named = facts(results)
    lines = [f"{named.provenance}; {named.batch}; run {results['run']['id']}", *notes(results)]
    return "\n".join(_shorten(line) for line in lines[:4])


def _shorten(text: str, limit: int = 170) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
