"""tuning.csv: every candidate a system's search looked at, why (the allocator's seed, ...), and what became of it."""

from __future__ import annotations

import csv
from pathlib import Path

from bench.evaluate import Evaluation

FILE = "tuning.csv"
COLUMNS = ("view", "system", "variant", "origin", "outcome", "step_s", "bound_s", "needed_gib", "candidate", "reason")


def write_tuning(path: Path, evaluation: Evaluation) -> None:
    """Write the trials behind every row, one line each, in search order."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row, outcome in zip(evaluation.rows, evaluation.outcomes, strict=True):
            label = [row["view"], row["system"], row["variant"]]
            for trial in outcome.tuned.trials if outcome.tuned is not None else ():
                candidate = " ".join(f"{key}={value}" for key, value in sorted(trial.candidate.items()))
                numbers = ["" if x is None else repr(float(x)) for x in (trial.step_s, trial.bound_s, trial.needed_gib)]
                writer.writerow([*label, trial.origin, trial.outcome, *numbers, candidate, trial.reason])
