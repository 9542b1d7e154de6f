"""`python -m bench.curves RUN [RUN ...]`: the loss of training runs, and how far each is from the first.

A RUN is a folder that `python -m disagmoe.train` wrote, or its metrics.jsonl.
Prints the largest difference to the first run, draws both into results/curves.png
(or `--out`) and writes the numbers beside it (.csv).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.report.style import axes_at, canvas, drawing, headline, save

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
WIDTH_IN, PANEL_IN, LEFT_IN = 6.4, 2.3, 0.85
FIRST_WIDTH, WIDTH = 3.2, 1.1
"""Line widths in points: the first curve is wide, so that it shows under others that lie upon it."""


@dataclass(frozen=True)
class Curve:
    """The loss of one run by step."""

    name: str
    losses: dict[int, float]

    def differences(self, other: Curve) -> dict[int, float]:
        """Absolute differences on the steps that both have."""
        return {step: abs(loss - other.losses[step]) for step, loss in self.losses.items() if step in other.losses}


def read_curve(run: Path) -> Curve:
    """The losses of a run; steps without a finite one are left out. Raises ValueError in one line."""
    file = run / "metrics.jsonl" if run.is_dir() else run
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        losses = {int(line["step"]): float(line["loss"]) for line in lines if line["loss"] is not None}
    except (OSError, ValueError, KeyError, TypeError) as reason:
        raise ValueError(f"{file}: no losses of a training run ({reason})") from None
    if not losses:
        raise ValueError(f"{file}: no step has a loss")
    return Curve(file.parent.name, losses)


def curves_figure(curves: Sequence[Curve]) -> Figure:
    """Losses above, differences to the first curve below (where there is another)."""
    panels = 2 if len(curves) > 1 else 1
    figure = canvas(WIDTH_IN, 0.85 + panels * (PANEL_IN + 0.4))
    top = figure.get_figheight() - 0.75 - PANEL_IN
    loss = axes_at(figure, LEFT_IN, top, WIDTH_IN - LEFT_IN - 0.25, PANEL_IN)
    for place, curve in enumerate(curves):
        width = FIRST_WIDTH if not place and panels == 2 else WIDTH
        loss.plot(list(curve.losses), list(curve.losses.values()), label=curve.name, linewidth=width, **_line(place))
    loss.set_ylabel("loss")
    loss.grid(axis="y")
    many = len(curves) > len(COLOURS)
    loss.legend(ncols=2 if many else 1, fontsize="x-small" if many else None, loc="upper right")
    if panels == 2:
        apart = axes_at(figure, LEFT_IN, top - PANEL_IN - 0.4, WIDTH_IN - LEFT_IN - 0.25, PANEL_IN)
        for place, curve in enumerate(curves[1:], start=1):
            found = {step: value for step, value in curve.differences(curves[0]).items() if value > 0.0}
            apart.plot(list(found), list(found.values()), marker=".", markersize=2.5, linewidth=0.6, **_line(place))
        apart.set_yscale("log")
        apart.set_ylabel(f"|loss - {curves[0].name}|")
        apart.grid(axis="y")
    figure.axes[-1].set_xlabel("step")
    headline(
        figure,
        "Training loss",
        "measured" + ("; where losses are equal there is no point below" if panels == 2 else ""),
    )
    return figure


def _line(place: int) -> dict[str, Any]:
    """Colour and dashes of the curve at a place: dashes where the colours come round again."""
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": "-" if place < len(COLOURS) else (0, (4, 2))}


def write_table(curves: Sequence[Curve], path: Path) -> None:
    """One line per step: the losses, and their differences to the first run; empty where a run has none."""
    apart = [curve.differences(curves[0]) for curve in curves[1:]]
    names = [curve.name for curve in curves]
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["step", *names, *(f"|{name} - {names[0]}|" for name in names[1:])])
        for step in sorted({step for curve in curves for step in curve.losses}):
            rows.writerow([step, *(found.get(step, "") for found in [*(c.losses for c in curves), *apart])])


def main(arguments: Sequence[str]) -> int:
    """Draw the runs named; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("results/curves.png"))
    options = parser.parse_args(arguments)
    try:
        curves = [read_curve(run) for run in options.runs]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for curve in curves[1:]:
        apart = curve.differences(curves[0])
        largest = f"{max(apart.values()):.3g} over {len(apart)} steps" if apart else "no step in common"
        print(f"{curve.name} and {curves[0].name}: largest difference {largest}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with drawing():
        save(curves_figure(curves), options.out)
    write_table(curves, options.out.with_suffix(".csv"))
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
