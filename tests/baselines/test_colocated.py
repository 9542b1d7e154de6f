"""World-size arithmetic and search spaces of the colocated pipelines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baselines.comet import Comet
from baselines.megatron import Megatron1F1B
from baselines.tutel import Tutel
from disagmoe.cost.calibration import Contention
from disagmoe.cost.model import CostModel
from disagmoe.ops import COMPUTE_KINDS, Kind
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.plan.dependencies import is_wait
from disagmoe.plan.pricing import price
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.system import NotApplicable, Problem, System
from disagmoe.timeline.timeline import Timeline
from tests.problems import problem, small_cluster


def test_expert_parallelism_divides_the_data_ranks_and_is_no_factor_of_the_world() -> None:
    # world 8, EP 2: pp 1, 2 and 4 leave 8, 4 and 2 data ranks, all multiples of 2; pp 8 leaves one.
    pr = problem("tiny", small_cluster(nodes=1), ep=2)
    depths = {(c["pp"], c["ep"]) for c in Megatron1F1B().candidates(pr)}
    assert depths == {(1, 2), (2, 2), (4, 2)}


def test_depths_never_exceed_the_layers() -> None:
    pr = problem("tiny", small_cluster(nodes=4), ep=2)  # 4 layers
    assert max(int(c["pp"]) for c in Megatron1F1B().candidates(pr)) == 4


def test_one_gpu_runs_colocated() -> None:
    pr = problem("tiny", small_cluster(nodes=1, gpus=1, nics=1), ep=16, global_batch=4)
    assert {(c["pp"], c["ep"]) for c in Megatron1F1B().candidates(pr)} == {(1, 1)}


def test_impossible_depth_is_refused_with_the_numbers() -> None:
    pr = problem("tiny", small_cluster(nodes=1), ep=2)
    with pytest.raises(
        NotApplicable, match=r"pp=3 is none that divides 8 GPUs into at most 4 stages of a multiple of EP 2"
    ):
        list(Megatron1F1B(pp=3).candidates(pr))


def test_micro_batches_cover_the_global_batch() -> None:
    pr = problem("tiny", small_cluster(nodes=1), ep=2, global_batch=50)
    for candidate in Megatron1F1B().candidates(pr):
        batch = Megatron1F1B().layout(pr, candidate).batch
        covered = batch.microbatches * batch.sequences * batch.data_ranks
        assert 50 <= covered < 50 + batch.sequences * batch.data_ranks


def test_all_programs_verify() -> None:
    pr = problem("deepseek_moe_16b", small_cluster(nodes=4), ep=8, global_batch=64)
    for system in (Megatron1F1B(), Tutel()):
        for candidate in list(system.candidates(pr))[::5]:
            verify(system.program(pr, system.layout(pr, candidate)))


def test_head_costs_the_last_rank_its_layers() -> None:
    pr = problem("gpt_oss_20b", ep=8, global_batch=64)
    layout = Megatron1F1B().layout(pr, {"ep": 8, "pp": 4, "virtual": 1, "micro_batch": 1, "group": 4})
    held = [layout.placement.attn.count(rank) for rank in range(4)]
    assert held[3] == min(held) and held[3] < max(held)


def contended(pr: Problem, compute: float, comm: float) -> Problem:
    """The same problem with these factors between compute and the exchange's transport."""
    calibration = pr.costs.calibration
    factors = {**calibration.contention, pr.transport: Contention(compute, comm)}
    costs = CostModel(pr.model, pr.cluster, replace(calibration, contention=factors), pr.workload)
    return replace(pr, costs=costs)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("pp", "virtual"), [(1, 1), (2, 1), (2, 3), (4, 2)])
def test_no_exchange_of_the_reference_hides_and_bounds_hold(pp: int, virtual: int, recompute: str) -> None:
    """Without overlap the exchange's contention cannot matter; no schedule beats its bound."""
    pipeline: dict[str, str | int | float] = {
        "ep": 8,
        "pp": pp,
        "virtual": virtual,
        "micro_batch": 1,
        "group": pp,
        "recompute": recompute,
    }
    systems: tuple[tuple[System, dict[str, str | int | float]], ...] = (
        (Megatron1F1B(), pipeline),
        (Tutel(), {**pipeline, "degree": 4}),
        (Comet(variant="all-to-all"), {**pipeline, "tiles": "coarse"}),
    )
    for model, skew in (("deepseek_moe_16b", 1.3), ("gpt_oss_20b", 1.0)):
        pr = problem(model, ep=8, global_batch=96, transport="deepep", merge="node", skew=skew)
        for system, candidate in systems:
            layout = system.layout(pr, candidate)
            program = system.program(pr, layout)
            steps = []
            for factors in ((1.0, 1.0), (1.5, 3.0)):
                costs = contended(pr, *factors).costs
                timeline = simulate(program, price(layout, program, costs))
                assert lower_bound_s(layout, costs) <= timeline.step_s * (1 + 1e-12)
                steps.append(timeline.step_s)
            if system.name == "megatron_1f1b":
                assert steps[0] == pytest.approx(steps[1], rel=1e-12)
                assert beside_s(timeline) <= 1e-12 * timeline.step_s


def beside_s(timeline: Timeline) -> float:
    """Seconds of all dispatches and combines that run beside some compute of their worker."""
    program, total = timeline.program, 0.0
    for worker in range(program.n_workers):
        here = (program.worker == worker) & ~is_wait(program)
        work = np.flatnonzero(here & np.isin(program.kind, sorted(COMPUTE_KINDS)))
        work = work[np.argsort(timeline.start_s[work], kind="stable")]
        done = np.concatenate([[0.0], np.cumsum(timeline.end_s[work] - timeline.start_s[work])])
        for row in np.flatnonzero(here & np.isin(program.kind, (Kind.DISPATCH, Kind.COMBINE))):
            low, high = timeline.start_s[row], timeline.end_s[row]
            first = int(np.searchsorted(timeline.end_s[work], low, side="right"))
            last = int(np.searchsorted(timeline.start_s[work], high, side="left"))
            if last > first:
                total += float(done[last] - done[first])
    return total


def test_a_group_smaller_than_the_pipeline_is_refused_or_skipped() -> None:
    pr = problem("tiny", small_cluster(nodes=1), ep=2)
    with pytest.raises(NotApplicable, match="group=2 micro-batches per virtual stage: at least pp=4 are needed"):
        list(Megatron1F1B(pp=4, group=2).candidates(pr))
    assert {c["pp"] for c in Megatron1F1B(group=2).candidates(pr)} == {1, 2}
