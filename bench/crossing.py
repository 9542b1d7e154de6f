"""Where DisagMoE stops winning: crossings of the speed-up with 1 on the numeric axes.

Two neighbouring tuned points on different sides of 1 hold a crossing, which is
halved in until it is known to the tolerance of its axis. Between tuned points no
new search is made: every system tries the best plans of both ends, and of the
baselines only those run that come close to the fastest at one of the ends. A
crossing pair between two neighbouring points (there and back) goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.axes import AXES, sequences
from bench.comparison import OWN_SYSTEM
from bench.config import RunConfig
from bench.evaluate import Known
from bench.points import answers
from bench.sensitivity import BEST, OVER, Place, Progress, Standing, competitors, configuration, settings_of, tasks_at
from disagmoe.specs.workload import BATCH_MULTIPLE

SHARE = 0.01
"""Tolerance as a share of the range of an axis."""
CLOSE = 1.1
"""A baseline this much slower than the fastest at both ends is not the fastest in between."""


@dataclass(frozen=True)
class Crossing:
    """What is known of one axis: `values` where the speed-up over `over` passes 1, each within `tolerance` / 2.

    `low` and `high` are the range looked at. `ahead` tells on which side DisagMoE
    wins at `low` (None where a point did not run, which `note` says).
    """

    model: str
    axis: str
    over: str
    low: float
    high: float
    tolerance: float
    values: tuple[float, ...]
    ahead: bool | None
    note: str = ""


@dataclass(frozen=True)
class Bracket:
    """Two points of an axis with a crossing between them; `ahead` is the side at `left`."""

    model: str
    axis: str
    over: str
    left: float
    right: float
    ahead: bool
    tolerance: float
    known: Mapping[str, Known]


def crossings(
    config: RunConfig, standings: Mapping[Place, Standing], progress: Progress, processes: int | None = None
) -> list[Crossing]:
    """Every numeric axis of every model, over the reference and over the best baseline."""
    assert config.study is not None
    found: list[Crossing] = []
    brackets: list[Bracket] = []
    for model in config.study.models:
        for axis, _ in config.study.axes:
            if AXES[axis].numeric:
                for over in OVER:
                    crossing, inside = _look(config, standings, model.name, axis, over)
                    found.append(crossing)
                    brackets += inside
    narrow = _narrow(config, brackets, progress, processes)
    return [replace(one, values=_values(one, narrow)) for one in found]


def _values(crossing: Crossing, brackets: list[Bracket]) -> tuple[float, ...]:
    key = (crossing.model, crossing.axis, crossing.over)
    return tuple((b.left + b.right) / 2 for b in brackets if (b.model, b.axis, b.over) == key)


def _look(
    config: RunConfig, standings: Mapping[Place, Standing], model: str, axis: str, over: str
) -> tuple[Crossing, list[Bracket]]:
    """What the tuned points say of one axis, and where to look closer."""
    points = [(float(setting), standings[place]) for setting, place in settings_of(config, model, axis)]
    low, high = points[0][0], points[-1][0]
    tolerance = _tolerance(config, model, axis, high - low)
    gains = [(x, standing, standing.speedup(over)) for x, standing in points]
    ran = [(x, standing, gain > 1.0) for x, standing, gain in gains if gain is not None]
    lost = [AXES[axis].text(x) for x, _, gain in gains if gain is None]
    note = f"did not run at {', '.join(lost)}" if lost else ""
    ahead = ran[0][2] if ran else None
    inside = [
        Bracket(model, axis, over, x, y, here, tolerance, _known(config, over, a, b))
        for (x, a, here), (y, b, there) in pairwise(ran)
        if here != there
    ]
    return Crossing(model, axis, over, low, high, tolerance, (), ahead, note), inside


def _tolerance(config: RunConfig, model: str, axis: str, span: float) -> float:
    """A share of the range; for the batch at least one step of its size."""
    step = BATCH_MULTIPLE / configuration(config, Place(model)).workload.global_batch if axis == "batch" else 0.0
    return max(SHARE * span, step)


def _known(config: RunConfig, over: str, left: Standing, right: Standing) -> dict[str, Known]:
    """The best candidates of both ends, of every system whose step matters."""
    names = {OWN_SYSTEM, *(_close(left) | _close(right))} if over == BEST else {OWN_SYSTEM, over}
    merged: dict[str, Known] = {}
    for name in (name for name in competitors(config) if name in names):
        one, other = left.known(name), right.known(name)
        merged[name] = {
            label: tuple(c for i, c in enumerate(both) if c not in both[:i])
            for label in one
            for both in [[*one[label], *other.get(label, ())]]
        }
    return merged


def _close(standing: Standing) -> set[str]:
    """The baselines whose step comes close to that of the fastest."""
    fastest = standing.rival(BEST)
    steps = {
        name: min(float(one.row["step_time_s"]) for one in reply if one.row["status"] == "ok")
        for name, reply in standing.answers.items()
        if name != OWN_SYSTEM and any(one.row["status"] == "ok" for one in reply)
    }
    return {name for name, step in steps.items() if fastest and step <= CLOSE * float(fastest["step_time_s"])}


def _narrow(config: RunConfig, brackets: list[Bracket], progress: Progress, processes: int | None) -> list[Bracket]:
    """Halve all brackets side by side until each is as narrow as its tolerance."""
    while True:
        middles = [_middle(config, bracket) for bracket in brackets]
        open_ones = [(i, x) for i, x in enumerate(middles) if x is not None]
        if not open_ones:
            return brackets
        wanted = [
            tasks_at(config, Place(brackets[i].model, brackets[i].axis, x), brackets[i].known) for i, x in open_ones
        ]
        replies = iter(answers([task for tasks in wanted for task in tasks], progress, processes))
        brackets = list(brackets)
        for (i, x), tasks in zip(open_ones, wanted, strict=True):
            standing = Standing({task.system: next(replies) for task in tasks})
            gain = standing.speedup(brackets[i].over)
            # A point that does not run counts as lost for the one under study.
            ahead = gain is not None and gain > 1.0
            brackets[i] = replace(brackets[i], left=x) if ahead == brackets[i].ahead else replace(brackets[i], right=x)


def _middle(config: RunConfig, bracket: Bracket) -> float | None:
    """The point to ask next; None where the bracket is narrow enough."""
    if bracket.right - bracket.left <= bracket.tolerance * (1 + 1e-9):
        return None
    middle = (bracket.left + bracket.right) / 2
    if bracket.axis == "batch":
        base = configuration(config, Place(bracket.model))
        middle = sequences(base, middle) / base.workload.global_batch
        if not bracket.left < middle < bracket.right:
            return None
    return middle
