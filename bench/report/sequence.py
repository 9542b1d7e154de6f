"""Decides the by-sequence pictures: what happens to speed-up, exposed communication and stall as sequences grow.

One panel per view and model (and depth, where a collection mixes them); runs of
different clusters, calibrations, batches (in tokens), settings or back ends never
share a picture. Sequence lengths are spaced evenly, as the field draws them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.report.facts import ORIGIN, REFERENCE, finite, row_label
from bench.report.style import (
    INK,
    MUTED,
    axes_at,
    canvas,
    drawing,
    footer,
    hatches,
    headline,
    legend_below_headline,
    save,
    system_colours,
)

if TYPE_CHECKING:
    import pandas as pd

Record = Mapping[str, Any]
Key = tuple[str, str, str]
"""Backend, cluster and calibration."""
LONGEST = 80
"""Characters of settings in a file name."""
USUAL_SIZE = 23
"""log2 of the tokens of the default batch, which file names need not tell."""

NEEDED = (
    *("backend", "cluster", "calibration", "settings", "model", "depth_used", "depth_of", "seq", "global_batch"),
    *("view", "system", "variant", "implementation", "status"),
    *("speedup", "exposed_comm_s", "bubble_s", "stall_s", "notes"),
)
"""Columns read from the frame: names as in table.csv."""

PANEL_W, PANEL_H, LEFT, GAP_X, GAP_Y, TOP, FOOT = 5.6, 2.6, 0.8, 0.75, 0.85, 1.35, 0.75
BAR_W = 0.18
"""Room for one bar in inches, wide enough for a number on its side."""
MAX_NOTES = 4
UPRIGHT_PT = 26.0
"""Bars narrower than this have their value on its side."""
SHORT_STATUS = {"oom": "OOM", "not_applicable": "n/a", "failed": "failed"}


@dataclass(frozen=True)
class Metric:
    """One quantity over sequence length."""

    name: str
    column: str
    title: str
    axis: str
    reference: float | None = None


METRICS = (
    Metric("speedup", "speedup", f"Speed-up over {REFERENCE} by sequence length", f"speed-up over\n{REFERENCE}", 1.0),
    Metric("exposed", "exposed_comm_s", "Exposed communication by sequence length", "exposed comm\nper step [s]"),
    Metric("bubble", "bubble_s", "Bubble (idle or waiting for a peer) by sequence length", "bubble\nper step [s]"),
    Metric("stall", "stall_s", "Stall (exposed + bubble) by sequence length", "exposed + bubble\nper step [s]"),
)


@dataclass(frozen=True)
class Panel:
    """Runs that may be compared: one model at one depth and about one batch size, over sequence lengths."""

    title: str
    cells: Mapping[tuple[str, str, int], Record]
    """Rows by (view, label, seq)."""

    @property
    def lengths(self) -> list[int]:
        return sorted({seq for _, _, seq in self.cells})


def by_sequence(results_dir: Path, frame: pd.DataFrame) -> list[Path]:
    """Write by_sequence_<metric>_<backend>_<cluster>_<calibration>.png|svg for a collected frame; returns the paths.

    Another batch or other settings than the default are added to the name. `frame`
    has one line per results row with the columns of table.csv. Of lines that name
    the same point the last one counts.
    """
    missing = [name for name in NEEDED if name not in frame.columns]
    if missing:
        raise ValueError(f"by-sequence figures need the columns {', '.join(NEEDED)}; missing: {', '.join(missing)}")
    rows = [_clean(record) for record in frame.to_dict("records")]
    groups: dict[tuple[Key, str, int], list[Record]] = {}
    for row in rows:
        key = (str(row["backend"]), str(row["cluster"]), str(row["calibration"]))
        groups.setdefault((key, str(row["settings"] or ""), _size_class(row)), []).append(row)
    paths: list[Path] = []
    with drawing():
        for (key, settings, size), group in sorted(groups.items(), key=lambda item: item[0]):
            panels, superseded = make_panels(group)
            extras = [] if size == USUAL_SIZE else [f"{2**size / 1e6:.3g}M-tokens"]
            extras += [_short(settings)] if settings else []
            for metric in METRICS:
                stem = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(("by_sequence", metric.name, *key, *extras)))
                pair = [results_dir / f"{stem}.{suffix}" for suffix in ("png", "svg")]
                save(draw_metric(metric, panels, group, key, superseded), *pair)
                paths += pair
    return paths


def _short(settings: str) -> str:
    """Settings for a file name; long ones are cut, and told apart by a digest."""
    digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
    return settings if len(settings) <= LONGEST else f"{settings[: LONGEST - 9]}-{digest}"


def _size_class(row: Record) -> int:
    """Batches of about equally many tokens share a picture."""
    return round(math.log2(float(row["seq"]) * float(row["global_batch"])))


def _clean(record: Mapping[Any, Any]) -> dict[str, Any]:
    """A record without pandas' ways of saying "nothing"."""
    return {str(key): None if value is None or value != value else value for key, value in record.items()}


def make_panels(rows: Sequence[Record]) -> tuple[list[Panel], int]:
    """Panels in order of model name, and how many rows gave way to a later one of the same point."""
    groups: dict[tuple[str, int, int, int], dict[tuple[str, str, int], Record]] = {}
    superseded = 0
    for row in rows:
        key = (str(row["model"]), int(row["depth_of"]), int(row["depth_used"]), _size_class(row))
        cells = groups.setdefault(key, {})
        point = (str(row["view"]), row_label(row), int(row["seq"]))
        superseded += point in cells
        cells[point] = row
    panels = []
    for (model, depth_of, depth_used, _), cells in sorted(groups.items()):
        batches = {float(row["seq"]) * float(row["global_batch"]) / 1e6 for row in cells.values()}
        name = model if len(model) <= 24 else f"{model[:23]}…"
        title = f"{name}, {depth_used} of {depth_of} layers, {_span(sorted(batches))} M tokens"
        panels.append(Panel(title, cells))
    return panels, superseded


def _span(values: Sequence[float]) -> str:
    """ "8.4" or "8.4–8.6"."""
    low, high = f"{values[0]:.3g}", f"{values[-1]:.3g}"
    return low if low == high else f"{low}–{high}"


def draw_metric(metric: Metric, panels: Sequence[Panel], rows: Sequence[Record], key: Key, superseded: int) -> Figure:
    """Rows of panels are models, columns are views."""
    views = list(dict.fromkeys(str(row["view"]) for row in rows))
    pairs, idle = shown_pairs(rows)
    colours, marks = system_colours(system for system, _ in pairs), hatches(pairs)
    in_view = {view: [pair for pair in pairs if _drawn_in(rows, view, pair)] for view in views}
    panel_w = max(PANEL_W, BAR_W * max(map(len, in_view.values())) * max(len(panel.lengths) for panel in panels))
    width = LEFT + len(views) * panel_w + (len(views) - 1) * GAP_X + 0.3
    columns = min(len(pairs), max(1, int(width / 1.9)))
    key_rows = -(-len(pairs) // columns)
    top = TOP + 0.22 * (key_rows - 1)
    lines = _foot(rows, superseded, idle)
    foot = FOOT + 0.14 * (len(lines) - 1)
    figure = canvas(width, top + len(panels) * PANEL_H + (len(panels) - 1) * GAP_Y + foot)
    for line, panel in enumerate(panels):
        bottom = figure.get_figheight() - top - (line + 1) * PANEL_H - line * GAP_Y
        highest = _highest(metric, panel)
        for column, view in enumerate(views):
            axes = axes_at(figure, LEFT + column * (panel_w + GAP_X), bottom, panel_w, PANEL_H)
            axes.set_title(f"{panel.title}, {view} view", loc="left", fontsize=9)
            _bars(axes, metric, panel, view, in_view[view], colours, marks, highest, panel_w)
            if column == 0:
                axes.set_ylabel(metric.axis)
    backend, cluster, calibration = key
    settings = next((f"; {row['settings']}" for row in rows if row.get("settings")), "")
    how = f"{ORIGIN[backend]} on {cluster} (calibration {calibration}){settings}; systems compare within one view"
    headline(figure, metric.title, how)
    legend_below_headline(figure, _handles(pairs, colours, marks), columns)
    footer(figure, "\n".join(lines))
    return figure


def shown_pairs(rows: Sequence[Record]) -> tuple[list[tuple[str, str]], list[str]]:
    """(system, label) of every series, and the labels left out because they are not applicable anywhere."""
    pairs = dict.fromkeys((str(row["system"]), row_label(row)) for row in rows)
    applicable = {row_label(row) for row in rows if row["status"] != "not_applicable"}
    return [pair for pair in pairs if pair[1] in applicable], [name for _, name in pairs if name not in applicable]


def _drawn_in(rows: Sequence[Record], view: str, pair: tuple[str, str]) -> bool:
    """Whether a view has the series at all (some forms of a system exist in one view only)."""
    return any(row["view"] == view and (str(row["system"]), row_label(row)) == pair for row in rows)


def _foot(rows: Sequence[Record], superseded: int, idle: Sequence[str]) -> list[str]:
    """What the marks mean, and the notes that the runs carry."""
    first = "OOM: out of memory, n/a: not applicable, no mark: not run"
    if idle:
        first += f"; not applicable anywhere here: {', '.join(idle)}"
    if superseded:
        first += f"; {superseded} earlier values of the same points are not shown"
    said = dict.fromkeys(note for row in rows if row["notes"] for note in str(row["notes"]).split(" | "))
    shown = list(said)[:MAX_NOTES]
    more = [f"and {len(said) - MAX_NOTES} more notes in the tables of the runs"] if len(said) > MAX_NOTES else []
    return [first, *shown, *more]


def _highest(metric: Metric, panel: Panel) -> float:
    values = [finite(row.get(metric.column)) or 0.0 for row in panel.cells.values()]
    return max([*values, metric.reference or 0.0]) or 1.0


def _bars(
    axes: Axes,
    metric: Metric,
    panel: Panel,
    view: str,
    pairs: Sequence[tuple[str, str]],
    colours: Mapping[str, str],
    marks: Mapping[tuple[str, str], str],
    highest: float,
    panel_w: float,
) -> None:
    """Grouped bars: a group per sequence length, a bar per system, its value on top."""
    lengths = panel.lengths
    width = min(0.84 / max(len(pairs), 1), 0.2)
    bar_pt = width * panel_w / len(lengths) * 72
    font = min(8.0, 0.62 * bar_pt)
    for group, seq in enumerate(lengths):
        for index, (system, label) in enumerate(pairs):
            row = panel.cells.get((view, label, seq))
            if row is None:
                continue
            x = group + (index - (len(pairs) - 1) / 2) * width
            value = finite(row.get(metric.column))
            if value is None:
                text, value = SHORT_STATUS.get(str(row["status"]), "–"), 0.0
            else:
                hatch = marks[system, label]
                axes.bar(x, value, 0.9 * width, color=colours[system], hatch=hatch, edgecolor="white", linewidth=0)
                text = f"{value:.2f}" if highest < 100 else f"{value:.0f}"
            axes.annotate(
                text,
                (x, value),
                (0, 2.5),
                textcoords="offset points",
                rotation=0 if bar_pt > UPRIGHT_PT else 90,
                ha="center",
                va="bottom",
                fontsize=max(font, 5.0),
                color=MUTED if text in SHORT_STATUS.values() else INK,
                bbox={"boxstyle": "square,pad=0.06", "facecolor": "white", "edgecolor": "none"},
                zorder=4,
            )
    axes.set_xticks(range(len(lengths)), [_length(seq) for seq in lengths])
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_ylim(0, highest * 1.22)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")
    axes.set_xlabel("sequence length [tokens]")
    if metric.reference is not None:
        axes.axhline(metric.reference, color="#444444", linewidth=1.0, linestyle=(0, (4, 3)), zorder=3)


def _length(seq: int) -> str:
    """ "32K" for whole multiples of 1,024, else the number."""
    return f"{seq // 1024}K" if seq % 1024 == 0 else f"{seq:,}"


def _handles(
    pairs: Sequence[tuple[str, str]], colours: Mapping[str, str], marks: Mapping[tuple[str, str], str]
) -> list[Patch]:
    return [
        Patch(facecolor=colours[system], hatch=marks[system, label], edgecolor="white", linewidth=0, label=label)
        for system, label in pairs
    ]
