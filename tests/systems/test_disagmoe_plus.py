"""The search over switches: what each does to a plan, that every plan is sound and fits, and what it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from baselines import get_system
from disagmoe.allocator import Tuned, tune
from disagmoe.ops import Kind, Phase
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.plan.memory_report import lower_bound_gib, peak_gib
from disagmoe.plan.plan import Plan
from disagmoe.plan.pricing import price
from disagmoe.plan.resource_bound import resource_bound
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.system import Candidate, NotApplicable, Problem, System
from disagmoe.systems import DisagMoE, DisagMoEPlus
from disagmoe.systems.disagmoe_plus import SWITCHES
from disagmoe.systems.pools import Shape, place
from tests.problems import problem, small_cluster


def small(model: str = "deepseek_moe", **changes: object) -> Problem:
    given_: dict[str, object] = {
        "global_batch": 128, "transport": "deepep", "merge": "node", "ep": 8, "layers": 6, **changes
    }  # fmt: skip
    return problem(model, small_cluster(4), **given_)  # type: ignore[arg-type]


def step_s(pr: Problem, plan: Plan) -> float:
    return simulate(plan.program, price(plan.layout, plan.program, pr.costs)).step_s


def tuned(system: System, pr: Problem, budget: int = 12) -> Tuned:
    return tune(system, pr, lambda plan: step_s(pr, plan), budget=budget)


def test_with_every_switch_off_it_is_disagmoe() -> None:
    pr = small()
    off, plain = (tuned(system, pr) for system in (DisagMoEPlus.with_switches(), DisagMoE()))
    assert off.step_s == plain.step_s
    assert off.plan is not None and plain.plan is not None
    assert off.plan.layout.placement == plain.plan.layout.placement


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_are_checked(switch: str) -> None:
    with pytest.raises(ValueError, match=f"disagmoe_plus {switch}='maybe': allowed are auto, on, off"):
        DisagMoEPlus(**{switch: "maybe"})
    assert getattr(get_system("disagmoe_plus", **{switch: "on"}), switch) == "on"


def plans(system: System, pr: Problem, count: int = 6) -> list[Plan]:
    """Some plans of a system, spread over its candidates and their refinements."""
    found: list[Plan] = []
    candidates = list(system.candidates(pr))
    candidates += [r for c in candidates[:: max(1, len(candidates) // 3)] for r in system.refinements(pr, c)]
    for candidate in candidates[:: max(1, len(candidates) // count)]:
        try:
            layout = system.layout(pr, candidate)
            found.append(Plan(layout, system.program(pr, layout)))
        except NotApplicable:
            continue
    return found


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("model", ["deepseek_moe", "gpt_oss_20b"])
def test_every_switch_alone_makes_sound_plans(switch: str, model: str) -> None:
    pr = small(model)
    made = plans(DisagMoEPlus.with_switches(switch), pr)
    assert made or switch == "balanced_map"
    for plan in made:
        verify(plan.program)
        assert lower_bound_s(plan.layout, pr.costs) <= step_s(pr, plan) * (1 + 1e-9)
        bound = resource_bound(pr.costs, plan.layout.transport, plan.layout.merge, plan.layout.ep)
        assert bound.step_s <= step_s(pr, plan)
        needed = peak_gib(plan.layout, plan.program, pr.model, pr.workload)
        assert lower_bound_gib(plan.layout, pr.model, pr.workload) <= needed


def test_what_each_switch_shows_in_a_plan() -> None:
    pr = small("gpt_oss_20b")

    def some(switch: str) -> Plan:
        return plans(DisagMoEPlus.with_switches(switch), pr)[-1]

    spread = next(p for p in plans(DisagMoEPlus.with_switches("spread_head"), pr) if p.layout.options["p"] > 1)
    assert len(spread.layout.placement.head_shards) == spread.layout.options["p"]
    split = some("split_backward").program
    assert (split.phase == int(Phase.W)).any() and not (
        (split.kind == int(Kind.FFN)) & (split.phase == int(Phase.B))
    ).any()
    assert some("look_ahead").layout.options["rows"] > 0
    assert some("early_gather").program.early_gather
    assert some("shared_nodes").layout.details["nics"] == "shared_nodes"
    assert not some("hybrid").layout.placement.disaggregated
    depths = some("other_depths").layout.placement
    assert len(set(depths.ffn)) != len(set(depths.attn))
    sizes = {plan.layout.ep for plan in plans(DisagMoEPlus.with_switches("free_groups"), small(ep=16), 12)}
    assert sizes - {16}
    balanced = plans(DisagMoEPlus.with_switches("balanced_map"), pr, 40)
    assert balanced and all(
        p.layout.placement.attn != tuple(x % p.layout.options["p"] for x in range(6)) for p in balanced
    )


def test_every_plan_tried_shares_nodes_where_that_is_asked_for() -> None:
    found = tuned(DisagMoEPlus.with_switches("shared_nodes"), small(), 4)
    assert found.trials
    assert {trial.candidate["nics"] for trial in found.trials} == {"shared_nodes"}


def test_the_head_is_on_every_f_group_of_an_uneven_ring() -> None:
    pr = small()
    system = DisagMoEPlus.with_switches("spread_head", "other_depths")
    made = [plan for plan in plans(system, pr, 20) if len(set(plan.layout.placement.ffn)) > 1]
    assert made
    for plan in made:
        placement = plan.layout.placement
        assert placement.heads == tuple(sorted(set(placement.ffn)))
        verify(plan.program)


def test_together_is_found_where_it_is_faster_and_fits() -> None:
    pr = small(global_batch=256)
    auto, apart = tuned(DisagMoEPlus(), pr, 64), tuned(DisagMoEPlus(hybrid="off"), pr, 64)
    assert auto.step_s is not None and apart.step_s is not None
    assert auto.step_s <= apart.step_s * (1 + 1e-9)
    for found in (auto, apart):
        assert found.needed_gib is not None and found.needed_gib <= pr.cluster.limit_gib
    assert apart.plan is not None and apart.plan.layout.placement.disaggregated


@pytest.mark.parametrize("name", ["megatron_1f1b_overlap", "dualpipe_v", "tutel", "disagmoe"])
def test_not_slower_than_what_it_improves_on(name: str) -> None:
    pr = small(global_batch=256)
    best = tuned(DisagMoEPlus(), pr, 64)
    other = tuned(get_system(name), pr, 64)
    assert best.step_s is not None and other.step_s is not None
    assert best.step_s <= other.step_s


def test_one_gpu_leaves_pipelines_only() -> None:
    pr = problem("tiny", small_cluster(1, gpus=1, nics=1), global_batch=8, seq=512, ep=1)
    found = tuned(DisagMoEPlus(), pr)
    assert found.status == "ok" and found.plan is not None and not found.plan.layout.placement.disaggregated
    alone = tuned(DisagMoEPlus(hybrid="off"), pr)
    assert alone.status == "not_applicable" and "at least 2 GPUs" in alone.reason


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), model=st.sampled_from(["tiny", "gpt_oss_20b", "deepseek_moe_16b"]))
def test_random_plans_of_all_switches_are_sound(data: st.DataObject, model: str) -> None:
    pr = small(model, ep=data.draw(st.sampled_from([2, 4, 8])), global_batch=data.draw(st.integers(16, 96)))
    system = DisagMoEPlus(hybrid=data.draw(st.sampled_from(["auto", "on", "off"])))
    try:
        candidate: Candidate = data.draw(st.sampled_from(list(system.candidates(pr))))
        refined = list(system.refinements(pr, candidate))
        candidate = data.draw(st.sampled_from([candidate, *refined]))
        layout = system.layout(pr, {**candidate, **data.draw(st.sampled_from(system.recompute_levels))})
        program = system.program(pr, layout)
    except NotApplicable:
        reject()
    verify(program)
    assert step_s(pr, Plan(layout, program)) >= lower_bound_s(layout, pr.costs) * (1 - 1e-9)


def test_pools_of_unequal_depth_have_groups_of_their_own_number() -> None:
    cluster = small_cluster(4)
    workers = place(cluster, "halves", Shape(2, 1, 8, 4, p_f=4))
    assert workers is not None
    assert [worker.name for worker in workers] == ["A0", "A1", "F0", "F1", "F2", "F3"]
    assert [worker.gpus for worker in workers] == [8, 8, 4, 4, 4, 4]
    # Two F-groups on a node of eight GPUs use all of its NICs between them.
    assert workers[2].nic_gbs == workers[0].nic_gbs
    assert place(cluster, "halves", Shape(2, 1, 8, 4, p_f=5)) is None
    assert place(cluster, "own", replace(Shape(2, 1, 8, 8), p_f=1)) is not None
