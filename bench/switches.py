"""Switches of `disagmoe_plus`, each alone, as plans that can be cut: what a cross-check of the switches runs.

Decides which plan stands for a switch. Tuned plans rarely have its form (a head cannot
be spread where the best ring has one group, unequal depths hardly fit), so it is the
most promising candidate in which the switch, on and all others off, means something
and that fits; where none fits, GPUs are given just enough memory. Decides as well what
a cut shows of its switch, by comparison with the same cut without it: another order of
operations, or other groups. Pools that share nodes run the same Program, in which only
durations are others: that shows nothing that two pools apart would not, and a cut that
is the same in every way shows nothing at all, however well both sides agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bench.cut import CutPlan, cut_candidate, lay_out
from bench.cut_sizes import cut_layers, paper_sizes
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.program import COLUMNS, Program
from disagmoe.system import Candidate, NotApplicable, Problem
from disagmoe.systems.disagmoe_plus import SWITCHES, DisagMoEPlus

PLUS = "disagmoe_plus"
ALL = "all"
FREE_GROUPS, HYBRID = "free_groups", "hybrid"
UNDONE: Mapping[str, Candidate] = {
    "spread_head": {"head": "last_f"},
    "split_backward": {"put_off": -1},
    "look_ahead": {"rows": 0},
    FREE_GROUPS: {},
    "balanced_map": {"map": "paper"},
    "shared_nodes": {"nics": "halves", "stage_nodes": 0},
    "other_depths": {"p_f": 0},
    "early_gather": {"gather": "end"},
    HYBRID: {"form": "ring"},
}
"""What a candidate says without a switch; of free groups the size that was asked for."""
OF_SIZE = (FREE_GROUPS, "other_depths")
"""Switches without which a cut has the sizes of the paper's ring."""
OF_SEVERAL_GROUPS = ("spread_head", "balanced_map")
"""Switches that mean nothing on a ring of one group of either kind."""
ORDER, GROUPS, TOGETHER = "order", "groups", "attention and experts together"
DURATIONS = "durations only"
"""What a cut can show of its switch; where it only shows durations its Program is that without the switch."""


def read_switches(text: str) -> tuple[str, ...]:
    """Names from "all" or "spread_head,look_ahead", in the order of the documentation. Raises ValueError."""
    asked = [name.strip() for name in text.strip("[]").split(",")]
    if wrong := [name for name in asked if name not in SWITCHES and asked != [ALL]]:
        raise ValueError(f"switches={text}: no switch {wrong[0]!r}; allowed: {ALL}, or any of {', '.join(SWITCHES)}")
    return SWITCHES if asked == [ALL] else tuple(name for name in SWITCHES if name in asked)


@dataclass(frozen=True)
class Switched:
    """The planner with one switch on and all others off, of whose candidates only those count that show it."""

    switch: str

    name: str = PLUS
    native_transport: str = DisagMoEPlus.native_transport
    recompute_levels: ClassVar[tuple[Candidate, ...]] = DisagMoEPlus.recompute_levels

    @property
    def planner(self) -> DisagMoEPlus:
        """`disagmoe_plus` as it is asked here."""
        return DisagMoEPlus.with_switches(self.switch)

    @property
    def free_groups(self) -> str:
        """The planner's switch of this name: its cuts keep the sizes of groups."""
        return self.planner.free_groups

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """Candidates in which the switch means something. Raises NotApplicable where there are none."""
        found = [one for one in self.planner.candidates(problem) if self.shows(problem, one)]
        if not found:
            raise NotApplicable(f"no plan here in which {self.switch} means something")
        return found

    def shows(self, problem: Problem, candidate: Candidate) -> bool:
        """Whether the switch changes anything in a candidate."""
        if self.switch == FREE_GROUPS:
            return problem.ep is not None and candidate["n"] != problem.ep
        if self.switch in OF_SEVERAL_GROUPS and int(candidate["p"]) < 2:
            return False
        return any(candidate.get(key, value) != value for key, value in UNDONE[self.switch].items())

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        """None: the plan only has to be one of the switch's."""
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        """The planner's own."""
        return self.planner.layout(problem, candidate)

    def program(self, problem: Problem, layout: Layout) -> Program:
        """The planner's own."""
        return self.planner.program(problem, layout)

    def shown(self, problem: Problem, cut: CutPlan, processes: int) -> str:
        """What a cut shows of the switch, "" where it shows nothing. Raises NotApplicable."""
        if self.switch == HYBRID:
            return TOGETHER
        bare = {**cut_candidate(self, problem, cut.full, cut.candidate, processes), **UNDONE[self.switch]}
        if self.switch in OF_SIZE:
            bare = dict(paper_sizes(processes).applied(bare, cut_layers(problem.model), processes))
        return difference(lay_out(self, problem, cut.full, bare, processes), cut.plan)


def difference(one: Plan, other: Plan) -> str:
    """What tells two plans apart, the first of groups, order and nodes; "" where nothing does."""
    workers, others = (plan.layout.placement.workers for plan in (one, other))
    if [(w.pool, w.gpus) for w in workers] != [(w.pool, w.gpus) for w in others]:
        return GROUPS
    if not same_program(one.program, other.program):
        return ORDER
    return DURATIONS if [w.node_ids for w in workers] != [w.node_ids for w in others] else ""


def same_program(one: Program, other: Program) -> bool:
    """Whether two Programs say the same."""
    columns = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)
    return columns and one.in_flight == other.in_flight and one.early_gather == other.early_gather
