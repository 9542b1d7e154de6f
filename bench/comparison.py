"""Speed-ups and reductions of the rows of one view: every number that needs two rows.

Speed-ups are over the reference, reductions are what `disagmoe` removes of a
row's exposed communication (dispatch, combine and P2P: the paper's claim) and of
its stall. Rows that did not run are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baselines.registry import REFERENCE

OWN_SYSTEM = "disagmoe"

Row = dict[str, Any]


def compare(rows: list[Row]) -> None:
    """Fill in speed-ups and reductions, within one view only."""
    by_name = {row["system"]: row for row in reversed(rows) if row["status"] == "ok"}  # the first variant counts
    reference, own = by_name.get(REFERENCE), by_name.get(OWN_SYSTEM)
    for row in rows:
        if row["status"] != "ok":
            continue
        if reference is not None:
            row["speedup"] = reference["step_time_s"] * _scale(reference) / (row["step_time_s"] * _scale(row))
        if own is not None and row is not own and row["exposed_by_kind_s"] is not None:  # a real system tells no split
            row["exposed_comm_reduction"] = _reduction(_claimed(own) * _scale(own), _claimed(row) * _scale(row))
            row["stall_reduction"] = _reduction(own["stall_s"] * _scale(own), row["stall_s"] * _scale(row))


def _scale(row: Row) -> float:
    """What makes the seconds of two rows comparable: 1 where all have one batch, GPUs per token where rows are cuts."""
    if row.get("simulated") is None:
        return 1.0
    return 1.0 / (float(row["tokens_per_s_per_gpu"]) * float(row["step_time_s"]))


def _claimed(row: Row) -> float:
    """Exposed dispatch, combine and P2P: what the paper's claim is about."""
    kinds: Mapping[str, float] = row["exposed_by_kind_s"]
    return kinds["dispatch"] + kinds["combine"] + kinds["p2p"]


def _reduction(own: float, other: float) -> float | None:
    return 1.0 - own / other if other > 0.0 else None
