"""Decides how the ablation's record is read: places, cells, gains, and how a point's plan and losses are said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.report.columns import DASH
from bench.report.facts import finite
from bench.report.text import length

Point = Mapping[str, Any]
Record = Mapping[str, Any]
Cell = tuple[str, int]
"""Model and length."""

NONE, ALL = "none", "all"
NEAR = 1.10
"""Step over bound that counts as near it."""
SAME = 5e-4
"""Gains nearer to 1 than this are none."""


class Place(NamedTuple):
    """What the cells of one table share; `batch` in multiples of the default one."""

    calibration: str
    exchange: str
    batch: float = 1.0

    @property
    def text(self) -> str:
        """The place in words."""
        more = "" if self.batch == 1.0 else f", batch {self.batch:g}×"
        return f"{self.exchange}, calibration {self.calibration}{more}"


def place_of(point: Point) -> Place:
    """Where a point is."""
    at = point["at"]
    return Place(str(at["calibration"]), str(at["exchange"]), float(at.get("batch", 1.0)))


def places(record: Record) -> list[Place]:
    """All places in the order of the points."""
    return list(dict.fromkeys(place_of(point) for point in record["points"]))


def by_cell(record: Record, place: Place, axis: str = "switch") -> dict[Cell, dict[str, Point]]:
    """Model and length -> setting -> point, of one axis of one place."""
    found: dict[Cell, dict[str, Point]] = {}
    for point in record["points"]:
        if point["axis"] == axis and place_of(point) == place:
            found.setdefault((str(point["model"]), int(point["seq"])), {})[str(point["setting"])] = point
    return found


def settings_of(cells: Mapping[Cell, Mapping[str, Point]]) -> list[str]:
    """All settings of some cells, in their order."""
    return list(dict.fromkeys(name for cell in cells.values() for name in cell))


def switches_of(record: Record, place: Place) -> list[str]:
    """What stands beside `disagmoe` in a place."""
    return [name for name in settings_of(by_cell(record, place)) if name != NONE]


def cell_text(cell: Cell) -> str:
    """A model and a length."""
    return f"{cell[0]} {length(cell[1])}"


def gib(value: Any) -> str:
    """Whole GiB."""
    number = finite(value)
    return DASH if number is None else f"{number:.0f}"


def reason(point: Point) -> str:
    """What binds, what is exposed and what idles."""
    step = finite(point["step_s"])
    if step is None:
        return str(point["reason"] or point["status"])
    shares = [
        f"{name} {share(point, key)}"
        for name, key in (("exposed", "exposed_s"), ("idle", "bubble_s"))
        if share(point, key) != DASH
    ]
    parts = (f"{point['bound_by']} binds", *shares, redone(point["plan"] or {}), form_text(point["plan"] or {}))
    return ", ".join(part for part in parts if part)


def share(point: Point, key: str) -> str:
    """Seconds of a point as a share of its step."""
    value, step = finite(point[key]), finite(point["step_s"])
    return DASH if value is None or step is None else f"{100.0 * value / step:.0f} %"


def redone(plan: Mapping[str, Any]) -> str:
    """What a plan computes again."""
    both = str(plan.get("recompute", "none"))
    modes = {side: str(plan.get(f"recompute_{side}", both)) for side in ("attention", "ffn")}
    full = [name for name, side in (("attention", "attention"), ("experts", "ffn")) if modes[side] == "full"]
    if full:
        return f"recompute of {' and '.join(full)}"
    return "selective recompute" if "selective" in modes.values() else ""


def form_text(plan: Mapping[str, Any]) -> str:
    """How a plan divides the GPUs."""
    if "schedule" in plan:
        virtual = f" × {plan['virtual_stages']}" if str(plan.get("virtual_stages", 1)) != "1" else ""
        return f"{plan['schedule']}, pp {plan['pp']}{virtual}, {plan['parts']} part{'s' * (str(plan['parts']) != '1')}"
    if "A:F" in plan:
        return f"apart, {plan['dp']} rings of {plan['p']} × {plan['A:F']} GPUs"
    return ""


def gains_of(record: Record, among: Sequence[Place], switch: str) -> list[float]:
    """Gains over disagmoe of one switch in all cells of some places in which both run."""
    found = (cell.get(switch) for place in among for cell in by_cell(record, place).values())
    gains = (finite(point["gain_over_disagmoe"]) for point in found if point is not None)
    return [gain for gain in gains if gain is not None]
