"""Plans that leave layers or sequences out are faults, whatever they would score."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baselines.registry import get_system, system_names
from bench.coverage import check_covered
from bench.evaluate import cost_model, problem_of
from disagmoe.plan.plan import Plan
from disagmoe.system import NotApplicable, Problem, variants_of
from tests.bench.helpers import config


def problem(name: str) -> Problem:
    run = config(transport="native", systems=[name], batch=30)
    form = variants_of(get_system(name), "native")[0]
    return problem_of(run, cost_model(run), form, "native")


def first_plan(name: str) -> tuple[Plan, Problem]:
    asked, system = problem(name), get_system(name)
    layout = system.layout(asked, next(iter(system.candidates(asked))))
    return Plan(layout, system.program(asked, layout)), asked


@pytest.mark.parametrize("name", system_names())
def test_every_system_covers_layers_and_sequences(name: str) -> None:
    try:
        plan, asked = first_plan(name)
    except NotApplicable as reason:
        pytest.skip(str(reason))
    check_covered(plan, asked.model, asked.workload)


def test_a_cut_model_is_refused_with_both_numbers() -> None:
    """A planner that drops a layer would train a shorter model and report the longer one's FLOPs."""
    plan, asked = first_plan("megatron_1f1b")
    longer = replace(asked.model, name="longer").with_layers(4)
    shorter = asked.model.with_layers(3)
    check_covered(plan, longer, asked.workload)
    with pytest.raises(ValueError, match="tiny has 3 layers, the plan's Program covers 4"):
        check_covered(plan, shorter, asked.workload)
    placement = plan.layout.placement
    dropped = replace(plan.layout, placement=replace(placement, attn=placement.attn[:3]))
    with pytest.raises(ValueError, match="tiny has 4 layers, the plan's attention covers 3"):
        check_covered(Plan(dropped, plan.program), asked.model, asked.workload)


def test_a_truncated_batch_is_refused_with_the_numbers() -> None:
    plan, asked = first_plan("megatron_1f1b")
    batch = plan.layout.batch
    trained = batch.microbatches * batch.sequences * batch.data_ranks
    more = replace(asked.workload, global_batch=trained + 1)
    with pytest.raises(ValueError, match=f"{trained + 1} sequences are asked for, .* are {trained}$"):
        check_covered(plan, asked.model, more)
    fewer = replace(plan.layout, batch=replace(batch, microbatches=batch.microbatches - 1))
    with pytest.raises(ValueError, match="micro-batches are planned, the Program has"):
        check_covered(Plan(fewer, plan.program), asked.model, asked.workload)
