"""Decides how sizes, times and plans are written in reports: as people of this field say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report.columns import DASH
from bench.report.facts import finite


def length(seq: int) -> str:
    """ "32K" for whole multiples of 1,024, else the number."""
    return f"{seq // 1024}K" if seq % 1024 == 0 else f"{seq:,}"


def seconds(value: Any) -> str:
    """Four digits of a time."""
    number = finite(value)
    return DASH if number is None else f"{number:,.4g}"


def times(value: Any) -> str:
    """A ratio to three decimals."""
    number = finite(value)
    return DASH if number is None else f"{number:.3f}×"


def plan_line(plan: Mapping[str, Any] | None) -> str:
    """A plan on one line, in the planner's own order."""
    return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in (plan or {}).items())
