"""What every switch of `disagmoe_plus` is worth: each alone, and all together, beside `disagmoe` and the baselines.

Decides the cells: models by lengths, by exchange (each system's own transport, or one
for all) and by calibration. In a cell a switch is on and all others are off, or all
are as they are shipped; its gain is `disagmoe`'s step over its own. Cells of `totals`
have the search and `disagmoe` only: they count what is won at equal transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.axes import with_options
from bench.comparison import OWN_SYSTEM
from bench.config import RunConfig
from bench.evaluate import Row
from bench.points import Answer, Task, answers, asked
from bench.sensitivity import Progress, based, competitors, label
from disagmoe.specs import ModelSpec, default_global_batch
from disagmoe.systems.disagmoe_plus import SWITCHES

PLUS = "disagmoe_plus"
ALL = "all"
"""The search as it is shipped."""
NONE = "none"
"""`disagmoe`: every switch off."""
NATIVE = "native"


@dataclass(frozen=True)
class Cell:
    """One model, length, exchange and calibration, with what is tried there."""

    config: RunConfig
    exchange: str
    switches: tuple[str, ...]

    @property
    def text(self) -> str:
        """The place in words."""
        config = self.config
        return f"{config.model.name} {config.workload.seq} {self.exchange} {config.calibration}"


def cells(config: RunConfig) -> list[Cell]:
    """All cells of the study, calibration by calibration."""
    assert config.study is not None
    study = config.study
    alone = tuple(str(name) for name in study.settings("switch"))
    exchanges = [str(name) for name in study.settings("exchange")]
    totals = [str(name) for name in study.settings("totals") if name not in exchanges]
    return [
        Cell(_at(config, model, int(seq), exchange, str(calibration)), exchange, tried)
        for calibration in study.settings("calibrations")
        for group, tried in ((exchanges, (*alone, ALL)), (totals, (ALL,)))
        for exchange in group
        for model in study.models
        for seq in study.settings("switch_seq")
    ]


def _at(config: RunConfig, model: ModelSpec, seq: int, exchange: str, calibration: str) -> RunConfig:
    native = exchange == NATIVE
    workload = replace(config.workload, seq=seq, global_batch=default_global_batch(seq))
    return replace(
        based(config, model),
        workload=workload,
        calibration=calibration,
        views=(NATIVE,) if native else ("uniform",),
        uniform_transport=config.uniform_transport if native else exchange,
    )


def tasks_at(config: RunConfig, cell: Cell) -> list[Task]:
    """What runs in a cell: the competitors, then the switches."""
    found = [asked(f"{cell.text} {name}", cell.config, name) for name in competitors(config)]
    for switch in cell.switches:
        alone = {name: "on" if name == switch else "off" for name in SWITCHES}
        there = cell.config if switch == ALL else with_options(cell.config, PLUS, **alone)
        found.append(asked(f"{cell.text} {switch}", there, PLUS))
    return found


def parts(config: RunConfig) -> int:
    """How many tasks the progress bar counts, equal ones once."""
    return sum(len(tasks_at(config, cell)) for cell in cells(config))


def conduct(config: RunConfig, progress: Progress, processes: int | None = None) -> dict[str, Any]:
    """The record's points: per cell `disagmoe`, then every switch."""
    asked_for = cells(config)
    tasks = [tasks_at(config, cell) for cell in asked_for]
    replies = iter(answers([task for group in tasks for task in group], progress, processes))
    points = []
    for cell, group in zip(asked_for, tasks, strict=True):
        got = [next(replies) for _ in group]
        points += list(_points(cell, dict(zip(competitors(config), got, strict=False)), got[-len(cell.switches) :]))
    return {"points": points}


def _points(
    cell: Cell, systems: Mapping[str, tuple[Answer, ...]], switched: list[tuple[Answer, ...]]
) -> Iterator[dict[str, Any]]:
    rivals = [one.row for name, reply in systems.items() if name != OWN_SYSTEM for one in reply]
    best = min(
        (row for row in rivals if row["status"] == "ok"), key=lambda row: float(row["step_time_s"]), default=None
    )
    plain = systems[OWN_SYSTEM][0].row
    yield _record(cell, NONE, plain, plain, best)
    for switch, reply in zip(cell.switches, switched, strict=True):
        yield _record(cell, switch, reply[0].row, plain, best)


def _record(cell: Cell, switch: str, own: Row, plain: Row, best: Row | None) -> dict[str, Any]:
    config = cell.config
    return {
        "model": config.model.name,
        "axis": "switch",
        "setting": switch,
        "at": {"exchange": cell.exchange, "calibration": config.calibration},
        "seq": config.workload.seq,
        "global_batch": config.workload.global_batch,
        "ep": (own["plan"] or {}).get("ep"),
        "status": own["status"],
        "reason": own["reason"] or "",
        "step_s": own["step_time_s"],
        "exposed_s": own["exposed_comm_s"],
        "bubble_s": own["bubble_s"],
        "bound_ratio": own.get("bound_ratio"),
        "bound_by": own.get("bound_by"),
        "gain_over_disagmoe": _over(plain, own),
        "best_baseline": None if best is None else label(best),
        "best_step_s": None if best is None else best["step_time_s"],
        "speedup_over_reference": None,
        "speedup_over_best": None if best is None else _over(best, own),
        "microbatches": own["microbatches"],
        "gpus_used": own["gpus_used"],
        "needed_gib": own["peak_memory_gib"],
        "plan": own["plan"],
    }


def _over(other: Row, own: Row) -> float | None:
    """Step of the other over own; None where one of them did not run."""
    if other["status"] != "ok" or own["status"] != "ok":
        return None
    return float(other["step_time_s"]) / float(own["step_time_s"])
