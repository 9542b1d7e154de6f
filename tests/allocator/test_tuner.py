"""The tuner's three sieves, against exhaustive search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from baselines import get_system
from baselines.megatron import Megatron1F1B
from disagmoe.allocator import tune
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.pricing import price
from disagmoe.plan.program import Program
from disagmoe.simulator import simulate
from disagmoe.specs import parameters
from disagmoe.system import Candidate, NotApplicable, Problem, recompute_levels
from disagmoe.systems import DisagMoE
from tests.problems import problem, small_cluster


def step_of(pr: Problem):  # type: ignore[no-untyped-def]
    return lambda plan: simulate(plan.program, price(plan.layout, plan.program, pr.costs)).step_s


def exhaustive(system: Megatron1F1B | DisagMoE, pr: Problem) -> float:
    """The best step among all candidates and all their refinements, nothing pruned."""
    best = float("inf")
    for candidate in system.candidates(pr):
        for variant in (candidate, *system.refinements(pr, candidate)):
            try:
                layout = system.layout(pr, variant)
                plan = Plan(layout, system.program(pr, layout))
            except NotApplicable:
                continue
            best = min(best, step_of(pr)(plan))
    return best


def test_megatron_pruning_keeps_the_optimum() -> None:
    pr = problem("tiny", ep=8, global_batch=64)
    tuned = tune(Megatron1F1B(), pr, step_of(pr), budget=1000)
    assert tuned.status == "ok"
    assert tuned.step_s == exhaustive(Megatron1F1B(), pr)


def test_every_bound_is_below_its_step() -> None:
    pr = problem("deepseek_moe", ep=16, global_batch=64, merge="node", transport="m2n_rdma")
    for system in (Megatron1F1B(), DisagMoE()):
        tuned = tune(system, pr, step_of(pr))
        timed = [t for t in tuned.trials if t.outcome == "timed"]
        assert timed
        for trial in timed:
            assert trial.bound_s is not None and trial.step_s is not None
            assert trial.bound_s <= trial.step_s


@pytest.mark.parametrize("transport", ["nccl", "m2n_rdma"])
@pytest.mark.parametrize("name", ["megatron_1f1b_overlap", "dualpipe", "dualpipe_v", "disagmoe_plus"])
def test_bounds_of_plans_that_overlap_hold_with_contention(name: str, transport: str) -> None:
    """Whatever a plan is made of: parts, recompute, windows, few micro-batches or many."""
    for batch, model in ((64, "deepseek_moe"), (512, "tiny")):
        merge = "none" if transport == "nccl" else "node"
        pr = problem(model, ep=8, global_batch=batch, merge=merge, transport=transport)
        system, checked = get_system(name), 0
        for number, candidate in enumerate(list(system.candidates(pr))[::6]):
            levels, variants = recompute_levels(system), [candidate, *list(system.refinements(pr, candidate))[::5]]
            try:
                layout = system.layout(pr, {**variants[number % len(variants)], **levels[number % len(levels)]})
                plan = Plan(layout, system.program(pr, layout))
            except NotApplicable:
                continue
            assert lower_bound_s(layout, pr.costs) <= step_of(pr)(plan) * (1 + 1e-12), (candidate, layout.options)
            checked += 1
        assert checked


def test_the_plan_returned_is_the_one_that_was_timed() -> None:
    pr = problem("deepseek_moe", ep=16, global_batch=64, merge="node", transport="m2n_rdma")
    tuned = tune(DisagMoE(), pr, step_of(pr))
    assert tuned.plan is not None
    assert step_of(pr)(tuned.plan) == tuned.step_s
    assert tuned.step_s == min(t.step_s for t in tuned.trials if t.step_s is not None)
    assert lower_bound_s(tuned.plan.layout, pr.costs) <= (tuned.step_s or 0.0)


def test_too_large_a_model_is_out_of_memory_with_both_numbers() -> None:
    pr = problem("qwen3", small_cluster(nodes=2), ep=16)
    tuned = tune(Megatron1F1B(), pr, step_of(pr))
    assert tuned.status == "oom" and tuned.plan is None
    # One stage of 16 ranks: 227.1e9 expert parameters / 16 x 18 bytes and 8.0e9 dense ones x (6 + 12 / 16) bytes.
    count = parameters(pr.model)
    dense = count.total - count.routed_experts
    needed = (count.routed_experts / 16 * 18 + dense * (6 + 12 / 16)) / 2**30
    # On top comes one micro-batch of activations: layer inputs only, under full recompute.
    assert tuned.needed_gib is not None
    assert needed < tuned.needed_gib < needed + 5.0
    assert f"needs {tuned.needed_gib:.1f} GiB" in tuned.reason and "75.6 GiB available" in tuned.reason


def test_expert_group_grows_only_where_the_size_asked_for_does_not_fit() -> None:
    pr = problem("deepseek_moe", ep=16, merge="node", transport="m2n_rdma")
    fits = tune(DisagMoE(), pr, step_of(pr)).plan
    assert fits is not None and fits.layout.ep == 16
    tight = problem("gpt_oss_20b", small_cluster(nodes=4, memory_gib=44.0), ep=8, merge="node", transport="m2n_rdma")
    # 19.1e9 expert parameters x 18 bytes are 40 GiB a GPU on 8 of them and 20 GiB on 16; activations come on top.
    grown = tune(DisagMoE(p=1, dp=1), tight, step_of(tight)).plan
    assert grown is not None and grown.layout.ep == 16


@dataclass(frozen=True)
class Refusing:
    """A system that can never run."""

    name: str = "refusing"
    native_transport: str = "nccl"

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        raise NotApplicable("needs a machine that does not exist")

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        raise AssertionError("not reached")

    def program(self, problem: Problem, layout: Layout) -> Program:
        raise AssertionError("not reached")


def test_a_refusal_is_a_result_with_its_reason() -> None:
    pr = problem("tiny", ep=8)
    tuned = tune(Refusing(), pr, step_of(pr))
    assert (tuned.status, tuned.reason) == ("not_applicable", "needs a machine that does not exist")


def test_budget_counts_plans() -> None:
    pr = problem("deepseek_moe", ep=16, global_batch=512)
    calls: list[float] = []

    def step(plan: Plan) -> float:
        calls.append(step_of(pr)(plan))
        return calls[-1]

    tuned = tune(Megatron1F1B(), pr, step, budget=3)
    assert len(calls) <= 3
    assert tuned.step_s == min(calls)


def test_recompute_comes_in_only_as_far_as_memory_asks() -> None:
    roomy = problem("deepseek_moe", ep=16, global_batch=512, micro_batch=1)
    tuned = tune(Megatron1F1B(pp=1), roomy, step_of(roomy))
    assert tuned.candidate is not None
    assert "recompute" not in tuned.candidate
    # 16 sequences of 4096 in flight on one stage keep everything of 28 layers: make the GPU too small for that.
    needs = {t.candidate.get("recompute", "none"): t.needed_gib for t in tuned.trials if t.needed_gib is not None}
    tight = problem(
        "deepseek_moe", small_cluster(memory_gib=needs["none"] + 4.0 - 0.1), ep=16, global_batch=512, micro_batch=1
    )
    found = tune(Megatron1F1B(pp=1), tight, step_of(tight))
    assert found.status == "ok"
    assert found.candidate is not None
    assert found.candidate["recompute"] == "selective"
    assert found.needed_gib is not None
    assert found.needed_gib <= tight.cluster.limit_gib
    assert found.step_s is not None and tuned.step_s is not None
    assert found.step_s >= tuned.step_s


def test_memory_as_it_ran_has_the_last_word() -> None:
    pr = problem("tiny", ep=8, global_batch=64)
    asked: list[Plan] = []

    def peak(plan: Plan) -> float:
        asked.append(plan)
        return 1e9 if len(asked) == 1 else 0.5

    tuned = tune(Megatron1F1B(), pr, step_of(pr), peak=peak)
    assert tuned.status == "ok"
    assert tuned.plan is not asked[0]
    assert tuned.needed_gib == 0.5
    assert [t.outcome for t in tuned.trials if t.needed_gib == 1e9] == ["memory"]


def test_a_straggler_suits_plans_of_any_number_of_workers() -> None:
    """GPU 31 is in the last of 1, 2 or 4 stages; one stage of all GPUs waits for it as a whole."""
    plain = problem("tiny", ep=8, global_batch=64)
    slow = problem("tiny", ep=8, global_batch=64, stragglers=((31, 1.5),))
    for pp in (1, 4):
        steps = [tune(Megatron1F1B(pp=pp), pr, step_of(pr)).step_s for pr in (plain, slow)]
        assert steps[0] is not None and steps[1] is not None and steps[0] < steps[1] <= 1.5 * steps[0]
