"""World-size arithmetic and search spaces of the colocated pipelines."""

from __future__ import annotations

import pytest

from baselines.megatron import Megatron1F1B
from baselines.tutel import Tutel
from disagmoe.plan.verify import verify
from disagmoe.system import NotApplicable
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
