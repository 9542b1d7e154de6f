"""How the gain of DisagMoE moves when one thing is changed at a time.

Decides what is compared at every point: the step of `disagmoe` with that of the
reference and with that of the fastest baseline there, all tuned anew for the
point. A setting leaves the systems that it does not touch where they were.
Where it stops winning on a numeric axis is found by `crossing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from baselines.registry import REFERENCE, get_system
from bench.axes import AXES, Axis
from bench.comparison import OWN_SYSTEM
from bench.config import RunConfig
from bench.evaluate import Known, Row, label
from bench.points import Answer, Task, answers, asked
from bench.study import Setting
from disagmoe.specs import ModelSpec, load_model

BEST = "best baseline"
OVER = (REFERENCE, BEST)
"""What the gain is taken over."""

Progress = Callable[[str], Any]


@dataclass(frozen=True)
class Place:
    """A model, and one setting of one axis; axis "" is the unchanged configuration."""

    model: str
    axis: str = ""
    setting: Setting = ""

    def __str__(self) -> str:
        return f"{self.model} {self.axis}={AXES[self.axis].text(self.setting)}" if self.axis else f"{self.model} base"


@dataclass(frozen=True)
class Standing:
    """The answers of all systems at one place."""

    answers: Mapping[str, tuple[Answer, ...]]

    @property
    def own(self) -> Row:
        """The row of the system under study (of its first form)."""
        return self.answers[OWN_SYSTEM][0].row

    @property
    def broken(self) -> Row | None:
        """The first row that failed, of any system."""
        rows = (one.row for reply in self.answers.values() for one in reply)
        return next((row for row in rows if row["status"] == "failed"), None)

    def rival(self, over: str) -> Row | None:
        """The row compared with: the reference, or the fastest baseline; None where none ran."""
        names = [REFERENCE] if over == REFERENCE else [name for name in self.answers if name != OWN_SYSTEM]
        ran = [one.row for name in names for one in self.answers[name] if one.row["status"] == "ok"]
        return min(ran, key=lambda row: float(row["step_time_s"]), default=None)

    def speedup(self, over: str) -> float | None:
        """Step of the rival ÷ own step; None where one of them did not run."""
        rival = self.rival(over)
        if rival is None or self.own["status"] != "ok":
            return None
        return float(rival["step_time_s"]) / float(self.own["step_time_s"])

    def known(self, system: str) -> Known:
        """The best candidates of a system, by label of the row."""
        return {one.row["variant"]: one.best for one in self.answers[system]}


def competitors(config: RunConfig) -> tuple[str, ...]:
    """The systems compared: `disagmoe`, the reference and every baseline asked for. Raises ValueError."""
    if OWN_SYSTEM not in config.systems:
        raise ValueError(f"systems={','.join(config.systems)}: the sensitivity study is about {OWN_SYSTEM}; add it")
    ours = [name for name in config.systems if type(get_system(name)).__module__.startswith("disagmoe.")]
    return tuple(name for name in config.systems if name == OWN_SYSTEM or name not in ours)


def based(config: RunConfig, model: ModelSpec) -> RunConfig:
    """The unchanged configuration of one model of the study."""
    if len(config.views) != 1:
        raise ValueError("a study is in one view: add transport=native or transport=uniform")
    return replace(config, study=None, model=model, full_layers=full_layers(config, model))


def full_layers(config: RunConfig, model: ModelSpec) -> int:
    """Layers of a model of the study before it was cut."""
    return config.full_layers if model.name == config.model.name else load_model(model.name).layers


def places(config: RunConfig) -> Iterator[Place]:
    """Every place that is tuned, the base of each model first; settings equal to the base are not repeated."""
    assert config.study is not None
    for model in config.study.models:
        yield Place(model.name)
        for axis, settings in config.study.axes:
            base = AXES[axis].base
            for setting in settings:
                if base is None or setting != base(config):
                    yield Place(model.name, axis, setting)


def configuration(config: RunConfig, place: Place) -> RunConfig:
    """The configuration at a place."""
    assert config.study is not None
    model = next(model for model in config.study.models if model.name == place.model)
    base = based(config, model)
    return AXES[place.axis].apply(base, place.setting) if place.axis else base


def tasks_at(config: RunConfig, place: Place, known: Mapping[str, Known | None] | None = None) -> list[Task]:
    """What must run at a place; `known` names the systems and their candidates (None: a full search)."""
    if known is None:
        known = dict.fromkeys(n for n in competitors(config) if not place.axis or AXES[place.axis].changes(n))
    there = configuration(config, place)
    return [asked(f"{place} {name}", there, name, candidates) for name, candidates in known.items()]


def measure(config: RunConfig, progress: Progress, processes: int | None = None) -> dict[Place, Standing]:
    """How every system stands at every place."""
    assert config.study is not None
    wanted = list(places(config))
    bases = {place: tasks_at(config, place) for place in wanted if not place.axis}
    standings = _settle(config, bases, {}, progress, processes)
    others = {place: tasks_at(config, place) for place in wanted if place.axis}
    if config.study.plans is not None:
        for place, tasks in others.items():
            tried = {
                task.system: _tried(standings[Place(place.model)], task.system, config.study.plans) for task in tasks
            }
            others[place] = tasks_at(config, place, tried)
    return {**standings, **_settle(config, others, standings, progress, processes)}


def _settle(
    config: RunConfig,
    wanted: Mapping[Place, list[Task]],
    bases: Mapping[Place, Standing],
    progress: Progress,
    processes: int | None,
) -> dict[Place, Standing]:
    """Run the tasks of some places; what a place does not ask stands as at its base."""
    replies = iter(answers([task for tasks in wanted.values() for task in tasks], progress, processes))
    standings: dict[Place, Standing] = {}
    for place, tasks in wanted.items():
        got = {task.system: next(replies) for task in tasks}
        at_base = bases[Place(place.model)].answers if place.axis else {}
        standings[place] = Standing({name: got.get(name) or at_base[name] for name in competitors(config)})
    return standings


def _tried(base: Standing, system: str, count: int) -> Known | None:
    """What a baseline tries away from the base: its most promising plans there. None: a search, as for DisagMoE."""
    if system == OWN_SYSTEM:
        return None
    tried = {one.row["variant"]: one.ranked[:count] for one in base.answers[system]}
    return tried if any(tried.values()) else None


def settings_of(config: RunConfig, name: str, axis: str) -> list[tuple[Setting, Place]]:
    """The settings of an axis with their places; the base takes part with its own coordinate on a numeric axis."""
    assert config.study is not None
    base = AXES[axis].base
    pairs = [(s, Place(name, axis, s)) for s in config.study.settings(axis) if base is None or s != base(config)]
    if base is None:
        return list(pairs)
    return sorted([*pairs, (base(config), Place(name))], key=lambda pair: float(pair[0]))


def base_settings(config: RunConfig) -> dict[str, str]:
    """Where the unchanged configuration lies on the numeric axes of the study."""
    assert config.study is not None
    bases = {axis: AXES[axis].base for axis, _ in config.study.axes if axis in AXES}
    return {axis: AXES[axis].text(base(config)) for axis, base in bases.items() if base is not None}


def point(place: Place, standing: Standing) -> dict[str, Any]:
    """One place as a flat record."""
    own = standing.broken or standing.own
    best = standing.rival(BEST)
    reference = standing.rival(REFERENCE)
    axis: Axis | None = AXES[place.axis] if place.axis else None
    return {
        "model": place.model,
        "axis": place.axis or "base",
        "setting": axis.text(place.setting) if axis else "",
        "ep": (own["plan"] or {}).get("ep"),
        "status": own["status"],
        "reason": f"{label(own)}: {own['reason']}" if own["reason"] else "",
        "step_s": own["step_time_s"],
        "exposed_s": own["exposed_comm_s"],
        "bubble_s": own["bubble_s"],
        "reference_step_s": None if reference is None else reference["step_time_s"],
        "best_baseline": None if best is None else label(best),
        "best_step_s": None if best is None else best["step_time_s"],
        "speedup_over_reference": standing.speedup(REFERENCE),
        "speedup_over_best": standing.speedup(BEST),
        "microbatches": own["microbatches"],
        "plan": own["plan"],
    }


def remarks(standings: Mapping[Place, Standing]) -> list[str]:
    """What a reader of the points must know of the base."""
    own = next(standing.own for standing in standings.values())
    factors = own["contention"]
    if factors["compute"] != 1.0 or factors["comm"] != 1.0:
        return []
    return [f"{OWN_SYSTEM} on {own['transport']} has no contention to scale: that axis changes the other systems only"]
