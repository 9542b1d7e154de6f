"""memory.csv: what one GPU of every worker holds at its peak, by component."""

from __future__ import annotations

import csv
from pathlib import Path

from bench.evaluate import Evaluation
from disagmoe.plan.memory_report import COMPONENTS

FILE = "memory.csv"
COLUMNS = ("view", "system", "variant", "worker", "pool", "gpus", "peak_gib", *(f"{name}_gib" for name in COMPONENTS))


def write_memory_table(path: Path, evaluation: Evaluation) -> None:
    """Write one line per worker of every plan that ran; components are those at the worker's peak and add up to it."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row, outcome in zip(evaluation.rows, evaluation.outcomes, strict=True):
            for worker in outcome.memory.workers if outcome.memory is not None else ():
                parts = [repr(float(worker.at_peak[name])) for name in COMPONENTS]
                label = [row["view"], row["system"], row["variant"]]
                writer.writerow([*label, worker.name, worker.pool, worker.gpus, repr(float(worker.peak_gib)), *parts])
