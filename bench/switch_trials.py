"""What is tried for one switch of `disagmoe_plus` alone, all others off.

Decides the effort. What a switch does to the order or the map is asked of the very
split that `disagmoe` chose, with the refinements that the planner has for it: one
thing is changed. A switch that is about the split itself is searched for anew, with
fewer plans a round; where `disagmoe`'s split is among what it allows, that is tried
too, so that no short search makes it look worse. The faster answer counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.axes import with_options
from bench.config import RunConfig
from bench.evaluate import Row, cost_model, problem_of
from bench.points import Answer, Task, asked
from disagmoe.system import Candidate, Problem, Variant
from disagmoe.systems import DisagMoEPlus
from disagmoe.systems.disagmoe_plus import FREE_SIZES, SWITCHES
from disagmoe.systems.plus_ring import PAPER, other_depths

PLUS = "disagmoe_plus"
ALL = "all"
"""The search as it is shipped."""
NONE = "none"
"""`disagmoe`: every switch off."""
OF_THE_SPLIT = ("free_groups", "shared_nodes", "other_depths", "hybrid")
"""Switches that are about how GPUs are divided."""


def searched(config: RunConfig, place: str, switch: str, plans: int | None) -> Task | None:
    """The search over all switches, or for one about the split with at most `plans` plans a round; else None."""
    if switch == ALL:
        return asked(f"{place} {ALL}", config, PLUS)
    if switch not in OF_THE_SPLIT:
        return None
    there = _alone(config, switch)
    return asked(f"{place} {switch}", there if plans is None else replace(there, budget=plans), PLUS)


def of_split(config: RunConfig, place: str, switch: str, found: Answer) -> Task | None:
    """A switch on the split that `disagmoe` found; None where it found none or the switch has no use for it."""
    if switch == ALL or found.row["status"] != "ok":
        return None
    split, system = found.best[0], DisagMoEPlus.with_switches(switch)
    (view,) = config.views
    problem = problem_of(config, cost_model(config), Variant("", system), view)
    tried = _forms(system, problem, switch, split)
    return asked(f"{place} {switch} on the split", _alone(config, switch), PLUS, {"": tried}) if tried else None


def _alone(config: RunConfig, switch: str) -> RunConfig:
    return with_options(config, PLUS, **{name: "on" if name == switch else "off" for name in SWITCHES})


def _forms(system: DisagMoEPlus, problem: Problem, switch: str, split: Candidate) -> tuple[Candidate, ...]:
    if switch == "hybrid" or (switch == "shared_nodes" and split["nics"] != "shared_nodes"):
        return ()
    if switch == "free_groups" and split["n"] not in FREE_SIZES:
        return ()
    starts = [split]
    if switch == "other_depths":
        starts = [dict(one) for one in other_depths(problem, {**PAPER, **split})]
    return tuple(form for start in starts for form in (start, *system.refinements(problem, start)))


def fastest(switch: str, plain: Row, rows: Sequence[Row]) -> Row:
    """The row that counts for a switch: the fastest that ran, else the first; `plain` is `disagmoe`'s."""
    ran = [row for row in rows if row["status"] == "ok"]
    if ran:
        return min(ran, key=lambda row: float(row["step_time_s"]))
    if rows:
        return rows[0]
    reason = f"{switch}: no split of disagmoe fits" if plain["status"] != "ok" else f"{switch}: not of this split"
    empty = {key: None for key in plain if key not in ("system", "variant", "view", "transport", "merge")}
    return {**plain, **empty, "status": "not_applicable", "reason": reason}
