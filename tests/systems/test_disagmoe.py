"""How DisagMoE cuts a cluster into pools, groups and NICs."""

from __future__ import annotations

import numpy as np
import pytest

from disagmoe.allocator import tune
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.memory import holdings
from disagmoe.plan.plan import Plan
from disagmoe.plan.pricing import LayoutCosts, price
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.specs import load_cluster, parameters
from disagmoe.specs.params import head_params
from disagmoe.system import NotApplicable, Problem
from disagmoe.systems import DisagMoE
from tests.problems import problem, small_cluster

FORM = ("order", "group", "compute_streams")
EXCHANGE = (int(Kind.DISPATCH), int(Kind.COMBINE), int(Kind.P2P))


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


@pytest.mark.parametrize(("model", "most"), [("qwen3", 150), ("deepseek_moe", 150), ("gpt_oss", 150)])
@pytest.mark.parametrize("ep", [16, None])
def test_the_search_space_stays_small(model: str, most: int, ep: int | None) -> None:
    """Splits looked at on 128 GPUs, in three forms each, per EP size where one is asked for."""
    pr = problem(model, "h800_128", global_batch=2048, ep=ep)
    found = [c for c in DisagMoE().candidates(pr) if c["tier"] == 0]
    splits = {tuple(sorted((k, v) for k, v in c.items() if k not in FORM)) for c in found}
    assert 0 < len(splits) <= most and len(found) == 3 * len(splits)
    assert ep is None or {c["nics"] for c in found} == {"halves", "own", "shared_nodes"}


def test_attention_gpus_that_would_only_fill_up_the_last_micro_batch_stay_out() -> None:
    """100 sequences, dp M = 4 x 16 ranks: two micro-batches, which 4 x 13 = 52 ranks do as well, and 48 do not."""
    pr = problem("deepseek_moe", "h800_128", global_batch=100, micro_batch=1)
    found = {(c["nics"], c["p"], c["dp"]): c["m"] for c in DisagMoE().candidates(pr) if c["tier"] == 0}
    assert found["halves", 1, 4] == 13
    asked = {(c["nics"], c["p"], c["dp"]): c["m"] for c in DisagMoE(m=16).candidates(pr) if c["tier"] == 0}
    assert asked["halves", 1, 4] == 16


def test_groups_in_flight_reach_from_2p_to_4p() -> None:
    pr = problem("deepseek_moe", "h800_128", global_batch=1024)
    base = candidate(p=4, group=16)  # 64 micro-batches
    tried = list(DisagMoE().refinements(pr, base))
    groups = {int(c["group"]) for c in tried}
    assert min(groups) >= 8 and max(groups) == 16
    counts = {-(-64 // g) for g in groups}
    assert {4, 8} <= counts <= {4, 5, 6, 7, 8} and len(counts) == 4  # of the numbers of groups that 8 to 16 can give
    assert {(c["order"], c["compute_streams"]) for c in tried} == {
        (order, streams) for order in ("megatron", "comm_stage") for streams in (1, 2)
    }
    assert {int(c["group"]) for c in DisagMoE(group=11).refinements(pr, base)} == {11}
    layout = DisagMoE().layout(pr, candidate(group=11))
    assert layout.details["group"] == 11
    with pytest.raises(NotApplicable, match=r"group size 17 with p = 4: allowed are 8 to 16"):
        DisagMoE().program(pr, DisagMoE().layout(pr, candidate(group=17)))


@pytest.mark.parametrize("streams", [1, 2])
def test_compute_streams_are_planned_and_printed(streams: int) -> None:
    pr = problem("deepseek_moe", "h800_128", global_batch=256)
    system = DisagMoE(compute_streams=streams)
    layout = system.layout(pr, candidate())
    program = system.program(pr, layout)
    assert layout.details["compute_streams"] == streams
    assert bool((program.stream == Stream.COMPUTE_B).any()) == (streams == 2)
    assert len(program.in_flight) == (8 if streams == 2 else 0)
    assert {c["compute_streams"] for c in system.refinements(pr, candidate())} == {streams}
    verify(program)


def test_two_streams_are_the_paper_s_form_and_one_is_tried() -> None:
    pr = problem("tiny", small_cluster(nodes=2), seq=512, global_batch=64, ep=4)
    found = list(DisagMoE().candidates(pr))
    assert [c["compute_streams"] for c in found] == [2, 1, 1] * (len(found) // 3)  # the fast form twice, the lean one
    assert all(c["compute_streams"] == 2 for c in DisagMoE(compute_streams=2).candidates(pr))
    assert DisagMoE().layout(pr, candidate(p=1, m=4, n=4)).details["compute_streams"] == 2

    def best(system: DisagMoE) -> float:
        found = tune(system, pr, lambda p: simulate(p.program, price(p.layout, p.program, pr.costs)).step_s)
        assert found.step_s is not None
        return found.step_s

    assert best(DisagMoE()) == min(best(DisagMoE(compute_streams=1)), best(DisagMoE(compute_streams=2)))


@pytest.mark.parametrize(
    ("head", "workers", "printed"),
    [("last_f", (5,), "last F-group"), ("next_a", (2,), "next A-group"), ("spread", (4, 5, 6, 7), "all F-groups")],
)
def test_head_placement(head: str, workers: tuple[int, ...], printed: str) -> None:
    """94 layers on p = 4: who holds the output matrix, and that a plan of it is sound and complete."""
    pr = problem("qwen3", "h800_128", global_batch=512, transport="m2n_rdma", merge="node")
    system = DisagMoE(head=head)
    layout = system.layout(pr, candidate())
    assert layout.placement.heads == workers
    assert layout.placement.head == workers[0]
    assert layout.details["head"] == printed
    assert layout.placement.embed == 0
    program = system.program(pr, layout)
    verify(program)
    at = {int(w) for w in program.worker[program.kind == Kind.HEAD]}
    assert at == set(workers)
    price(layout, program, pr.costs)


@pytest.mark.parametrize("head", ["last_f", "next_a", "spread"])
def test_the_parameters_of_the_head_are_held_once(head: str) -> None:
    pr = problem("qwen3_30b", "h800_128")
    held = holdings(DisagMoE(head=head).layout(pr, candidate()), pr.model)
    total = sum(h.dense for h in held) + 16 * sum(h.expert for h in held)
    assert total == pytest.approx(parameters(pr.model).total, rel=1e-12)
    if head == "spread":
        assert [h.dense for h in held[4:]] == pytest.approx([head_params(pr.model) / 4] * 4)


def test_spread_head_by_hand() -> None:
    """qwen3, p = 4, M = N = 16, one sequence of 4096: 4096 tokens and a quarter of the vocabulary per F-GPU."""
    pr = problem("qwen3", "h800_128", global_batch=512, transport="m2n_rdma", merge="node")
    prices = LayoutCosts(DisagMoE(head="spread").layout(pr, candidate()), pr.costs)
    assert prices.op(Kind.HEAD, Phase.F, -1).seconds == pr.costs.head(Phase.F, 4096.0, vocab_shards=4)
    # Maximum, sum and target logit of 4096 tokens (12 bytes each) are all-reduced between four nodes.
    statistics = pr.costs.all_reduce(nbytes=4096 * 12, ranks=4, nodes=4, nic_gbs=50.0)
    assert 0.0 < statistics.seconds < 1e-3
    assert prices.op(Kind.HEAD, Phase.B, -1).seconds == (
        pr.costs.head(Phase.B, 4096.0, vocab_shards=4) + statistics.seconds
    )
    hop = prices.op(Kind.P2P, Phase.F, pr.model.layers - 1)
    assert hop.nic_bytes == 4096 * 4096 * 2  # tokens x hidden x bf16, once
    whole = LayoutCosts(DisagMoE().layout(pr, candidate()), pr.costs)
    assert whole.op(Kind.HEAD, Phase.F, -1).seconds > 3.9 * prices.op(Kind.HEAD, Phase.F, -1).seconds


def test_a_spread_head_takes_the_straggler_away() -> None:
    """The head is worth two to four layers of 94, on one of four groups."""
    pr = problem("qwen3", "h800_128", global_batch=2048, transport="m2n_rdma", merge="node")
    step = {}
    for head in ("last_f", "next_a", "spread"):
        system = DisagMoE(head=head)
        layout = system.layout(pr, candidate(micro_batch=4, group=16))
        program = system.program(pr, layout)
        step[head] = simulate(program, price(layout, program, pr.costs)).step_s
    assert step["spread"] < step["next_a"] < step["last_f"]
    assert step["spread"] < 0.95 * step["last_f"]


def test_next_a_combines_on_the_way_to_the_head() -> None:
    """The combine after the last layer is priced like any other, and there is no reduction inside the F-group."""
    pr = problem("qwen3", "h800_128", global_batch=512, transport="m2n_rdma", merge="node")
    system = DisagMoE(head="next_a")
    layout = system.layout(pr, candidate())
    prices = LayoutCosts(layout, pr.costs)
    assert prices.op(Kind.COMBINE, Phase.F, 93) == prices.op(Kind.COMBINE, Phase.F, 0)
    assert not (system.program(pr, layout).stream == Stream.COLL).any()
    assert prices.op(Kind.HEAD, Phase.F, -1).seconds == pr.costs.head(Phase.F, 4096.0)


def test_merge_reaches_the_prices_and_the_plan() -> None:
    """16 F-GPUs on two nodes, top-8 of 128: 8 copies, one per rank hit, or one per node hit cross a NIC."""
    from math import comb

    def hit(units: int) -> float:
        return units * (1 - comb(128 - 128 // units, 8) / comb(128, 8))

    rows = {"none": 8.0, "rank": hit(16), "node": hit(2)}
    for merge, copies in rows.items():
        pr = problem("qwen3", "h800_128", transport="m2n_rdma", merge=merge)
        layout = DisagMoE().layout(pr, candidate())
        assert (layout.merge, layout.details["merge"]) == (merge, merge)
        prices = LayoutCosts(layout, pr.costs)
        for kind, phase in ((Kind.DISPATCH, Phase.F), (Kind.COMBINE, Phase.F), (Kind.DISPATCH, Phase.B)):
            assert prices.op(kind, phase, 5).nic_bytes == pytest.approx(4096 * 4096 * 2 * copies, rel=1e-12)


def test_replicas_of_the_ring() -> None:
    """dp = 2: half the micro-batches, gradients of attention over 2 M and of experts over 2 ranks, 64 GPUs used."""
    pr = problem("qwen3", "h800_128", global_batch=512, transport="m2n_rdma", merge="node")
    one, two = (DisagMoE().layout(pr, candidate(p=2, dp=dp, group=8)) for dp in (1, 2))
    assert (one.batch.microbatches, two.batch.microbatches) == (32, 16)
    assert (one.placement.gpus_used, two.placement.gpus_used) == (64, 128)
    assert (one.details["dp"], two.details["dp"]) == (1, 2)
    held = [holdings(layout, pr.model) for layout in (one, two)]
    assert [(h[0].dense_ranks, h[2].expert_ranks) for h in held] == [(16, 1), (32, 2)]
    alone, shared = (LayoutCosts(layout, pr.costs) for layout in (one, two))
    f_worker = 2
    assert alone.worker_op(Kind.GRAD_SYNC, Phase.B, 0, f_worker).seconds == 0.0
    assert shared.worker_op(Kind.GRAD_SYNC, Phase.B, 0, f_worker).seconds > 0.0
    assert shared.worker_op(Kind.OPTIM, Phase.F, -1, 0).seconds < alone.worker_op(Kind.OPTIM, Phase.F, -1, 0).seconds
    # One replica runs the Program; both are alike.
    assert DisagMoE().program(pr, two).n_workers == 4


def test_on_one_node_nothing_crosses_a_nic() -> None:
    clusters = [(small_cluster(nodes=1), "h800"), (load_cluster("laptop"), "laptop")]
    for cluster, name in clusters:
        pr = problem("tiny", cluster, seq=512, global_batch=32, ep=2, transport="m2n_rdma", merge="node")
        for head in ("last_f", "next_a", "spread"):
            plan = tuned_plan(pr, DisagMoE(head=head))
            verify(plan.program)
            assert plan.layout.details["nics"] == "shared_nodes", name
            pricing = price(plan.layout, plan.program, pr.costs)
            assert (pricing.link[np.isin(plan.program.kind, EXCHANGE)] == 1).all()
            assert (pricing.wire_bytes == 0.0).all()  # gradients stay inside the node as well


def test_shared_nodes_on_a_cluster() -> None:
    """EP 16 on four nodes: a quarter of the dispatch stays on the node; the combine goes on to other nodes."""
    pr = problem("qwen3", "h800_128", global_batch=512, transport="m2n_rdma", merge="none")
    system = DisagMoE(nics="shared_nodes")
    layout = system.layout(pr, candidate(nics="shared_nodes", stage_nodes=4))
    assert layout.details["nodes_per_stage"] == 4
    prices = LayoutCosts(layout, pr.costs)
    rows = 4096 * 4096 * 2 * 8
    assert prices.op(Kind.DISPATCH, Phase.F, 0).nic_bytes == pytest.approx(0.75 * rows)
    assert prices.op(Kind.DISPATCH, Phase.B, 0).nic_bytes == pytest.approx(0.75 * rows)
    assert prices.op(Kind.COMBINE, Phase.F, 0).nic_bytes == pytest.approx(rows)
    # With one stage the next layer's attention is on the same nodes too.
    single = LayoutCosts(system.layout(pr, candidate(nics="shared_nodes", stage_nodes=4, p=1, group=4)), pr.costs)
    assert single.op(Kind.COMBINE, Phase.F, 0).nic_bytes == pytest.approx(0.75 * rows)
    verify(system.program(pr, layout))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "first_a"}, r"disagmoe head='first_a': allowed are last_f, next_a, spread"),
        ({"compute_streams": 3}, r"disagmoe compute_streams=3: allowed are 2, 1"),
        ({"nics": "all"}, r"disagmoe nics='all': allowed are halves, own, shared_nodes"),
        ({"order": "x"}, r"disagmoe order='x': allowed are"),
        ({"p": 0}, r"disagmoe p=0: must be at least 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DisagMoE(**options)  # type: ignore[arg-type]


def test_more_groups_than_layers_are_refused() -> None:
    with pytest.raises(NotApplicable, match="p=5 groups of each pool: at most one per layer, 4 here"):
        list(DisagMoE(p=5, n=1).candidates(problem("tiny", ep=1)))


def test_sizes_without_a_place_are_named() -> None:
    """Half of 32 GPUs is 16: 20 attention GPUs fit no half, but fit where pools take whole nodes."""
    small = problem("deepseek_moe", "h800_32", global_batch=1024)
    with pytest.raises(NotApplicable, match=r"^p=1, m=20, n=12, nics=halves: no place in 32 GPUs in 4 nodes$"):
        list(DisagMoE(p=1, m=20, n=12, nics="halves").candidates(small))
    assert list(DisagMoE(p=1, m=20, n=12).candidates(small))
