"""The planner of combined 1F1B: preconditions, layouts, bounds, and that it overlaps."""

from __future__ import annotations

import numpy as np
import pytest

from baselines.megatron import Megatron1F1B
from baselines.megatron_overlap import Megatron1F1BOverlap
from baselines.registry import get_system
from disagmoe.ops import Kind, Phase
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.plan.pricing import price
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.system import NotApplicable, Problem, System
from disagmoe.timeline.metrics import worker_metrics
from tests.problems import problem, small_cluster

SYSTEM = Megatron1F1BOverlap()


def test_it_is_a_registered_system() -> None:
    assert get_system("megatron_1f1b_overlap", virtual=4) == Megatron1F1BOverlap(virtual=4)
    assert isinstance(SYSTEM, System)


def test_pipelines_have_virtual_stages() -> None:
    """pp = 1 takes the path without pipelining, every other pp has virtual stages."""
    pr = problem("deepseek_moe_16b", small_cluster(nodes=4), ep=8)
    shapes = {(c["pp"], c["virtual"]) for c in SYSTEM.candidates(pr)}
    assert (1, 1) in shapes
    assert min(v for p, v in shapes if p != 1) == 2
    plain = {(c["pp"], c["virtual"]) for c in Megatron1F1B().candidates(pr)}
    assert shapes == {(p, v) for p, v in plain if p == 1 or v != 1}


@pytest.mark.parametrize(
    ("system", "ep", "reason"),
    [
        (Megatron1F1BOverlap(), 1, "EP overlap needs expert parallelism: EP is 1 here, at least 2 is needed"),
        (Megatron1F1BOverlap(pp=2, virtual=1), 8, r"pp > 1 needs virtual stages \(virtual > 1\)"),
        (Megatron1F1BOverlap(pp=4), 8, r"none of the allowed pp has at least 2 virtual stages of 4 layers"),
        (Megatron1F1BOverlap(pp=3), 8, "pp=3 is none that divides 32 GPUs"),
    ],
)
def test_preconditions_are_reasons(system: Megatron1F1BOverlap, ep: int, reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason) as error:
        list(system.candidates(problem("tiny", ep=ep)))
    assert "\n" not in str(error.value)


def test_too_few_micro_batches_overlap_nothing() -> None:
    """pp = 1 with one micro-batch is one forward and one backward."""
    pr = problem("tiny", small_cluster(nodes=1), ep=8, global_batch=8, micro_batch=1)
    candidate = {"ep": 8, "pp": 1, "virtual": 1, "micro_batch": 1, "group": 1}
    with pytest.raises(NotApplicable, match="1 micro-batches in 1 virtual stages leave no forward and backward"):
        SYSTEM.layout(pr, candidate)


def every_plan(pr: Problem, step: int) -> None:
    """Each candidate's Program verifies and takes no less than its lower bound."""
    count = 0
    for candidate in list(SYSTEM.candidates(pr))[::step]:
        try:
            layout = SYSTEM.layout(pr, candidate)
        except NotApplicable:
            continue
        program = SYSTEM.program(pr, layout)
        verify(program)
        timeline = simulate(program, price(layout, program, pr.costs))
        assert timeline.step_s >= lower_bound_s(layout, pr.costs) * (1 - 1e-12)
        assert (program.pair >= 0).any()
        worker_metrics(timeline)
        count += 1
    assert count >= 3


def test_every_plan_is_sound() -> None:
    every_plan(problem("deepseek_moe_16b", small_cluster(nodes=4), ep=8, global_batch=96), 4)


def test_windows_and_dense_layers_are_planned_too() -> None:
    every_plan(
        problem("gpt_oss_20b", small_cluster(nodes=4), ep=8, global_batch=64, transport="deepep", merge="node"), 4
    )


def test_overlap_hides_part_of_the_exchange() -> None:
    """Same plan with and without pairs: same work, less exposed, faster."""
    pr = problem("deepseek_moe_16b", small_cluster(nodes=4), ep=16, global_batch=128)
    candidate = {"ep": 16, "pp": 2, "virtual": 2, "micro_batch": 1, "group": 2}
    exposed, steps, work = [], [], []
    for system in (Megatron1F1B(), SYSTEM):
        layout = system.layout(pr, candidate)
        program = system.program(pr, layout)
        pricing = price(layout, program, pr.costs)
        timeline = simulate(program, pricing)
        exposed.append(sum(m.exposed_s for m in worker_metrics(timeline)))
        steps.append(timeline.step_s)
        compute = np.isin(program.kind, (Kind.ATTN, Kind.FFN, Kind.HEAD, Kind.EMBED))
        work.append(pricing.duration_s[compute].sum())
        assert set(program.phase[compute].tolist()) <= {Phase.F, Phase.I, Phase.W, Phase.B}
    assert work[0] == pytest.approx(work[1], rel=1e-12)
    assert steps[1] < steps[0]
    assert exposed[1] < 0.8 * exposed[0]


def test_the_share_of_overlapped_pairs_is_printed() -> None:
    """p = 2, v = 2, groups of 2, 8 micro-batches: the last rank warms up with 3 of 16 forwards."""
    pr = problem("deepseek_moe_16b", small_cluster(nodes=4), ep=16, global_batch=128)
    layout = SYSTEM.layout(pr, {"ep": 16, "pp": 2, "virtual": 2, "micro_batch": 1, "group": 2})
    assert layout.batch.microbatches == 8
    assert layout.details["overlapped_share"] == round(13 / 16, 3)
    assert not layout.serial_exchange


def test_layers_are_dealt_by_time_and_in_a_second_try_by_number() -> None:
    """GPT-OSS-20B alternates windowed and full attention; long sequences make them differ."""
    pr = problem("gpt_oss_20b", small_cluster(nodes=4), ep=8, seq=32768, global_batch=64)
    candidate = {"ep": 8, "pp": 2, "virtual": 2, "micro_batch": 1, "group": 2}
    (second,) = SYSTEM.refinements(pr, candidate)
    assert second == {**candidate, "split": "count"}
    counts = [int(n) for n in str(SYSTEM.layout(pr, second).options["stages"]).split(",")]
    assert sum(counts) == 24
    assert max(counts[0], counts[2]) - min(counts[0], counts[2]) <= 1  # the two stages of a rank
    assert max(counts[1], counts[3]) - min(counts[1], counts[3]) <= 1
