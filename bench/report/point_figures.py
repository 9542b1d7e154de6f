"""Decides the pictures of single claims: heat maps of the A:F ratio and of top-k by EP, curves over v and the batch.

Every picture names what the paper states beside ours, and marks what did not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report import paper
from bench.report.facts import ORIGIN, REFERENCE
from bench.report.heat import draw_cells, gain_norm, outline
from bench.report.points import EQUAL, equal_steps, gain_over_equal, picture_stems
from bench.report.style import INK, SYSTEM_COLOURS, axes_at, canvas, drawing, footer, headline, save
from bench.report.text import length

Point = Mapping[str, Any]
Record = Mapping[str, Any]

SHORT = {"oom": "OOM", "not_applicable": "n/a", "failed": "failed", "ok": "–"}
OWN_COLOUR, REFERENCE_COLOUR = SYSTEM_COLOURS["disagmoe"], SYSTEM_COLOURS[REFERENCE]
RULES = {"halves": "half of the NICs each", "free": "NICs as the tuner likes", "own": "whole nodes per pool"}
CELL_W, CELL_H, LEFT, GAP, TOP, FOOT = 0.86, 0.32, 0.8, 0.75, 1.05, 0.95
PANEL_W, PANEL_H = 3.5, 2.7
RATIO_PAPER = (
    "The paper (measured; model and depth of its figure not stated): best about 16:16 at 4K and 16:10 at 16K (1.56×"
    " over Megatron-1F1B,\n1.29× over 16:16, which its own formula bounds by 32/26 = 1.23× per GPU); 16:8 and 8:16"
    " fall to about 1×. Framed: best of a length."
)


def write_figures(record: Record, directory: Path) -> list[Path]:
    """Write the picture of every group of points as PNG and SVG; returns the paths."""
    draw: dict[str, Callable[[Record, Sequence[Point]], Figure]] = {
        "ratio": ratio_figure,
        "top_k": top_k_figure,
        "depth": stages_figure,
        "batch": batch_figure,
    }
    paths: list[Path] = []
    for axis, model, stem in picture_stems(record):
        mine = [p for p in record["points"] if p["axis"] == axis and model in ("", p["model"])]
        both = [directory / f"{stem}.png", directory / f"{stem}.svg"]
        with drawing():
            save(draw[axis](record, mine), *both)
        paths += both
    return paths


def _model(record: Record, name: str) -> str:
    """Title and depth of a model."""
    found = next(m for m in record["models"] if m["name"] == name)
    return f"{found['title']}, {found['layers']} of {found['of']} layers"


def _place(point: Point) -> tuple[str, int]:
    """What the points of one panel share."""
    return str(point["model"]), int(point["seq"])


def _places(points: Sequence[Point]) -> list[tuple[str, int]]:
    return list(dict.fromkeys(_place(point) for point in points))


def _titled(record: Record, place: tuple[str, int]) -> str:
    return f"{_model(record, place[0])}, seq {length(place[1])}"


def _origin(record: Record) -> str:
    where = f"{ORIGIN[str(record['backend'])]} on {record['cluster']['name']}"
    return f"{where} (calibration {record['calibration']}), {record['view']} view"


def _note(record: Record, text: str) -> str:
    return f"{text}\nrun {record['run']['id']}"


# ---- heat maps -------------------------------------------------------------------------------------------------------


def ratio_figure(record: Record, points: Sequence[Point]) -> Figure:
    """Rows of panels: over the reference, over 16:16. Columns: rules for the NICs. Ratios over lengths in each."""
    ratios = list(dict.fromkeys(str(p["at"]["ratio"]) for p in points))
    rules = list(dict.fromkeys(str(p["at"]["nics"]) for p in points))
    lengths = sorted({int(p["seq"]) for p in points})
    at = {(str(p["at"]["nics"]), str(p["at"]["ratio"]), int(p["seq"])): p for p in points}
    equal = equal_steps(points)
    measures: tuple[tuple[str, Callable[[Point], float | None]], ...] = (
        (f"over {REFERENCE}", lambda p: p["speedup_over_reference"]),
        (f"over {EQUAL}", lambda p: gain_over_equal(p, equal)),
    )
    width, height = max(3.0, CELL_W * len(lengths)), CELL_H * len(ratios)
    figure = canvas(
        max(9.0, LEFT + len(rules) * width + (len(rules) - 1) * GAP + 0.3), TOP + FOOT + 2 * height + GAP + 0.25
    )
    for row, (title, measure) in enumerate(measures):
        norm = gain_norm(measure(p) for p in points)
        for column, rule in enumerate(rules):
            bottom = FOOT + 0.25 + (1 - row) * (height + GAP)
            axes = axes_at(figure, LEFT + column * (width + GAP), bottom, width, height)
            here = [[at[rule, ratio, seq] for seq in lengths] for ratio in ratios]
            gains = [[measure(p) for p in line] for line in here]
            draw_cells(axes, gains, [[_cell(measure(p), p) for p in line] for line in here], norm)
            for x in range(len(lengths)):
                best = max((g, -y) for y, line in enumerate(gains) for g in [line[x] or 0.0])
                if best[0] > 0.0:
                    outline(axes, x, -best[1])
            _ticks(axes, [length(seq) for seq in lengths], ratios)
            axes.set_title(f"{title}, {RULES.get(rule, rule)}", loc="left", fontsize=8.5)
            axes.set_ylabel("GPUs of A : F" if column == 0 else "")
            axes.set_xlabel("sequence length" if row == 1 else "")
    model = _model(record, str(points[0]["model"]))
    headline(
        figure,
        f"How many GPUs for attention and for experts: {model}",
        f"gains are ratios of steps · {_origin(record)}",
    )
    footer(figure, _note(record, RATIO_PAPER))
    return figure


def _cell(gain: float | None, point: Point) -> str:
    return SHORT[str(point["status"])] if gain is None else f"{gain:.2f}×"


def _ticks(axes: Axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)


def top_k_figure(record: Record, points: Sequence[Point]) -> Figure:
    """Speed-up over the reference, top-k over the expert-parallel size; one panel per model and length."""
    places = _places(points)
    ks = sorted({int(p["at"]["top_k"]) for p in points})
    sizes = sorted({int(p["at"]["ep"]) for p in points})
    at = {(_place(p), int(p["at"]["top_k"]), int(p["at"]["ep"])): p for p in points}
    width, height = max(5.6 if len(places) == 1 else 3.6, 1.05 * len(sizes)), 0.5 * len(ks)
    across = LEFT + len(places) * width + (len(places) - 1) * GAP + 0.3
    figure = canvas(max(7.4, across), TOP + FOOT + height + 0.3)
    norm = gain_norm(p["speedup_over_reference"] for p in points)
    for column, place in enumerate(places):
        axes = axes_at(figure, LEFT + column * (width + GAP), FOOT + 0.3, width, height)
        here = [[at[place, k, ep] for ep in sizes] for k in ks]
        gains = [[p["speedup_over_reference"] for p in line] for line in here]
        draw_cells(axes, gains, [[_top_k_cell(p) for p in line] for line in here], norm)
        _ticks(axes, [str(ep) for ep in sizes], [str(k) for k in ks])
        axes.set_title(_titled(record, place), loc="left", fontsize=9)
        axes.set_xlabel("expert-parallel size asked for")
        axes.set_ylabel("top-k" if column == 0 else "")
    claim = next(claim for claim in paper.CLAIMS if "top-k" in claim.text)
    published = paper.range_text({"low": claim.low, "high": claim.high, "unit": claim.unit})
    headline(figure, f"Step of {REFERENCE} ÷ step of disagmoe, by top-k and EP", _origin(record))
    text = f"The paper (measured; sequence length not stated): {published} over all its top-k and EP sizes, 64 experts."
    footer(figure, _note(record, f"{text}\nEP n: the size disagmoe took where the one asked for does not fit."))
    return figure


def _top_k_cell(point: Point) -> str:
    taken = (point["plan"] or {}).get("ep")
    extra = f"\nEP {taken}" if taken not in (None, point["at"]["ep"]) else ""
    return _cell(point["speedup_over_reference"], point) + extra


# ---- curves ----------------------------------------------------------------------------------------------------------


def stages_figure(record: Record, points: Sequence[Point]) -> Figure:
    """Throughput over the number of virtual stages, one panel per model; crosses at the bottom did not fit."""

    def panel(axes: Axes, mine: Sequence[Point]) -> None:
        ran = sorted((p for p in mine if p["status"] == "ok"), key=lambda p: int(p["at"]["v"]))
        lost = [p for p in mine if p["status"] != "ok"]
        xs, ys = [int(p["at"]["v"]) for p in ran], [_tokens_s(record, p, p["step_s"]) for p in ran]
        best = {x: max(y for at, y in zip(xs, ys, strict=True) if at == x) for x in xs}
        axes.plot(list(best), list(best.values()), color=OWN_COLOUR, linewidth=1.2, zorder=2)
        for x, y, point in zip(xs, ys, ran, strict=True):
            asked = int((point["plan"] or {}).get("ep", 0)) == EP
            face = OWN_COLOUR if asked else "white"
            axes.plot(x, y, "o", color=OWN_COLOUR, markerfacecolor=face, markersize=5.5, zorder=3)
            _label(axes, f"p={point['at']['p']}", x, y)
        steps = [p["reference_step_s"] for p in mine if p["reference_step_s"]]
        usual = [_tokens_s(record, p, p["reference_step_s"]) for p in mine if p["reference_step_s"]][:1]
        if steps:
            axes.axhline(usual[0], color=REFERENCE_COLOUR, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        top = 1.2 * max([*ys, *usual, 1.0])
        axes.set_ylim(0.0, top)
        for point in lost:
            x, y = int(point["at"]["v"]), 0.05 * top
            axes.plot(x, y, "x", color=INK, markersize=6, markeredgewidth=1.5, zorder=3)
            word = f"{SHORT[str(point['status'])]}, p={point['at']['p']}"
            axes.annotate(word, (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=6.8, rotation=90)
        _log_ticks(axes, sorted({int(p["at"]["v"]) for p in mine}), "virtual stages v = layers / p")
        axes.axvline(16, color="#999999", linewidth=1.0, linestyle=":", zorder=0)

    others = any(p["status"] == "ok" and p["plan"].get("ep") != EP for p in points)
    text = (
        f"Grey dashes: {REFERENCE}. Crosses: did not fit. Dotted: v = 16, up to which the paper's throughput grows"
        " (measured); above it the paper runs out of memory."
    ) + (f"\nHollow: only with another EP size than {EP}." if others else "")
    title = "Throughput by number of virtual stages"
    return _panels(record, points, panel, title, "tokens/s per GPU", text)


EP = 16
"""The paper's expert-parallel size."""


def _tokens_s(record: Record, point: Point, step_s: float) -> float:
    """Tokens per second and GPU of the cluster."""
    gpus = sum(int(group["count"]) * int(group["gpus"]) for group in record["cluster"]["groups"])
    return float(int(point["seq"]) * int(point["global_batch"]) / step_s / gpus)


def batch_figure(record: Record, points: Sequence[Point]) -> Figure:
    """Speed-up over the reference by batch, one panel per model; numbers are micro-batches of disagmoe."""
    claim = paper.CLAIMS[0]
    published = paper.range_text({"low": claim.low, "high": claim.high, "unit": claim.unit})

    def panel(axes: Axes, mine: Sequence[Point]) -> None:
        ran = [p for p in mine if p["speedup_over_reference"]]
        xs = [float(p["at"]["batch"]) for p in ran]
        ys = [float(p["speedup_over_reference"]) for p in ran]
        axes.axhspan(claim.low or 0.0, claim.high or 0.0, color="#BBBBBB", alpha=0.55, linewidth=0, zorder=1)
        axes.axhline(1.0, color="#444444", linewidth=1.0, linestyle=(0, (4, 3)), zorder=2)
        axes.plot(xs, ys, "o-", color=OWN_COLOUR, linewidth=1.2, markersize=5.5, zorder=3)
        for x, y, point in zip(xs, ys, ran, strict=True):
            _label(axes, f"n={point['microbatches']}", x, y)
        axes.set_ylim(min([0.9, *ys]) - 0.08, max([claim.high or 1.0, *ys]) + 0.12)
        for point in mine:
            if not point["speedup_over_reference"]:
                where = (float(point["at"]["batch"]), axes.get_ylim()[0])
                axes.annotate(
                    SHORT[str(point["status"])], where, (0, 4), textcoords="offset points", ha="center", fontsize=7
                )
        _log_ticks(axes, sorted({float(p["at"]["batch"]) for p in mine}), "global batch ÷ the default one")

    text = (
        f"Grey band: the paper (measured), {published} over its models and lengths; its batch is not known."
        " n: micro-batches of the plan of disagmoe."
    )
    title = f"Step of {REFERENCE} ÷ step of disagmoe, by batch"
    return _panels(record, points, panel, title, "speed-up", text)


def _panels(
    record: Record,
    points: Sequence[Point],
    panel: Callable[[Axes, Sequence[Point]], None],
    title: str,
    label: str,
    text: str,
) -> Figure:
    """One panel per model and length, side by side."""
    places = _places(points)
    figure = canvas(max(9.0, 0.8 + len(places) * PANEL_W + (len(places) - 1) * 0.65 + 0.3), TOP + PANEL_H + FOOT + 0.25)
    for column, place in enumerate(places):
        axes = axes_at(figure, 0.8 + column * (PANEL_W + 0.65), FOOT + 0.15, PANEL_W, PANEL_H)
        panel(axes, [p for p in points if _place(p) == place])
        axes.set_title(_titled(record, place), loc="left", fontsize=8.5)
        axes.set_ylabel(label if column == 0 else "")
        axes.grid(axis="y")
    headline(figure, title, _origin(record))
    footer(figure, _note(record, text))
    return figure


def _label(axes: Axes, text: str, x: float, y: float) -> None:
    """Words above a point, readable over lines."""
    box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
    place: Any = {"textcoords": "offset points", "ha": "center", "fontsize": 7.0, "bbox": box, "zorder": 4}
    axes.annotate(text, (x, y), (0, 7), **place)


def _log_ticks(axes: Axes, values: Sequence[float], label: str) -> None:
    """A logarithmic axis with a tick at every value that is there."""
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.set_xlim(min(values) / 1.25, max(values) * 1.25)
    axes.set_xlabel(label)
