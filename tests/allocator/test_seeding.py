"""The tuner's seeds and neighbours, on the ring planner and on others."""

from __future__ import annotations

import pytest

from baselines.megatron import Megatron1F1B
from disagmoe.allocator import RingMemory, Settings, allocate, tune
from disagmoe.allocator.seeding import neighbours, ring_choices, seeds
from disagmoe.plan.pricing import price
from disagmoe.simulator import simulate
from disagmoe.system import Problem
from disagmoe.systems import DisagMoE
from tests.problems import problem, small_cluster


def small() -> Problem:
    return problem("gpt_oss_20b", ep=8, global_batch=64, transport="m2n_rdma", merge="node")


def test_seeds_are_the_programs_allocation_in_every_form() -> None:
    pr, system = small(), DisagMoE()
    found = seeds(system, pr, list(system.candidates(pr)))
    weigh = RingMemory(system, pr, {"order": "comm_stage", "compute_streams": 2})
    plan = allocate(
        pr, memory=weigh.bound, check=weigh.whole, recompute=weigh.recompute, settings=Settings("exhaustive")
    )
    sizes = {(c["p"], c["dp"], c["m"], c["n"], c["micro_batch"]) for c in found}
    assert sizes == {(plan.shape.p, plan.shape.dp, plan.shape.m, plan.shape.n, plan.shape.micro_batch)}
    forms = {(c["order"], c["compute_streams"]) for c in found}
    assert forms == {(order, streams) for order in ("comm_stage", "megatron") for streams in (1, 2)}
    assert len({tuple(sorted(c.items())) for c in found}) == len(found)


@pytest.mark.parametrize(("name", "value"), [("p", 2), ("nics", "halves"), ("order", "megatron"), ("group", 9)])
def test_seeds_keep_what_the_user_has_set(name: str, value: object) -> None:
    pr, system = small(), DisagMoE(**{name: value, **({"p": 3} if name == "group" else {})})  # type: ignore[arg-type]
    found = seeds(system, pr, list(system.candidates(pr)))
    assert found
    assert {c[name] for c in found} == {value}


def test_only_ring_planners_have_seeds_and_neighbours() -> None:
    pr, system = small(), Megatron1F1B()
    candidates = list(system.candidates(pr))
    assert not ring_choices(system)
    assert seeds(system, pr, candidates) == neighbours(system, pr, candidates[0]) == []


def test_neighbours_differ_and_can_be_laid_out_or_say_why_not() -> None:
    pr, system = small(), DisagMoE()
    centre = next(iter(system.candidates(pr)))
    near = neighbours(system, pr, centre)
    assert near
    assert centre not in near


def test_nothing_fits_means_no_seed() -> None:
    pr = problem("qwen3", small_cluster(nodes=2), ep=8, transport="m2n_rdma", merge="node")
    system = DisagMoE()
    assert seeds(system, pr, list(system.candidates(pr))) == []


def test_trials_say_which_came_from_where_and_the_result_is_no_worse_than_the_seed() -> None:
    pr = small()
    tuned = tune(DisagMoE(), pr, lambda plan: simulate(plan.program, price(plan.layout, plan.program, pr.costs)).step_s)
    assert next(t.origin for t in tuned.trials) == "seed"
    assert {t.origin for t in tuned.trials} <= {"seed", "candidate", "refinement", "neighbour"}
    timed = [t.step_s for t in tuned.trials if t.origin == "seed" and t.step_s is not None]
    assert timed
    assert tuned.step_s is not None
    assert tuned.step_s <= min(timed)
