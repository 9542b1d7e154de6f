"""`python -m bench.curves RUN [RUN ...]`: the loss of training runs, and how far each is from the first.

A RUN is a folder that `python -m disagmoe.train` wrote, or its metrics.jsonl.
Prints the largest difference to the first run and draws both into
results/curves.png (or `--out`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from bench.report.style import axes_at, canvas, drawing, headline, save

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
WIDTH_IN, PANEL_IN = 6.4, 2.3


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
    loss = axes_at(figure, 0.75, top, WIDTH_IN - 1.0, PANEL_IN)
    for curve, colour in zip(curves, COLOURS * len(curves), strict=False):
        loss.plot(list(curve.losses), list(curve.losses.values()), color=colour, label=curve.name, linewidth=1.2)
    loss.set_ylabel("loss")
    loss.grid(axis="y")
    loss.legend()
    if panels == 2:
        apart = axes_at(figure, 0.75, top - PANEL_IN - 0.4, WIDTH_IN - 1.0, PANEL_IN)
        for curve, colour in zip(curves[1:], (COLOURS * len(curves))[1:], strict=False):
            found = {step: value for step, value in curve.differences(curves[0]).items() if value > 0.0}
            apart.plot(list(found), list(found.values()), color=colour, marker=".", markersize=2.5, linewidth=0.6)
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
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
