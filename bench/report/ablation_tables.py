"""Decides what the tables of the ablation hold: cells won, every cell, every system's bound, every switch, every mix.

All gains are of simulated steps. "Before" is `disagmoe`, "after" the search over all
switches, both over the fastest baseline of their cell. What a table is of is a
`Place`; its lines or columns are cells, a model at a length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from bench.ablation_points import APART, SEPARATE, SHARED, TOGETHER
from bench.report.ablation_cells import (
    ALL,
    NEAR,
    NONE,
    SAME,
    Place,
    Point,
    Record,
    by_cell,
    cell_text,
    gains_of,
    gib,
    places,
    reason,
    redone,
    settings_of,
    share,
    switches_of,
)
from bench.report.columns import DASH
from bench.report.facts import finite
from bench.report.grid import Grid
from bench.report.text import length, seconds, times
from disagmoe.systems import DisagMoEPlus


def won_grid(record: Record) -> Grid:
    """Cells won over the fastest baseline, before and after, the margins after, and how many are near the bound."""
    lines = []
    for place in places(record):
        cells = by_cell(record, place).values()
        before, after = ([finite(cell[name]["speedup_over_best"]) for cell in cells] for name in (NONE, ALL))
        margins = [gain for gain in after if gain is not None]
        ratios = [finite(cell[ALL]["bound_ratio"]) for cell in cells]
        lines.append(
            (
                *(place.calibration, place.exchange, f"{place.batch:g}×"),
                f"{_won(before)} of {len(before)}",
                f"{_won(after)} of {len(after)}",
                *(times(pick(margins)) if margins else DASH for pick in (min, median, max)),
                str(sum(ratio is not None and ratio <= NEAR for ratio in ratios)),
            )
        )
    headings = (
        *("calibration", "exchange", "batch", "won by disagmoe", "by disagmoe_plus"),
        *("least", "median", "most", f"within {NEAR:.2f}× of the bound"),
    )
    return Grid("Cells won over the fastest baseline", headings, tuple(lines), frozenset({0, 1}))


def _won(gains: Sequence[float | None]) -> int:
    return sum(gain is not None and gain > 1.0 for gain in gains)


def margin_grid(record: Record, calibration: str) -> Grid:
    """Over the fastest baseline of every cell, before and after, by exchange."""
    rows = [place for place in places(record) if place.calibration == calibration and place.batch == 1.0]
    columns = list(dict.fromkeys(cell for place in rows for cell in by_cell(record, place)))
    lines = []
    for place in rows:
        cells = by_cell(record, place)
        for name, title in ((NONE, "disagmoe"), (ALL, "disagmoe_plus")):
            found = [cells[cell][name] if cell in cells else None for cell in columns]
            lines.append((place.exchange, title, *(DASH if p is None else _margin(p) for p in found)))
    title = f"Over the fastest baseline: calibration {calibration}"
    return Grid(title, ("exchange", "system", *map(cell_text, columns)), tuple(lines), frozenset({0, 1}))


def _margin(point: Point) -> str:
    if point["status"] != "ok":
        return str(point["status"]).replace("_", " ")
    return times(point["speedup_over_best"]) if point["speedup_over_best"] is not None else "alone"


def cell_grid(record: Record, place: Place) -> Grid:
    """Every cell before and after, and by which resource what is left is lost."""
    lines = []
    for cell, found in by_cell(record, place).items():
        before, after = found[NONE], found[ALL]
        lines.append(
            (
                *(cell[0], length(cell[1])),
                str(after["best_baseline"] or DASH),
                seconds(after["best_step_s"]),
                times(before["speedup_over_best"]),
                seconds(after["step_s"]),
                times(after["speedup_over_best"]),
                times(after["bound_ratio"]),
                gib(after["needed_gib"]),
                reason(after),
            )
        )
    headings = (
        *("model", "seq", "best baseline", "its step [s]", "disagmoe over it", "disagmoe_plus [s]"),
        *("over best baseline", "step ÷ bound", "GiB", "what is above the bound"),
    )
    return Grid(f"Every cell: {place.text}", headings, tuple(lines), frozenset({0, 1, 2, 9}))


def system_grid(record: Record, place: Place) -> Grid:
    """Step over bound of every system in every cell."""
    own, rivals = by_cell(record, place), by_cell(record, place, "system")
    rows = [("disagmoe", own, NONE), ("disagmoe_plus", own, ALL)]
    rows += [(name, rivals, name) for name in settings_of(rivals)]
    lines = [
        (title, *(_ratio(cells.get(cell, {}).get(name)) for cell in own))  # a cell without baselines has none here
        for title, cells, name in rows
    ]
    headings = ("system", *map(cell_text, own))
    return Grid(f"Step ÷ bound of every system: {place.text}", headings, tuple(lines))


def _ratio(point: Point | None) -> str:
    if point is None:
        return DASH
    if point["status"] != "ok":
        return str(point["status"]).replace("_", " ")
    return times(point["bound_ratio"])


def switch_grid(record: Record, place: Place) -> Grid:
    """Gain over disagmoe of every switch in every cell, its memory, and the median."""
    cells = by_cell(record, place)
    lines = []
    for switch in switches_of(record, place):
        gains = gains_of(record, [place], switch)
        texts = [_gain_text(cell.get(switch)) for cell in cells.values()]
        lines.append((switch, times(median(gains)) if gains else DASH, *texts))
    headings = ("switch", "median", *map(cell_text, cells))
    return Grid(f"Gain over disagmoe, and GiB of the fullest GPU: {place.text}", headings, tuple(lines))


def _gain_text(point: Point | None) -> str:
    if point is None:
        return DASH
    if point["status"] != "ok":
        return str(point["status"]).replace("_", " ")
    gain, needed = finite(point["gain_over_disagmoe"]), finite(point["needed_gib"])
    memory = "" if needed is None else f" ({needed:.0f})"
    return f"{'runs' if gain is None else f'{gain:.3f}×'}{memory}"


def step_grid(record: Record, place: Place) -> Grid:
    """Step and step over bound of every switch in every cell."""
    cells = by_cell(record, place)
    lines = [(name, *(_step_text(cell.get(name)) for cell in cells.values())) for name in settings_of(cells)]
    headings = ("switch", *map(cell_text, cells))
    return Grid(f"Step [s], and step ÷ bound: {place.text}", headings, tuple(lines))


def _step_text(point: Point | None) -> str:
    if point is None or point["status"] != "ok":
        return DASH
    ratio = finite(point["bound_ratio"])
    return f"{seconds(point['step_s'])}{'' if ratio is None else f' ({ratio:.2f}×)'}"


def worth_grid(record: Record, among: Sequence[Place], title: str) -> Grid:
    """Every switch over all cells of some places: what it is worth, in how many cells it runs, helps and hurts."""
    shipped, lines = DisagMoEPlus(), []
    for switch in dict.fromkeys(name for place in among for name in switches_of(record, place)):
        gains = gains_of(record, among, switch)
        asked = [cell for place in among for cell in by_cell(record, place).values() if switch in cell]
        lines.append(
            (
                *(switch, str(getattr(shipped, switch, DASH))),
                *(times(pick(gains)) if gains else DASH for pick in (median, min, max)),
                f"{sum(cell[switch]['status'] == 'ok' for cell in asked)} of {len(asked)}",
                str(sum(gain > 1.0 + SAME for gain in gains)),
                str(sum(gain < 1.0 - SAME for gain in gains)),
            )
        )
    headings = (
        *("switch", "by default", "median gain over disagmoe", "least", "most", "cells that run"),
        *("faster in", "slower in"),
    )
    return Grid(title, headings, tuple(lines), frozenset({0, 1}))


def mix_grid(record: Record, place: Place) -> Grid:
    """Least steps of both forms and of their mixes, and what a mix could gain at most."""
    lines = []
    for cell, found in by_cell(record, place, "bound").items():
        together, apart = found[TOGETHER], found.get(APART)
        pure = min(float(p["step_s"]) for p in (together, apart) if p is not None)
        mixes = []
        for name in (SEPARATE, SHARED):
            gain = pure / float(found[name]["step_s"]) - 1.0
            away = found[name]["plan"]
            mixes += [f"{100.0 * max(0.0, gain):.1f} %", f"{away['layers_apart']} of {away['layers']}"]
        shown = (DASH, DASH) if apart is None else (seconds(apart["step_s"]), str(apart["bound_by"]))
        lines.append((cell_text(cell), seconds(together["step_s"]), str(together["bound_by"]), *shown, *mixes))
    headings = (
        *("cell", "together [s]", "binds", "apart [s]", "binds", "a GPU in one form: gain at most", "layers apart"),
        *("in both forms: gain at most", "layers apart"),
    )
    return Grid(f"What splitting some layers could gain: {place.text}", headings, tuple(lines), frozenset({0, 2, 4}))


def replay_grid(record: Record, place: Place) -> Grid:
    """The baselines with a replay they do not have by default, and the margin that is left."""
    usual = by_cell(record, place)
    lines = []
    for cell, found in by_cell(record, place, "replay").items():
        own = usual[cell][ALL]
        ran = {name: float(point["step_s"]) for name, point in found.items() if point["status"] == "ok"}
        fastest = min(ran, key=ran.__getitem__, default=None)
        best, step = finite(own["best_step_s"]), finite(own["step_s"])
        steps = [*ran.values(), *([] if best is None else [best])]
        left = None if not steps or step is None else min(steps) / step
        shown = (DASH, DASH) if fastest is None else (fastest, seconds(ran[fastest]))
        lines.append((cell_text(cell), times(own["speedup_over_best"]), *shown, times(left)))
    headings = ("cell", "disagmoe_plus over the best", "fastest with hidden replay", "its step [s]", "margin left")
    return Grid(f"Hidden replay for the baselines too: {place.text}", headings, tuple(lines), frozenset({0, 2}))


def near_grid(record: Record, place: Place) -> Grid:
    """Step over bound of disagmoe_plus at the default batch and at a larger one."""
    usual, many = by_cell(record, place._replace(batch=1.0)), by_cell(record, place)
    lines = []
    for cell, found in many.items():
        own, before = found[ALL], usual.get(cell, {}).get(ALL)
        lines.append(
            (
                cell_text(cell),
                DASH if before is None else str(before["microbatches"] or DASH),
                _ratio(before),
                *(str(own["microbatches"] or DASH), _ratio(own), times(own["speedup_over_best"])),
                *(share(own, "exposed_s"), share(own, "bubble_s"), redone(own["plan"] or {}) or "nothing"),
            )
        )
    headings = (
        *("cell", "micro-batches", "step ÷ bound", f"micro-batches, {place.batch:g}×"),
        *(f"step ÷ bound, {place.batch:g}×", "over the best baseline", "exposed", "idle", "computed again"),
    )
    return Grid(f"Many micro-batches: {place.text}", headings, tuple(lines), frozenset({0, 8}))


def tables(record: Record, *, brief: bool = False) -> Iterator[Grid]:
    """All tables, `brief` ones for a terminal."""
    yield won_grid(record)
    single = [place for place in places(record) if len(switches_of(record, place)) > 1]
    if single:
        yield worth_grid(record, single, "Every switch over all cells in which it was tried alone")
    for calibration in dict.fromkeys(place.calibration for place in places(record)):
        yield margin_grid(record, calibration)
    for place in places(record):
        yield cell_grid(record, place)
        if place.batch != 1.0:
            yield near_grid(record, place)
        if brief:
            continue
        yield system_grid(record, place)
        if place in single:
            yield worth_grid(record, [place], f"Every switch: {place.text}")
            yield switch_grid(record, place)
            yield step_grid(record, place)
        if by_cell(record, place, "replay"):
            yield replay_grid(record, place)
        if by_cell(record, place, "bound"):
            yield mix_grid(record, place)
