"""Decides what docs/disagmoe-plus.md says of the ablation beyond its own report: its main table, and its sentences."""

from __future__ import annotations

from collections.abc import Sequence
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
    form_text,
    gib,
    places,
    redone,
    share,
)
from bench.report.columns import DASH
from bench.report.facts import ORIGIN, finite
from bench.report.grid import Grid
from bench.report.text import length, seconds, times


def run_sentence(record: Record) -> str:
    """Where the numbers come from."""
    run, cluster = record["run"], record["cluster"]["name"]
    commit = str((run["git"] or {}).get("commit") or "")[:7]
    systems = ", ".join(f"`{name}`" for name in record["systems"] if name not in ("disagmoe", "disagmoe_plus"))
    source = f", sources {commit}" if commit else ""
    return (
        f"All numbers below are **{ORIGIN[str(record['backend'])]}** on {cluster} (run {run['id']}{source}). Baselines:"
        f" {systems}."
    )


def forms_sentence(record: Record) -> str:
    """In how many cells the search keeps attention and experts together, at equal transport and in the native view."""
    texts = []
    for title, native in (("at equal transport", False), ("where each system has its own", True)):
        among = [p for p in places(record) if (p.exchange == "native") == native]
        found = [cell[ALL] for place in among for cell in by_cell(record, place).values() if cell[ALL]["plan"]]
        if found:
            texts.append(f"{sum((p['plan'] or {}).get('form') != APART for p in found)} of {len(found)} cells {title}")
    return f"The plan chosen keeps attention and experts together in {' and in '.join(texts)}."


def win_grid(record: Record, place: Place) -> Grid:
    """The page's main table: what is won in every cell, with the margins on other transports."""
    others = [p for p in places(record) if p[::2] == place[::2] and p != place]
    margins = {p: by_cell(record, p) for p in others}
    titles = {str(model["name"]): str(model["title"]) for model in record["models"]}
    lines = []
    for cell, found in by_cell(record, place).items():
        own = found[ALL]
        lines.append(
            (
                f"{titles[cell[0]]} {length(cell[1])}",
                str(own["best_baseline"] or DASH),
                seconds(own["best_step_s"]),
                seconds(found[NONE]["step_s"]) if found[NONE]["status"] == "ok" else str(found[NONE]["status"]),
                seconds(own["step_s"]),
                times(own["speedup_over_best"]),
                times(own["bound_ratio"]),
                gib(own["needed_gib"]),
                _plan(own),
                *(times(margins[p][cell][ALL]["speedup_over_best"]) for p in others),
            )
        )
    headings = (
        *("", "fastest baseline", "its step [s]", "disagmoe [s]", "disagmoe_plus [s]", "gain", "step ÷ bound", "GiB"),
        *("plan", *(f"gain, {p.exchange}" for p in others)),
    )
    return Grid("", headings, tuple(lines), frozenset({0, 1, 8}))


def _plan(point: Point) -> str:
    plan = point["plan"] or {}
    return ", ".join(text for text in (form_text(plan), redone(plan)) if text) or DASH


def far_grid(record: Record, place: Place) -> Grid:
    """Cells that are lost or far from the bound, and by which resource."""
    lines = []
    for cell, found in by_cell(record, place).items():
        own, ratio, margin = (found[ALL], *(finite(found[ALL][k]) for k in ("bound_ratio", "speedup_over_best")))
        if ratio is not None and ratio <= NEAR and (margin is None or margin > 1.0):
            continue
        verdict = "lost" if margin is not None and margin <= 1.0 else "won" if margin is not None else "alone"
        binds, losses = str(own["bound_by"] or DASH), (share(own, "exposed_s"), share(own, "bubble_s"))
        again = redone(own["plan"] or {}) or ("nothing" if own["plan"] else str(own["reason"]))
        lines.append(
            (cell_text(cell), verdict, times(ratio), binds, *losses, again, gib(own["needed_gib"]), _ring(found))
        )
    headings = (
        *("cell", "against baselines", "step ÷ bound", "binds", "exposed", "idle", "computed again", "GiB"),
        "what disagmoe loses there: exposed, idle",
    )
    return Grid("", headings, tuple(lines), frozenset({0, 1, 3, 6, 8}))


def _ring(found: dict[str, Point]) -> str:
    plain = found[NONE]
    if plain["status"] != "ok":
        return str(plain["status"])
    return f"{share(plain, 'exposed_s')}, {share(plain, 'bubble_s')}"


def worth_sentence(switch: str, gains: Sequence[float], cells: int) -> str:
    """What one switch is worth where it is on and all others off."""
    if not gains:
        return f"Alone: in none of the {cells} cells does such a plan fit beside one of `disagmoe`."
    better = sum(gain > 1.0 + SAME for gain in gains)
    return (
        f"Alone: {median(gains):.3f}× in the median of the {len(gains)} cells in which it and `disagmoe` run,"
        f" {min(gains):.3f}× to {max(gains):.3f}×; faster in {better}."
    )


def near_sentence(record: Record) -> str:
    """In how many cells with a larger batch the bound is near."""
    among = [place for place in places(record) if place.batch != 1.0]
    found = [cell[ALL] for place in among for cell in by_cell(record, place).values()]
    ratios = [ratio for ratio in (finite(point["bound_ratio"]) for point in found) if ratio is not None]
    near = [p for p in found if (finite(p["bound_ratio"]) or 9.0) <= NEAR]
    kept = sum(not redone(p["plan"] or {}).startswith("recompute") for p in found if p["plan"])
    return (
        f"Over all calibrations {len(near)} of {len(ratios)} such cells are within {NEAR:.2f}× of the bound; {kept} of"
        f" them recompute no attention and no experts."
    )


def mix_sentence(record: Record) -> str:
    """The most that any mix could gain, over all places."""
    most = {SEPARATE: 0.0, SHARED: 0.0}
    count = 0
    for place in places(record):
        for found in by_cell(record, place, "bound").values():
            count += 1
            pure = min(float(found[name]["step_s"]) for name in (TOGETHER, APART) if name in found)
            for name in most:
                most[name] = max(most[name], pure / float(found[name]["step_s"]) - 1.0)
    return (
        f"Over all {count} cells, transports and calibrations: at most {100 * most[SEPARATE]:.1f} % where a GPU works"
        f" for one form, at most {100 * most[SHARED]:.1f} % where it may work for both."
    )
