"""The memory model against published peaks, each row with a tolerance of its own.

No number of these rows is an input of the model. The rows left out are listed,
with reasons, in tests/reference/memory-excluded.csv.
"""

from __future__ import annotations

import pytest

from tests.plan.memory_cases import Row, excluded, points, report_of

ROWS = points()
SIMUMAX, MOONLIGHT, OVERLAPPED = 0.015, 0.06, 0.10
"""Relative tolerances.

SimuMax's own runs of Megatron-Core state every flag, with balanced routing: 1.5 %.
Moonlight's rows: routing is not balanced, its mock data not published: 6 %.
Qwen3-30B: CUDA graphs keep buffers of their own, HybridEP's are not all known: 10 %.
"""


def error(row: Row) -> float:
    measured = float(row["measured_gib"])
    return report_of(row).fullest.allocated_gib / measured - 1.0


def tolerance(row: Row) -> float:
    if row["combined"] == "yes":
        return OVERLAPPED
    return MOONLIGHT if row["model"] == "moonlight_16b" else SIMUMAX


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_every_row_is_within_its_tolerance(row: Row) -> None:
    assert abs(error(row)) <= tolerance(row)


@pytest.mark.parametrize("group", ["dense", "moe"])
def test_rows_together(group: str) -> None:
    errors = [abs(error(row)) for row in ROWS if row["group"] == group and row["id"].startswith("V")]
    assert len(errors) >= 7
    assert sum(errors) / len(errors) <= 0.03  # asked for: 0.08
    assert max(errors) <= 0.06  # asked for: 0.20


def test_recompute_saves_until_the_optimizer_is_the_peak() -> None:
    """As measured: either module lowers Moonlight's peak by about as much, since the optimizer's step is next."""
    by_id = {row["id"]: report_of(row).fullest for row in ROWS if row["model"] == "moonlight_16b"}
    none, up_projections, activation = (by_id[i] for i in ("V0304", "V0308", "V0312"))
    assert up_projections.allocated_gib == activation.allocated_gib < none.allocated_gib
    assert up_projections.at_peak["attention"] == 0.0 < none.at_peak["attention"]


def test_no_row_is_both_used_and_left_out() -> None:
    used, out = {row["id"] for row in ROWS}, excluded()
    assert len(used) == len(ROWS)
    assert not used & {row["id"] for row in out}
    assert all(len(row["reason"]) > 20 and row["source_url"].startswith("https://") for row in out)
