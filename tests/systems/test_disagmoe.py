"""How DisagMoE cuts a cluster into pools, groups and NICs."""

from __future__ import annotations

import pytest

from disagmoe.allocator import tune
from disagmoe.plan.plan import Plan
from disagmoe.plan.pricing import price
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.system import NotApplicable, Problem
from disagmoe.systems import DisagMoE
from tests.problems import problem, small_cluster


def candidate(**changes: str | int) -> dict[str, str | int | float]:
    base: dict[str, str | int | float] = {
        "nics": "halves", "p": 4, "dp": 1, "m": 16, "n": 16, "micro_batch": 1, "order": "megatron", "group": 8
    }  # fmt: skip
    return {**base, **changes}


def tuned_plan(pr: Problem, system: DisagMoE) -> Plan:
    tuned = tune(system, pr, lambda plan: simulate(plan.program, price(plan.layout, plan.program, pr.costs)).step_s)
    assert tuned.plan is not None, tuned.reason
    return tuned.plan


def test_placement_of_the_paper() -> None:
    # L = 8, p = 2: A0 holds 0, 2, 4, 6 and A1 holds 1, 3, 5, 7; F likewise; the head sits with layer L - 1.
    pr = problem("deepseek_moe", "h800_128", global_batch=1024)
    placement = DisagMoE().layout(pr, candidate(p=2)).placement
    assert placement.attn[:8] == (0, 1, 0, 1, 0, 1, 0, 1)
    assert placement.ffn[:8] == (2, 3, 2, 3, 2, 3, 2, 3)
    assert (placement.embed, placement.head) == (0, 3)  # 28 layers: layer 27 is on group 1
    assert [w.name for w in placement.workers] == ["A0", "A1", "F0", "F1"]


def test_halves_give_each_pool_half_of_the_nics_whatever_its_gpus() -> None:
    # The paper's 16:10 on 16:16: four F-groups of 10 share 64 NICs of 50 GB/s.
    pr = problem("deepseek_moe", "h800_128", global_batch=1024)
    workers = DisagMoE().layout(pr, candidate(n=10)).placement.workers
    assert workers[0].nic_gbs == pytest.approx(50.0)
    assert workers[4].nic_gbs == pytest.approx(64 * 50.0 / 40)
    assert (workers[0].nodes, workers[4].nodes) == (2, 2)


def test_own_nodes_carry_their_nics() -> None:
    # One F-group of 16 fills 2 of 16 nodes; 14 nodes with 112 GPUs are left for attention.
    pr = problem("deepseek_moe", "h800_128", global_batch=1024)
    workers = DisagMoE().layout(pr, candidate(nics="own", p=1, m=112)).placement.workers
    assert (workers[0].gpus, workers[0].nodes, workers[0].nic_gbs) == (112, 14, 50.0)
    assert (workers[1].gpus, workers[1].nodes, workers[1].nic_gbs) == (16, 2, 50.0)


def test_a_gpu_never_owns_more_than_its_nodes_nics() -> None:
    pr = problem("deepseek_moe", "h800_128", global_batch=1024)
    worker = DisagMoE().layout(pr, candidate(p=1, m=1)).placement.workers[0]
    assert worker.nic_gbs == 8 * 50.0


@pytest.mark.parametrize("change", [{"m": 17}, {"n": 17}, {"dp": 2}])
def test_what_does_not_fit_its_half_is_refused(change: dict[str, int]) -> None:
    pr = problem("deepseek_moe", "h800_128", global_batch=1024)
    with pytest.raises(NotApplicable, match="do not fit"):
        DisagMoE().layout(pr, candidate(**change))


def test_micro_batches_are_counted_per_attention_rank() -> None:
    # n = ceil(GB / (micro-batch x dp x M)) = ceil(1000 / (2 x 16)) = 32
    pr = problem("deepseek_moe", "h800_128", global_batch=1000)
    batch = DisagMoE().layout(pr, candidate(micro_batch=2)).batch
    assert (batch.microbatches, batch.data_ranks, batch.sequences) == (32, 16, 2)


def test_every_candidate_stays_inside_the_cluster() -> None:
    for ep in (16, None):
        pr = problem("gpt_oss_20b", small_cluster(nodes=5, gpus=4, nics=2), ep=ep)
        count = 0
        for c in DisagMoE().candidates(pr):
            placement = DisagMoE().layout(pr, c).placement
            assert placement.gpus_used <= 20
            nics = placement.replicas * sum(w.gpus * w.nic_gbs for w in placement.workers)
            assert nics <= 5 * 2 * 50.0 * (1 + 1e-9)
            count += 1
        assert count > 0


def test_two_gpus_are_one_of_each_and_one_gpu_is_refused() -> None:
    two = problem("tiny", small_cluster(nodes=1, gpus=2), seq=128, global_batch=8)
    plan = tuned_plan(two, DisagMoE())
    assert [(w.pool, w.gpus) for w in plan.layout.placement.workers] == [("A", 1), ("F", 1)]
    verify(plan.program)
    one = problem("tiny", small_cluster(nodes=1, gpus=1), seq=128, global_batch=8)
    with pytest.raises(NotApplicable, match="needs at least 2 GPUs for disaggregation"):
        list(DisagMoE().candidates(one))


def test_free_expert_parallelism_is_never_slower() -> None:
    asked = problem("deepseek_moe", ep=16, global_batch=64, transport="m2n_rdma", merge="node")
    free = problem("deepseek_moe", ep=None, global_batch=64, transport="m2n_rdma", merge="node")

    def best(pr: Problem) -> float:
        found = tune(DisagMoE(), pr, lambda p: simulate(p.program, price(p.layout, p.program, pr.costs)).step_s)
        assert found.step_s is not None
        return found.step_s

    assert best(free) <= best(asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nics": "all"}, r"disagmoe nics='all': allowed are halves, own, shared_nodes"),
        ({"order": "x"}, r"disagmoe order='x': allowed are"),
        ({"p": 0}, r"disagmoe p=0: must be at least 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DisagMoE(**options)  # type: ignore[arg-type]
