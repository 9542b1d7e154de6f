"""The runs behind a cross-check: what is cut, and one cut simulated and emulated.

Decides what is cut: the tuned plan of a system, or a plan that stands for a switch of
`disagmoe_plus`. Decides what a second try is, too: where a first run is beyond a limit
the cut runs once more, and the fastest repeat of all counts, as a busy machine only
makes it slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.config import RunConfig
from bench.crosscheck import Check
from bench.cut import CutPlan
from bench.emulated import cut_of_tuned, form_of, searched, times
from bench.emulation import Ran, run_cut, without_overlap
from bench.evaluate import Outcome, Row, label, problem_of, run_system
from bench.switches import PLUS, Switched
from disagmoe.cost.model import CostModel
from disagmoe.system import NotApplicable, Variant

SWITCH_BUDGET = 8
"""Plans timed for a switch: any of its form will do that is not far off the fastest."""


class Planned(NamedTuple):
    """A row with its plan and the planner that made it, which was given this budget."""

    row: Row
    outcome: Outcome
    form: Variant
    budget: int


class Made(NamedTuple):
    """A cut, and of a switch what it shows of it."""

    row: Row
    cut: CutPlan
    shows: str = ""


def planned(config: RunConfig, costs: CostModel, name: str, view: str) -> list[Planned]:
    """The tuned plans of a system."""
    found = run_system(config, costs, name, view)
    return [Planned(row, outcome, form_of(config, row), config.budget) for row, outcome in found]


def planned_switch(config: RunConfig, costs: CostModel, switch: str, view: str) -> list[Planned]:
    """A plan that stands for a switch."""
    form = Variant(switch, Switched(switch))
    tuned = searched(form, problem_of(config, costs, form, view), SWITCH_BUDGET)
    row = {"system": PLUS, "variant": switch, "view": view, "status": tuned.status, "reason": tuned.reason}
    return [Planned(row, Outcome(None, None, tuned), form, SWITCH_BUDGET)]


def cuts(config: RunConfig, costs: CostModel, asked: Sequence[Planned], processes: int) -> tuple[list[Made], list[str]]:
    """The cut of every row that has one to show, and the reasons of the others."""
    made, reasons = [], []
    for one in asked:
        row, reason = one.row, ""
        try:
            found = _cut(config, costs, one, processes)
            if found is None:
                reason = f"{str(row['status']).replace('_', ' ')}: {row['reason']}"
            elif isinstance(one.form.system, Switched) and not found.shows:
                reason = "no difference in this cut: it is the same with and without the switch"
            else:
                made.append(found)
        except NotApplicable as refused:
            reason = f"not applicable: {refused}"
        if reason:
            reasons.append(f"{row['view']} view, {label(row)}: {reason}")
    return made, reasons


def _cut(config: RunConfig, costs: CostModel, one: Planned, processes: int) -> Made | None:
    problem = problem_of(config, costs, one.form, one.row["view"])
    cut = cut_of_tuned(one.form, problem, one.outcome.tuned, processes, one.budget)
    if cut is None:
        return None
    system = one.form.system
    return Made(one.row, cut, system.shown(problem, cut, processes) if isinstance(system, Switched) else "")


def checked(config: RunConfig, made: Made, processes: int, *, forbidden: bool = False) -> Check:
    """Simulate and emulate one cut, at most twice; `forbidden`: without overlap."""
    cut = without_overlap(made.cut) if forbidden else made.cut
    ran = run_cut(cut, processes, config.repeats)
    check = _check(config, made, ran, processes, 1, forbidden)
    if check.good:
        return check
    again = run_cut(cut, processes, config.repeats)
    both = Ran(cut, ran.pace, ran.simulated, [*ran.steps, *again.steps])
    return _check(config, made, both, processes, 2, forbidden)


def _check(config: RunConfig, made: Made, ran: Ran, processes: int, tries: int, control: bool) -> Check:
    best, cut, row = ran.best, ran.cut, made.row
    per_token = cut.gpus / (cut.sequences * config.workload.seq)
    loads = [step.foreign_load for step in ran.steps if step.foreign_load is not None]
    return Check(
        system=row["system"],
        variant=row["variant"],
        view=row["view"],
        processes=processes,
        simulated=times(cut, ran.simulated),
        emulated=times(cut, best.timeline),
        simulated_per_token_s=ran.simulated.step_s * per_token,
        emulated_per_token_s=best.timeline.step_s * per_token,
        spread=ran.spread,
        tries=tries,
        dilation=ran.pace.dilation,
        late_share=best.late_share,
        own_load=best.own_load,
        foreign_load=sum(loads) / len(loads) if loads else None,
        control=control,
        shows=made.shows,
        plan=cut.full.details,
        cut=cut.sizes,
    )
