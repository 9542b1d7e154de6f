"""Decides how every picture looks: colours per system, component, phase and kind, fonts, captions, and stable bytes.

System colours are the Okabe-Ito set with greys, told apart by readers with
colour-vision deficiencies (a test computes it); parts of a stack and lanes of a Gantt also differ in lightness or
hatching. Pictures made twice from equal data are equal byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from disagmoe.ops import Kind, Phase

SYSTEM_COLOURS = {
    "megatron_1f1b": "#696969",
    "megatron_1f1b_overlap": "#2B2B2B",
    "tutel": "#E69F00",
    "comet": "#CC79A7",
    "dualpipe": "#56B4E9",
    "dualpipe_v": "#0072B2",
    "disagmoe": "#D55E00",
    "disagmoe_plus": "#009E73",
}
SPARE_COLOURS = ("#F0E442", "#332288", "#88CCAA", "#882255", "#DDCC99", "#661100")
"""For systems from outside the tree, in order of appearance."""

VARIANT_HATCHES = ("", "////", "....", "xxxx")

COMPONENTS = (
    ("compute", "compute", "#3B6FA0", ""),
    ("overlapped", "compute with communication under it", "#A9C9E8", "////"),
    ("exposed", "exposed communication", "#D55E00", ""),
    ("bubble", "bubble (idle or waiting for a peer)", "#DDDDDD", ""),
)
"""Parts of a step from left to right: key, label, colour, hatch. They add up to the step."""

PHASE_COLOURS: dict[Phase, tuple[str, str]] = {
    Phase.F: ("#2A66B8", "#93BBE6"),
    Phase.B: ("#109A91", "#7CCBC4"),
    Phase.I: ("#109A91", "#7CCBC4"),
    Phase.W: ("#86B82A", "#CBE39A"),
    Phase.R: ("#B880DC", "#E4D0F2"),
}
"""Forward blue, backward teal, weight gradient green, recompute violet: (attention and others, FFN)."""
OPTIM_COLOUR = "#4D4D4D"
HEAD_COLOURS: dict[Phase, str] = {
    Phase.F: "#153E75",
    Phase.B: "#04504B",
    Phase.I: "#04504B",
    Phase.W: "#3F5E08",
    Phase.R: "#4A3270",
}
"""Embedding and output head: the same hues, darker."""

COMM_COLOURS = {Kind.DISPATCH: "#E69F00", Kind.COMBINE: "#D55E00", Kind.P2P: "#CC79A7", Kind.GRAD_SYNC: "#7F5A2A"}

INK, MUTED, GRID = "#222222", "#666666", "#DDDDDD"

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.dpi": 150,
    "svg.hashsalt": "disagmoe",
    "svg.fonttype": "path",
    "path.simplify": True,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Everything drawn inside uses this style and nothing of the user's matplotlibrc."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def canvas(width_in: float, height_in: float) -> Figure:
    """An empty figure that needs no display."""
    figure = Figure(figsize=(width_in, height_in))
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, *paths: Path) -> None:
    """Write a figure as PNG or SVG by suffix, without dates or versions inside."""
    for path in paths:
        if path.suffix == ".svg":
            figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        else:
            figure.savefig(path, format="png", metadata={"Software": None})


def system_colours(systems: Iterable[str]) -> dict[str, str]:
    """A colour per system: fixed for the shipped ones, the next spare for others."""
    colours: dict[str, str] = {}
    spare = 0
    for name in dict.fromkeys(systems):
        if name in SYSTEM_COLOURS:
            colours[name] = SYSTEM_COLOURS[name]
        else:
            colours[name] = SPARE_COLOURS[spare % len(SPARE_COLOURS)]
            spare += 1
    return colours


def hatches(labels: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """A hatch per (system, label): none for a system's first label, then one after the other."""
    seen: dict[str, list[str]] = {}
    for system, label in labels:
        names = seen.setdefault(system, [])
        if label not in names:
            names.append(label)
    return {
        (system, label): VARIANT_HATCHES[index % len(VARIANT_HATCHES)]
        for system, names in seen.items()
        for index, label in enumerate(names)
    }


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on a background (relative luminance, WCAG)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#FFFFFF" if luminance < 0.18 + 0.12 else "#111111"


def headline(figure: Figure, title: str, subtitle: str, *, top_in: float = 0.30) -> None:
    """Bold title and grey subtitle at the top left, at a fixed distance from the edge in inches."""
    width, height = figure.get_size_inches()
    left = 0.15 / width
    figure.text(left, 1 - top_in / height, title, fontsize=12.5, fontweight="bold", va="baseline", ha="left")
    figure.text(left, 1 - (top_in + 0.22) / height, subtitle, fontsize=9, color=MUTED, va="baseline", ha="left")


def legend_below_headline(figure: Figure, handles: Sequence[Patch], columns: int) -> None:
    """Legend rows right below the subtitle, aligned with it."""
    width, height = figure.get_size_inches()
    figure.legend(
        handles=list(handles),
        loc="upper left",
        bbox_to_anchor=(0.15 / width, 1 - 0.62 / height),
        ncols=columns,
        handlelength=1.4,
        handleheight=0.85,
        columnspacing=1.4,
        borderaxespad=0.0,
        borderpad=0.0,
    )


def footer(figure: Figure, text: str) -> None:
    """Small grey lines at the bottom left: definitions, notes, where the numbers come from."""
    width, height = figure.get_size_inches()
    figure.text(0.15 / width, 0.10 / height, text, fontsize=7.2, color=MUTED, va="bottom", ha="left", linespacing=1.35)


def axes_at(figure: Figure, left: float, bottom: float, width: float, height: float, **options: Any) -> Axes:
    """New axes at a place given in inches from the figure's lower left corner."""
    total_w, total_h = figure.get_figwidth(), figure.get_figheight()
    return figure.add_axes((left / total_w, bottom / total_h, width / total_w, height / total_h), **options)
