"""Reports of plans: what a GPU handles, bounds, peaks of the shipped systems."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from baselines.colocated import stages_of
from baselines.registry import SHIPPED, get_system
from disagmoe.cost.recompute import Recompute
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.memory import GIB, GROUP_COMMUNICATOR_GIB, PAIR_COMMUNICATOR_GIB
from disagmoe.plan.memory_load import gpu_load, in_frames
from disagmoe.plan.memory_report import COMPONENTS, lower_bound_gib, memory_report, peak_gib
from disagmoe.plan.memory_tables import DYNAMIC
from disagmoe.plan.plan import Batch, Layout, Placement, Plan, Worker
from disagmoe.plan.pricing import price
from disagmoe.plan.verify import PlanError, verify
from disagmoe.simulator import simulate
from disagmoe.specs import Workload, load_model
from disagmoe.system import NotApplicable, Problem, recompute_levels
from tests.problems import problem


def first_plan(name: str, pr: Problem, skip: int = 0, **options: str) -> Plan:
    """The first candidate of a system that can be placed, after `skip` others."""
    system = get_system(name)
    for candidate in list(system.candidates(pr))[skip:]:
        try:
            layout = system.layout(pr, candidate)
            return Plan(layout, system.program(pr, replace(layout, options={**layout.options, **options})))
        except NotApplicable:
            continue
    raise AssertionError(f"no plan of {name}")


def disaggregated(m: int, n: int, merge: str = "none") -> Layout:
    workers = (Worker("A0", "A", m, 1, 50.0), Worker("F0", "F", n, 1, 50.0))
    placement = Placement(workers, (0, 0), (1, 1), 0, 1)
    return Layout("x", "", placement, Batch(4, 1, m), n, "m2n_rdma", merge)


def colocated(ep: int, tp: int = 1, gpus: int = 8) -> Layout:
    placement = Placement((Worker("P0", "AF", gpus, 1, 50.0),), (0, 0), (0, 0), 0, 0)
    return Layout("x", "", placement, Batch(4, 1, gpus), ep, "nccl", "none", options={"tp": tp})


def test_expert_rows_do_not_depend_on_the_expert_parallel_size() -> None:
    """Micro-batch 1, 4,096 tokens, top-8, balanced: dispatch does not thin the tokens out."""
    model, work = load_model("qwen3_30b"), Workload(seq=4096, global_batch=32)
    for ep in (1, 2, 8):
        layout = colocated(ep)
        assert gpu_load(layout, model, work, layout.placement.workers[0], moe=True).rows == 32_768
    for n, rows in ((2, 65_536), (4, 32_768)):
        layout = disaggregated(4, n)
        load = gpu_load(layout, model, work, layout.placement.workers[1], moe=True)
        assert (load.rows, load.received, load.home_tokens) == (rows, rows, 4 * 4096 / n)


def test_merging_copies_shrinks_what_travels_not_what_is_computed() -> None:
    model, work = load_model("qwen3_30b"), Workload(seq=4096, global_batch=32)
    plain, merged = (disaggregated(4, 4, merge) for merge in ("none", "node"))
    a, f = plain.placement.workers
    assert gpu_load(merged, model, work, f, moe=True).rows == gpu_load(plain, model, work, f, moe=True).rows
    assert gpu_load(merged, model, work, f, moe=True).received < 32_768 / 2
    assert gpu_load(merged, model, work, a, moe=True).sent == 4096  # all experts on one node: one copy
    assert gpu_load(plain, model, work, a, moe=True).sent == 8 * 4096


def test_skew_fills_the_fullest_gpu() -> None:
    model = load_model("qwen3_30b")
    layout = colocated(8)
    even, skewed = (Workload(seq=4096, global_batch=32, skew=s) for s in (1.0, 1.5))
    worker = layout.placement.workers[0]
    assert gpu_load(layout, model, skewed, worker, moe=True).rows == 1.5 * 32_768
    assert gpu_load(layout, model, even, worker, moe=False).rows == 0.0
    limited = replace(layout, capacity_padded=True, load=1.0)
    assert gpu_load(limited, model, skewed, worker, moe=True).rows == 32_768


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_system_has_a_report_above_its_bound(name: str) -> None:
    pr = problem("deepseek_moe", ep=8, global_batch=256, merge="node", transport="deepep")
    plan = first_plan(name, pr, skip=3)
    report = memory_report(plan.layout, plan.program, pr.model, pr.workload)
    peak = peak_gib(plan.layout, plan.program, pr.model, pr.workload)
    assert peak == pytest.approx(report.peak_gib, rel=1e-12)
    assert lower_bound_gib(plan.layout, pr.model, pr.workload) <= report.peak_gib
    for w, memory in enumerate(report.workers):
        assert tuple(memory.at_peak) == COMPONENTS
        assert memory.allocated_gib == pytest.approx(memory.peak_gib - memory.at_peak["communicators"])
        where, gib = report.curve(w)
        assert gib.sum(axis=0).max() == pytest.approx(memory.peak_gib)
        assert (np.diff(where) >= 0).all()
    assert report.fullest.peak_gib == report.peak_gib
    assert [row["peak_gib"] for row in report.table()] == list(report.peaks_gib)
    verify(plan.program, memory_gib=report.peaks_gib, limit_gib=report.peak_gib)
    with pytest.raises(PlanError, match="memory: worker"):
        verify(plan.program, memory_gib=report.peaks_gib, limit_gib=report.peak_gib - 0.01)


@pytest.mark.parametrize("name", ["megatron_1f1b", "tutel", "dualpipe", "disagmoe"])
def test_order_and_simulated_time_agree(name: str) -> None:
    """Only waiting transfers may differ; the order assumes one ahead."""
    pr = problem("deepseek_moe", ep=8, global_batch=128)
    plan = first_plan(name, pr)
    timeline = simulate(plan.program, price(plan.layout, plan.program, pr.costs))
    by_order = memory_report(plan.layout, plan.program, pr.model, pr.workload)
    by_time = memory_report(
        plan.layout, plan.program, pr.model, pr.workload, start_s=timeline.start_s, end_s=timeline.end_s
    )
    assert (by_order.unit, by_time.unit) == ("operations", "seconds")
    assert by_time.peak_gib == pytest.approx(by_order.peak_gib, rel=0.05)


def test_frames_are_those_of_layers_run_as_one_function() -> None:
    pr = problem("deepseek_moe", ep=8, global_batch=256)
    frames = {
        name: in_frames(plan.layout, plan.program)
        for name in ("megatron_1f1b", "tutel", "dualpipe", "disagmoe")
        for plan in [first_plan(name, pr)]
    }
    assert frames == {"megatron_1f1b": True, "tutel": True, "dualpipe": False, "disagmoe": False}


def test_recompute_trades_kept_bytes() -> None:
    pr = problem("qwen3_30b", ep=8, global_batch=64)
    layout = first_plan("megatron_1f1b", pr).layout
    peaks = {}
    for mode in ("none", "selective", "full"):
        chosen = replace(layout, options={**layout.options, "recompute": mode})
        policy = Recompute.of(chosen.options)
        bound = lower_bound_gib(chosen, pr.model, pr.workload)
        program = colocated_program(
            p=int(layout.options["pp"]),
            v=int(layout.options["virtual"]),
            m=layout.batch.microbatches,
            group=int(layout.options["group"]),
            stage_layers=stages_of(layout),
            moe=[True] * pr.model.layers,
            recompute=policy.repeated(disaggregated=False),
        )
        report = memory_report(chosen, program, pr.model, pr.workload)
        assert bound <= report.peak_gib
        peaks[mode] = report.peak_gib
        assert policy.attention == mode
    assert peaks["full"] < peaks["selective"] < peaks["none"]


def test_dualpipe_holds_two_copies_and_mirrors_share_the_optimizer() -> None:
    pr = problem("deepseek_moe", ep=8, global_batch=256)
    dual, single = (first_plan(name, pr).layout for name in ("dualpipe", "dualpipe_v"))
    pp = {"pp": 2, "micro_batch": 1, "ep": 8}
    dual = get_system("dualpipe").layout(pr, pp)
    single = get_system("dualpipe_v").layout(pr, pp)
    two, one = (
        memory_report(x, get_system(name).program(pr, x), pr.model, pr.workload)
        for name, x in (("dualpipe", dual), ("dualpipe_v", single))
    )
    total = [sum(w.at_peak["weights"] for w in r.workers) for r in (two, one)]
    state = [sum(w.at_peak["optimizer"] for w in r.workers) for r in (two, one)]
    assert total[0] == pytest.approx(2 * total[1])
    assert state[0] == pytest.approx(state[1])


def test_communicators_follow_from_the_lanes_of_the_program() -> None:
    pr = problem("deepseek_moe", ep=8, global_batch=128)
    megatron = get_system("megatron_1f1b")
    layout = megatron.layout(pr, {"pp": 4, "virtual": 1, "micro_batch": 1, "group": 4, "ep": 8})
    report = memory_report(layout, megatron.program(pr, layout), pr.model, pr.workload)
    # Expert-parallel group and dense gradients (EP 8 on 8 ranks leaves no expert replicas); two neighbours, two ways.
    assert report.workers[1].at_peak["communicators"] == pytest.approx(
        2 * GROUP_COMMUNICATOR_GIB + 4 * PAIR_COMMUNICATOR_GIB
    )
    assert report.workers[0].at_peak["communicators"] == pytest.approx(
        2 * GROUP_COMMUNICATOR_GIB + 2 * PAIR_COMMUNICATOR_GIB
    )


def test_tutel_pads_rows_and_keeps_what_comes_back() -> None:
    pr = problem("deepseek_moe", ep=8, global_batch=128, skew=1.3)
    reports = {}
    for name in ("megatron_1f1b", "tutel"):
        system = get_system(name)
        layout = system.layout(pr, {"pp": 1, "virtual": 1, "micro_batch": 1, "group": 1, "ep": 8, "degree": 2})
        reports[name] = memory_report(replace(layout, load=1.3), system.program(pr, layout), pr.model, pr.workload)
    kept = {name: r.workers[0].at_peak["ffn"] for name, r in reports.items()}
    layers, rows = pr.model.layers - len(pr.model.dense_layers), 4096 * pr.model.top_k * 1.3
    assert kept["tutel"] - kept["megatron_1f1b"] == pytest.approx(layers * rows * pr.model.hidden * 2 / GIB)


def test_unknown_optimizer_recipes_are_refused() -> None:
    pr = problem("tiny", ep=4)
    plan = first_plan("megatron_1f1b", pr)
    with pytest.raises(ValueError, match="optimizer='sgd': allowed are megatron, precision_aware"):
        memory_report(plan.layout, plan.program, pr.model, pr.workload, optimizer="sgd")
    light = memory_report(plan.layout, plan.program, pr.model, pr.workload, optimizer="precision_aware")
    full = memory_report(plan.layout, plan.program, pr.model, pr.workload)
    assert light.workers[0].at_peak["optimizer"] == pytest.approx(full.workers[0].at_peak["optimizer"] / 2)


def test_a_policy_that_the_program_does_not_follow_is_refused() -> None:
    pr = problem("deepseek_moe", ep=8, global_batch=128)
    plan = first_plan("dualpipe", pr)
    full = replace(plan.layout, options={**plan.layout.options, "recompute": "full"})
    with pytest.raises(ValueError, match="policy repeats ATTN, COMBINE, DISPATCH, FFN, its Program repeats nothing"):
        memory_report(full, plan.program, pr.model, pr.workload)


@pytest.mark.parametrize("transport", ["nccl", "deepep"])
@pytest.mark.parametrize("name", SHIPPED)
def test_every_buffer_is_gone_at_the_end(name: str, transport: str) -> None:
    """Copies merged per node make what is sent and what is received of different size: neither may pile up."""
    merge = "node" if transport == "deepep" else "none"
    pr = problem(seq=1024, global_batch=256, transport=transport, merge=merge)
    system, looked_at = get_system(name), 0
    for level, candidate in product(recompute_levels(system), list(system.candidates(pr))[::5]):
        try:
            layout = system.layout(pr, {**candidate, **level})
            program = system.program(pr, layout)
        except NotApplicable:
            continue
        timeline = simulate(program, price(layout, program, pr.costs))
        times = {"start_s": timeline.start_s, "end_s": timeline.end_s}
        report = memory_report(layout, program, pr.model, pr.workload, **times)
        for worker in range(program.n_workers):
            moving_bytes = report.curve(worker)[1][-len(DYNAMIC) :] * GIB
            assert np.abs(moving_bytes[:, -1]).max() < 1.0
            assert moving_bytes.min() > -1.0
        looked_at += 1
    assert looked_at
