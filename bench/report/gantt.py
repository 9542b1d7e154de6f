"""Decides how a schedule is drawn: one picture per system, workers from top to bottom, time to the right.

A narrow strip shows the whole step (how full each worker is); below it an
excerpt shows single operations with their micro-batch numbers, computation on
thick lanes and communication on thin ones. What the excerpt leaves out is said
in the title.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from bench.report.classes import CLASSES, class_codes, communicates
from bench.report.facts import Results, facts, notes
from bench.report.lanes import (
    Boxes,
    Lane,
    Window,
    boxes,
    excerpt,
    lay_lanes,
    occupancy,
    shown_workers,
)
from bench.report.style import (
    MUTED,
    axes_at,
    canvas,
    drawing,
    footer,
    headline,
    ink_on,
    legend_below_headline,
    save,
)
from bench.selection import WHOLE, Selection
from disagmoe.ops import Stream
from disagmoe.plan.plan import Layout, Placement
from disagmoe.timeline.streams import stream_words
from disagmoe.timeline.timeline import Timeline

WIDTH, LEFT, RIGHT = 15.0, 0.75, 0.85
UNIT = 0.205
"""Height of one compute lane in inches."""
STRIP_ROW = 0.115
"""Height of one worker in the whole-step strip, in inches."""
NUMBER_PT = 6.4
OP_PT = 15.0
"""Width that a typical operation should have in the excerpt, in points: two digits fit."""
LEGEND_COLUMNS = 6
THIN_PT = 2.0
IDLE, LANE_BACK = "#F1F1F1", "#FAFAFA"


def write_gantt(
    results: Results,
    name: str,
    view: str,
    timeline: Timeline,
    layout: Layout,
    path: Path,
    selection: Selection = WHOLE,
) -> Path:
    """Draw one system's timeline to `path` (.png or .svg).

    Of a window that reaches beyond the step the part inside is drawn; where the
    system has nothing of what was selected, it is drawn as without a selection.
    """
    placement, window = layout.placement, None
    if selection.window_s is not None and selection.window_s[0] < timeline.step_s:
        window = Window(selection.window_s[0], min(selection.window_s[1], timeline.step_s))
    chosen = selection.indices([worker.name for worker in placement.workers])
    with drawing():
        save(gantt_figure(results, name, view, timeline, placement, window, chosen), path)
    return path


def gantt_figure(
    results: Results,
    name: str,
    view: str,
    timeline: Timeline,
    placement: Placement,
    window: Window | None = None,
    chosen: Sequence[int] = (),
) -> Figure:
    """The picture of one timeline; by default an excerpt of the steady state, and workers spread over the pipeline."""
    workers = shown_workers(placement, chosen)
    span = window or excerpt(timeline, int((WIDTH - LEFT - RIGHT) * 72 / OP_PT))
    whole = span.start_s <= 0.0 and span.end_s >= timeline.step_s
    lanes = lay_lanes(timeline, workers, span)
    shapes = boxes(timeline, lanes, span)
    codes = class_codes(timeline.program)
    rows = max((lane.top + lane.height for lane in lanes), default=1.0)

    foot_lines = _foot(results, timeline, whole, window is not None)
    bottom = 0.62 + 0.13 * len(foot_lines)
    strip = 0.0 if whole else STRIP_ROW * len(workers)
    strip_rows = np.flatnonzero(~communicates(timeline.program) & np.isin(timeline.program.worker, workers))
    shown = np.unique(codes[shapes.row if whole else np.concatenate((shapes.row, strip_rows))])
    legend_rows = -(-len(shown) // LEGEND_COLUMNS)
    top = 0.78 + 0.2 * legend_rows + (0.0 if whole else strip + 0.82)
    figure = canvas(WIDTH, bottom + rows * UNIT + top)
    axes = axes_at(figure, LEFT, bottom, WIDTH - LEFT - RIGHT, rows * UNIT)
    _draw_excerpt(axes, timeline, lanes, shapes, codes, span)
    _label_workers(axes, lanes, placement, rows, stream_words(timeline.program))
    if not whole:
        above = axes_at(figure, LEFT, bottom + rows * UNIT + 0.6, WIDTH - LEFT - RIGHT, strip)
        _draw_strip(above, timeline, workers, placement, codes, span)
    handles = [Patch(facecolor=CLASSES[code].colour, label=CLASSES[code].label) for code in shown]
    legend_below_headline(figure, handles, columns=LEGEND_COLUMNS)
    headline(figure, _title(name, view, timeline, span, whole), _subtitle(results, placement, workers))
    footer(figure, "\n".join(foot_lines))
    return figure


def _title(name: str, view: str, timeline: Timeline, span: Window, whole: bool) -> str:
    step = f"{timeline.step_s * 1e3:,.0f} ms" if timeline.step_s >= 0.01 else f"{timeline.step_s * 1e3:,.3g} ms"
    if whole:
        return f"{name}, {view} view, {timeline.origin}: the whole step of {step}"
    digits = 0 if span.end_s - span.start_s >= 0.02 else 2
    part = f"{span.start_s * 1e3:,.{digits}f}–{span.end_s * 1e3:,.{digits}f} ms"
    return f"{name}, {view} view, {timeline.origin}: a step of {step} and, below, its excerpt {part}"


def _subtitle(results: Results, placement: Placement, workers: list[int]) -> str:
    text = facts(results).subtitle
    if len(workers) < len(placement.workers):
        text += f" · {len(workers)} of {len(placement.workers)} workers shown"
    if placement.replicas > 1:
        text += f" · one of {placement.replicas} replicas"
    return text


def _foot(results: Results, timeline: Timeline, whole: bool, asked: bool) -> list[str]:
    text = "numbers are micro-batches; white or grey = idle; a transfer is drawn from the moment both ends are ready"
    if not (timeline.end_s > timeline.start_s).all():
        text += "; operations of no duration are left out"
    if not whole and not asked:
        text += "; the excerpt lies where forward and backward are most mixed"
    return [text, *notes(results)[:1]]


# ---- excerpt --------------------------------------------------------------------------------------------------------


def _draw_excerpt(
    axes: Axes, timeline: Timeline, lanes: list[Lane], shapes: Boxes, codes: NDArray[np.int64], span: Window
) -> None:
    """Lane backgrounds, operations and micro-batch numbers; x in ms."""
    for lane in lanes:
        axes.axhspan(lane.top, lane.top + lane.height, color=IDLE if lane.computes else LANE_BACK, linewidth=0)
    axes.set_xlim(span.start_s * 1e3, span.end_s * 1e3)
    last = lanes[-1]
    axes.set_ylim(last.top + last.height, 0.0)
    pad = np.where(communicates(timeline.program)[shapes.row], 0.05, 0.0)
    left, right = shapes.left_s * 1e3, shapes.right_s * 1e3
    above, below = shapes.top + pad, shapes.top + shapes.height - pad
    outline = ((left, above), (right, above), (right, below), (left, below))
    corners = np.stack([np.stack(corner, axis=1) for corner in outline], axis=1)
    faces = np.array([to_rgb(entry.colour) for entry in CLASSES])[codes[shapes.row]]
    points = (WIDTH - LEFT - RIGHT) * 72 / ((span.end_s - span.start_s) * 1e3)
    edges = np.where(((right - left) * points < THIN_PT)[:, None], faces, 1.0)  # a white edge would hide a thin box
    axes.add_collection(
        PolyCollection(list(corners), facecolors=faces, edgecolors=edges, linewidths=0.3),
        autolim=False,
    )
    _draw_numbers(axes, timeline, shapes, codes, span)
    axes.set_xlabel("time from the start of the step [ms]")
    axes.xaxis.set_major_locator(MaxNLocator(14))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.spines["left"].set_visible(False)


def _draw_numbers(axes: Axes, timeline: Timeline, shapes: Boxes, codes: NDArray[np.int64], span: Window) -> None:
    """Micro-batch numbers centred in the compute operations that are wide enough.

    All numbers of one ink are a single outline: a text object each would take
    longer than everything else in the picture.
    """
    program = timeline.program
    points = (WIDTH - LEFT - RIGHT) * 72 / ((span.end_s - span.start_s) * 1e3)
    thick = ~communicates(program)[shapes.row] & (program.microbatch[shapes.row] >= 0)
    glyphs: dict[int, tuple[TextPath, float]] = {}
    inks: dict[str, list[Outline]] = {}
    scale = np.array([1 / points, -1 / (UNIT * 72)])
    for at in np.flatnonzero(thick):
        number = int(program.microbatch[shapes.row[at]])
        glyph, wide = glyphs.setdefault(number, _glyph(number)) if number not in glyphs else glyphs[number]
        left, right = shapes.left_s[at] * 1e3, shapes.right_s[at] * 1e3
        if (right - left) * points < wide + 0.8:
            continue
        centre = np.array([(left + right) / 2, shapes.top[at] + shapes.height[at] / 2])
        vertices = (glyph.vertices - np.array([wide / 2, NUMBER_PT * 0.365])) * scale + centre
        ink = ink_on(CLASSES[codes[shapes.row[at]]].colour)
        inks.setdefault(ink, []).append(Outline(vertices, glyph.codes))
    for ink, outlines in inks.items():
        axes.add_patch(PathPatch(Outline.make_compound_path(*outlines), facecolor=ink, linewidth=0))


def _glyph(number: int) -> tuple[TextPath, float]:
    """Outline of a number at NUMBER_PT and its width in points."""
    path = TextPath((0, 0), str(number), prop=FontProperties(family="DejaVu Sans", size=NUMBER_PT))
    return path, float(path.get_extents().x1)


def _label_workers(
    axes: Axes, lanes: list[Lane], placement: Placement, rows: float, words: Mapping[Stream, str]
) -> None:
    """Worker names on the left, stream names on the right."""
    middles: dict[int, list[float]] = {}
    for lane in lanes:
        middles.setdefault(lane.worker, []).extend((lane.top, lane.top + lane.height))
        axes.annotate(
            words[lane.stream],
            (1.0, 1 - (lane.top + lane.height / 2) / rows),
            (4, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=5.6,
            color=MUTED,
            va="center",
        )
    places = [(min(ys) + max(ys)) / 2 for ys in middles.values()]
    axes.set_yticks(places, [placement.workers[worker].name for worker in middles], fontsize=8.5)
    axes.tick_params(axis="y", length=0)


# ---- whole step -----------------------------------------------------------------------------------------------------


def _draw_strip(
    axes: Axes, timeline: Timeline, workers: list[int], placement: Placement, codes: NDArray[np.int64], span: Window
) -> None:
    """Every worker over the whole step as one row of pixels, mixed from the colours of what it computes."""
    share = occupancy(timeline, workers, codes, len(CLASSES), bins=1500)
    palette = np.array([to_rgb(entry.colour) for entry in CLASSES])
    image = share @ palette + (1.0 - share.sum(axis=2, keepdims=True))
    extent = (0.0, timeline.step_s * 1e3, len(workers), 0.0)
    axes.imshow(np.clip(image, 0.0, 1.0), aspect="auto", extent=extent, interpolation="nearest")
    axes.axvspan(span.start_s * 1e3, span.end_s * 1e3, facecolor="none", edgecolor="black", linewidth=1.2, zorder=4)
    axes.set_yticks(np.arange(len(workers)) + 0.5, [placement.workers[worker].name for worker in workers], fontsize=5.8)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(14))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.tick_params(axis="x", labelsize=7.5)
    text = "the whole step [ms], coloured by what a worker computes (white: nothing); the frame is the excerpt below"
    axes.set_title(text, loc="left", fontsize=8, fontweight="normal", color=MUTED, pad=4)
