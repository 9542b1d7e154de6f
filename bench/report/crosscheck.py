"""How a cross-check is told: a table, a CSV file, and a parity plot with bands of 5 and 10 %."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from bench.crosscheck import Check, Verdict
from bench.report.columns import DASH, plan_text
from bench.report.grid import Grid, escaped, markdown_lines
from bench.report.style import (
    GRID,
    MUTED,
    SPARE_COLOURS,
    SYSTEM_COLOURS,
    axes_at,
    canvas,
    drawing,
    footer,
    headline,
    save,
    system_colours,
)

SWITCHES_NOTE = (
    "Switches of disagmoe_plus, each on with all others off, in the fastest promising full-size plan of its form, "
    "not in the plan a search would choose. *differs in* says what tells the cut from the same cut without the switch; "
    "where that is durations only, the Program is the same and the row counts for no limit."
)
BANDS = (0.10, 0.05)
TIMES = ("step_time_s", "compute_s", "exposed_comm_s", "bubble_s")
SHAPES = {4: "o", 8: "s"}
TICKS = [step * 10.0**power for power in range(-3, 7) for step in (1, 1.5, 2, 3, 4, 5, 6, 8)]


def markdown(
    title: str,
    checks: Sequence[Check],
    verdicts: Sequence[Verdict],
    left_out: Sequence[str],
    machine: Mapping[str, Any],
) -> str:
    """The whole page."""
    lines = [f"# Cross-check: emulated against simulated ({title})", ""]
    lines += [
        "Each cut was simulated, and run by real processes with the same durations (best repeat). Errors are "
        "(emulated − simulated) ÷ the simulated step.",
        "",
        f"Machine: {machine['cores']} cores of {machine['device']}, torch {machine['torch']}.",
        *(["", SWITCHES_NOTE] if any(check.shows for check in checks) else []),
    ]
    for processes in sorted({check.processes for check in checks}):
        mine = [check for check in checks if check.processes == processes]
        lines += markdown_lines(_grid(f"{processes} processes", mine), 2)
    lines += ["", "## Limits", ""]
    lines += [f"- {'holds' if v.holds else '**fails**'}: {v.limit}: {v.found}" for v in verdicts]
    if left_out:
        lines += ["", "## Not run, or not as it is", "", *(f"- {escaped(reason)}" for reason in left_out)]
    lines += markdown_lines(_plans(checks)) if checks else []
    return "\n".join(lines) + "\n"


def _grid(title: str, checks: Sequence[Check]) -> Grid:
    headings = (
        *("system", "simulated step [s]", "emulated step [s]", "step", "exposed", "bubble"),
        *("spread", "tries", "wall s per s", "started late", "own cores", "others' cores"),
    )
    if any(check.shows for check in checks):
        cells = tuple((*_cells(check), check.shows) for check in checks)
        return Grid(title, (*headings, "differs in"), cells, frozenset({0, len(headings)}))
    return Grid(title, headings, tuple(_cells(check) for check in checks))


def _plans(checks: Sequence[Check]) -> Grid:
    """What was cut, and what the cuts are on each number of processes."""
    counts = sorted({check.processes for check in checks})
    cells = []
    for name in dict.fromkeys((check.view, check.label) for check in checks if not check.control):
        mine = {check.processes: check for check in checks if (check.view, check.label) == name}
        sizes = [plan_text({"plan": mine[n].cut}) if n in mine else DASH for n in counts]
        cells.append((name[1], *sizes, plan_text({"plan": next(iter(mine.values())).plan})))
    headings = ("system", *(f"cut, {n} processes" for n in counts), "full-size plan")
    return Grid("What was cut", headings, tuple(cells), frozenset(range(len(headings))))


def _cells(check: Check) -> tuple[str, ...]:
    errors = [f"{100 * check.error(what):+.1f} %" for what in ("step_time_s", "exposed_comm_s", "bubble_s")]
    return (
        check.label,
        f"{check.simulated['step_time_s']:.4g}",
        f"{check.emulated['step_time_s']:.4g}",
        *errors,
        f"{100 * check.spread:.1f} %",
        str(check.tries),
        f"{check.dilation:.3g}",
        f"{100 * check.late_share:.0f} %",
        f"{check.own_load:.2f}",
        "–" if check.foreign_load is None else f"{check.foreign_load:.2f}",
    )


def write_csv(path: Path, checks: Sequence[Check]) -> None:
    """One line per check; full precision."""
    rows = []
    for check in checks:
        values = asdict(check)
        for side in ("simulated", "emulated"):
            values |= {f"{side}_{key}": value for key, value in values.pop(side).items()}
        values |= {key: plan_text({"plan": values[key]}) for key in ("plan", "cut")}
        rows.append({**values, **{f"error_{what}": check.error(what) for what in TIMES}})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["system"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_parity(directory: Path, title: str, checks: Sequence[Check]) -> list[Path]:
    """parity.png and parity.svg."""
    paths = [directory / "parity.png", directory / "parity.svg"]
    with drawing():
        save(parity_figure(title, checks), *paths)
    return paths


def parity_figure(title: str, checks: Sequence[Check]) -> Any:
    """Emulated over simulated GPU time per token, logarithmic; on the diagonal both agree."""
    figure = canvas(7.4, 5.6)
    axes = axes_at(figure, 0.75, 0.85, 4.1, 4.0)
    headline(figure, "Emulated against simulated, the same cut with the same durations", title)
    values = [1e6 * v for c in checks for v in (c.simulated_per_token_s, c.emulated_per_token_s)] or [1.0]
    low, high = 0.85 * min(values), 1.18 * max(values)
    for band, shade in zip(BANDS, ("#EEEEEE", "#DADADA"), strict=True):
        axes.fill_between([low, high], [low * (1 - band), high * (1 - band)], [low * (1 + band), high * (1 + band)],
                          color=shade, linewidth=0, zorder=1)  # fmt: skip
    axes.plot([low, high], [low, high], color=MUTED, linewidth=0.9, zorder=2)
    colours = _colours(checks)
    for check in checks:
        axes.plot(
            *(1e6 * check.simulated_per_token_s, 1e6 * check.emulated_per_token_s),
            SHAPES.get(check.processes, "D"),
            markersize=7,
            markeredgecolor=colours[_named(check)],
            markerfacecolor="white" if check.control else colours[_named(check)],
            alpha=0.9,
            zorder=3,
        )
    ticks = [tick for tick in TICKS if low <= tick <= high]
    for set_scale, set_limits, set_ticks in (
        (axes.set_xscale, axes.set_xlim, axes.set_xticks),
        (axes.set_yscale, axes.set_ylim, axes.set_yticks),
    ):
        set_scale("log")
        set_limits(low, high)
        set_ticks([], minor=True)
        set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(color=GRID, linewidth=0.4)
    axes.set_xlabel("simulated [GPU-µs per token]")
    axes.set_ylabel("emulated [GPU-µs per token]")
    axes.legend(handles=_handles(checks), loc="upper left", bbox_to_anchor=(1.03, 1.0), borderaxespad=0.0)
    footer(figure, "bands: ± 5 % and ± 10 %; hollow: overlap forbidden (the negative control); best of the repeats")
    return figure


def _named(check: Check) -> str:
    """What has a colour of its own: a system, or a switch."""
    return check.variant if check.shows else check.system


def _colours(checks: Sequence[Check]) -> dict[str, str]:
    names = list(dict.fromkeys(map(_named, checks)))
    if not any(check.shows for check in checks):
        return system_colours(names)
    return dict(zip(names, (*SPARE_COLOURS, *reversed(SYSTEM_COLOURS.values())), strict=False))


def _handles(checks: Sequence[Check]) -> list[Line2D]:
    colours = _colours(checks)
    systems = [Line2D([], [], linestyle="", marker="o", color=c, label=name) for name, c in colours.items()]
    counts = sorted({check.processes for check in checks})
    shapes = [
        Line2D([], [], linestyle="", marker=SHAPES.get(n, "D"), color=MUTED, label=f"{n} processes") for n in counts
    ]
    return systems + shapes
