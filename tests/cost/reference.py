"""Published measurements kept in tests/reference, and which of them validate which calibration.

Tests that validate take their rows from `validation_rows`, so that one test can
prove that no calibration was fitted to them.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from disagmoe.cost import CostModel, load_calibration
from disagmoe.specs import Workload, load_cluster, load_model
from tests.cost.shapes import model_of

REFERENCE = Path(__file__).parents[1] / "reference"

Row = dict[str, str]

_G8 = [
    f"T7-{dispatcher}-EP{ep}-{op}"
    for dispatcher in ("alltoall", "hybridep")
    for ep in (16, 32)
    for op in ("dispatch", "combine")
]
_DEEPEP_H100 = ["V0213", "V0217", "V0221", "V0225"]
_ATTENTION = [f"V0{n}" for n in range(226, 238)]
_LAYERS = ["V0342", "V0348", "V0360", "V0361", "V0366", "V0367"]
_GEMMS = [
    f"AIC-VL-{m}x{shape}"
    for shape in ("8192x4096", "2048x4096", "5120x3072", "65536x4096", "7168x16384", "4096x2048")
    for m in (512, 2048, 8192, 32768)
]

_ARTEFACT = [f"AE-8192-E{e}-k{k}-tp8" for e in (8, 16, 32, 64) for k in (2, 3, 4, 5)]

VALIDATION = {
    "h100": (
        *_G8,
        "T7-alltoall-EP8-dispatch",
        "T7-alltoall-EP8-combine",
        "V0238",
        *_DEEPEP_H100,
        *_ATTENTION,
        *_LAYERS,
        *_GEMMS,
    ),
    "h800": ("V0203", "V0205", *_ATTENTION, *_ARTEFACT),
    "paper-profile": ("FIG6A-ffn-32768",),
    "laptop": (),
}
"""Rows that check a calibration; none of them may be in its `calibrated_on`."""


@cache
def all_rows() -> dict[str, tuple[str, Row]]:
    """id -> (file stem, row) of every reference row."""
    found: dict[str, tuple[str, Row]] = {}
    for path in sorted(REFERENCE.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if "id" in row:
                    assert row["id"] not in found, f"two rows are called {row['id']}"
                    found[row["id"]] = (path.stem, row)
    return found


def rows_of(stem: str) -> list[Row]:
    """All rows of one file, in its order."""
    return [row for name, row in all_rows().values() if name == stem]


def validation_rows(calibration: str, stem: str) -> list[Row]:
    """The rows of one file that validate `calibration`."""
    return [all_rows()[row][1] for row in VALIDATION[calibration] if all_rows()[row][0] == stem]


def costs(calibration: str, *, model: str = "qwen3", seq: int = 4096, skew: float = 1.0) -> CostModel:
    """A CostModel on 128 H800 or H100, or the laptop cluster, whichever the calibration belongs to."""
    cluster = {"h100": "h100_128", "laptop": "laptop"}.get(calibration, "h800_128")
    workload = Workload(seq=seq, global_batch=128, skew=skew)
    return CostModel(load_model(model), load_cluster(cluster), load_calibration(calibration), workload)


def costs_of_row(calibration: str, row: Row) -> CostModel:
    """A CostModel of the MoE shape a reference row was measured on."""
    base = costs(calibration)
    return CostModel(model_of(row), base.cluster, base.calibration, base.workload)
