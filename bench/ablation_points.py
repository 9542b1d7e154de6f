"""Points of the ablation's record: a switch, a system or a bound in one cell, beside `disagmoe` and the best.

Decides what a point says of a row; how cells are made is `ablation.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.config import RunConfig
from bench.evaluate import Row, cost_model, label
from bench.transports import MERGE_OF_TRANSPORT
from disagmoe.plan.mixed_bound import mixed_bound
from disagmoe.plan.resource_bound import Resources

TOGETHER, APART, SEPARATE, SHARED = "together", "apart", "separate", "shared"
"""Bounds: both forms, and their best mixes where a GPU works for one form, and where it may work for both."""


@dataclass(frozen=True)
class Compared:
    """What all points of one cell are compared with."""

    config: RunConfig
    at: Mapping[str, Any]
    plain: Row
    best: Row | None


def compared(config: RunConfig, at: Mapping[str, Any], plain: Row, rivals: Sequence[Row]) -> Compared:
    """`plain` is the row of `disagmoe`, `rivals` those of the baselines."""
    ran = (row for row in rivals if row["status"] == "ok")
    return Compared(config, at, plain, min(ran, key=lambda row: float(row["step_time_s"]), default=None))


def point(beside: Compared, axis: str, setting: str, own: Row) -> dict[str, Any]:
    """One row as a flat record."""
    best = beside.best
    return {
        **_place(beside),
        "axis": axis,
        "setting": f"{setting} ({own['variant']})" if own["variant"] else setting,
        "ep": (own["plan"] or {}).get("ep"),
        "status": own["status"],
        "reason": own["reason"] or "",
        "step_s": own["step_time_s"],
        "exposed_s": own["exposed_comm_s"],
        "bubble_s": own["bubble_s"],
        "bound_ratio": own.get("bound_ratio"),
        "bound_by": own.get("bound_by"),
        "gain_over_disagmoe": _over(beside.plain, own),
        "best_baseline": None if best is None else label(best),
        "best_step_s": None if best is None else best["step_time_s"],
        "speedup_over_reference": None,
        "speedup_over_best": None if best is None else _over(best, own),
        "microbatches": own["microbatches"],
        "gpus_used": own["gpus_used"],
        "needed_gib": own["peak_memory_gib"],
        "plan": own["plan"],
    }


def _place(beside: Compared) -> dict[str, Any]:
    config = beside.config
    return {
        "model": config.model.name,
        "at": dict(beside.at),
        "seq": config.workload.seq,
        "global_batch": config.workload.global_batch,
    }


def _over(other: Row, own: Row) -> float | None:
    """Step of the other over own; None where one of them did not run."""
    if other["status"] != "ok" or own["status"] != "ok":
        return None
    return float(other["step_time_s"]) / float(own["step_time_s"])


def bounds(config: RunConfig, beside: Compared) -> Iterator[dict[str, Any]]:
    """The least steps of both forms and of their mixes at the expert-parallel size asked for; none where it is free."""
    if config.ep is None:
        return
    transport = config.uniform_transport
    merge = config.merge or MERGE_OF_TRANSPORT[transport]
    found = mixed_bound(cost_model(config), transport, merge, config.ep)
    yield _bound(beside, TOGETHER, found.together.step_s, _needs(found.together), found.together.binds)
    if found.apart is not None:
        yield _bound(beside, APART, found.apart.step_s, _needs(found.apart), found.apart.binds)
    mixes = ((SEPARATE, found.separate_s, found.separate_apart), (SHARED, found.shared_s, found.shared_apart))
    for name, step_s, away in mixes:
        yield _bound(beside, name, step_s, {"layers_apart": away, "layers": found.layers})


def _needs(form: Resources) -> dict[str, float]:
    return {"compute_s": form.compute_s, "nic_s": form.nic_s, "nvlink_s": form.nvlink_s}


def _bound(
    beside: Compared, setting: str, step_s: float, plan: Mapping[str, float], binds: str | None = None
) -> dict[str, Any]:
    reached = {"status": "ok", "reason": "", "speedup_over_reference": None}
    found = {"step_s": step_s, "bound_by": binds, "ep": beside.config.ep, "plan": dict(plan)}
    return {**_place(beside), "axis": "bound", "setting": setting, **reached, **found}
