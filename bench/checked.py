"""The runs behind a cross-check: cuts of simulated rows, and one cut simulated and emulated.

Decides what a second try is: where a first run is beyond a limit the cut runs once
more, and the fastest repeat of all counts, as a busy machine only makes it slower.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.config import RunConfig
from bench.crosscheck import Check
from bench.cut import CutPlan
from bench.emulated import cut_of, times
from bench.emulation import Ran, run_cut, without_overlap
from bench.evaluate import Outcome, Row
from disagmoe.cost.model import CostModel
from disagmoe.system import NotApplicable


def cuts(
    config: RunConfig, costs: CostModel, planned: Sequence[tuple[Row, Outcome]], processes: int
) -> tuple[list[tuple[Row, CutPlan]], list[str]]:
    """The cut of every row that has a plan, and the reasons of the others."""
    made, reasons = [], []
    for row, outcome in planned:
        try:
            cut = cut_of(config, costs, row, outcome, processes)
        except NotApplicable as reason:
            cut, row = None, {**row, "status": "not applicable", "reason": str(reason)}
        if cut is not None:
            made.append((row, cut))
        else:
            name = f"{row['system']} ({row['variant']})" if row["variant"] else row["system"]
            reasons.append(f"{row['view']} view, {name}: {str(row['status']).replace('_', ' ')}: {row['reason']}")
    return made, reasons


def checked(config: RunConfig, row: Row, cut: CutPlan, processes: int, *, forbidden: bool = False) -> Check:
    """Simulate and emulate one cut, at most twice; `forbidden`: without overlap."""
    cut = without_overlap(cut) if forbidden else cut
    ran = run_cut(cut, processes, config.repeats)
    check = _check(config, row, ran, processes, 1, forbidden)
    if check.good:
        return check
    again = run_cut(cut, processes, config.repeats)
    both = Ran(cut, ran.pace, ran.simulated, [*ran.steps, *again.steps])
    return _check(config, row, both, processes, 2, forbidden)


def _check(config: RunConfig, row: Row, ran: Ran, processes: int, tries: int, control: bool) -> Check:
    best, cut = ran.best, ran.cut
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
    )
