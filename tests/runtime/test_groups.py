"""From a plan to ranks, nodes, process groups and the exchanges of its layers."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from disagmoe.ops import Kind, Op, Phase
from disagmoe.runtime.errors import LaunchError
from disagmoe.runtime.groups import Groups, Key, Place, RankMap, combine_target, group_specs
from disagmoe.runtime.launch import spawn
from disagmoe.runtime.wiring import Exchanges
from disagmoe.specs import load_model
from tests.runtime.layouts import ring, stages

CPU = torch.device("cpu")


def specs_of(plan, *, tied=False, node_size=None):
    ranks = RankMap(plan.layout.placement, plan.layout.ep, node_size)
    return ranks, group_specs(ranks, plan, tied=tied)


def test_ranks_of_a_ring_with_replicas():
    """p = 2, M:N = 1:2, two replicas: A0 A1 F0 F0 F1 F1, twice."""
    ranks, specs = specs_of(ring(2, 1, 2, dp=2), tied=True)
    assert ranks.world_size == 12
    assert [ranks.place(r) for r in (0, 1, 3, 5, 11)] == [
        Place(0, 0, 0), Place(0, 1, 0), Place(0, 2, 1), Place(0, 3, 1), Place(1, 3, 1),
    ]  # fmt: skip
    assert ranks.ranks(2, 1) == (8, 9)
    assert specs[Key("worker", 2, replica=1)] == (8, 9)
    assert specs[Key("dense", 0)] == (0, 6) and specs[Key("dense", 2)] == (2, 3, 8, 9)
    assert specs[Key("expert", 2, block=1)] == (3, 9)
    assert specs[Key("norm", 0, 2)] == (0, 2, 3, 6, 8, 9)
    assert specs[Key("tied")] == (0, 4, 5, 6, 10, 11)
    # A0 -> F0 -> A1 -> F1; after the last layer F1 answers to itself.
    for purpose, a, b, members in (
        ("dispatch", 0, 2, (0, 2, 3)), ("combine", 2, 1, (1, 2, 3)),
        ("dispatch", 1, 3, (1, 4, 5)), ("combine", 3, 3, (4, 5)),
    ):  # fmt: skip
        assert specs[Key(purpose, a, b, 0, 0)] == specs[Key(f"{purpose}_back", a, b, 0, 0)] == members
        assert specs[Key(purpose, a, b, 1, 0)] == tuple(r + 6 for r in members)
    assert not [key for key in specs if key.purpose.startswith("p2p")]


def test_every_rank_lists_the_same_groups_in_the_same_order():
    for plan in (ring(2, 2, 1, dp=2), ring(3, 1, 2, layers=4, head="spread"), stages(2, 4, 2, mirror=True)):
        assert list(specs_of(plan)[1].items()) == list(specs_of(plan)[1].items())
        ranks, specs = specs_of(plan)
        for members in specs.values():
            assert list(members) == sorted(set(members)) and members[-1] < ranks.world_size


def test_heads():
    spread = ring(2, 1, 2, head="spread")
    _, specs = specs_of(spread)
    assert combine_target(spread.layout.placement, 1) == 3
    # Rows go on from F1 to F0; ranks of the same number share a softmax.
    assert specs[Key("head", replica=0, block=0)] == (2, 4) and specs[Key("head", replica=0, block=1)] == (3, 5)
    assert specs[Key("p2p", 3, 2, 0, 1)] == specs[Key("p2p_back", 3, 2, 0, 1)] == (3, 5)
    assert combine_target(ring(2, 1, 1, head="next_a").layout.placement, 1) == 0


def test_colocated_stages_with_expert_groups_inside_and_mirrors():
    ranks, specs = specs_of(stages(2, 4, 2, mirror=True))
    assert specs[Key("dense", 0)] == tuple(range(8)) and Key("dense", 1) not in specs
    assert specs[Key("expert", 0, block=1)] == (1, 3, 5, 7)
    assert [specs[Key("dispatch", 1, 1, 0, block)] for block in (0, 1)] == [(4, 5), (6, 7)]
    assert specs[Key("p2p", 0, 1, 0, 2)] == (2, 6)
    assert not [key for key in specs if key.purpose == "norm"]
    assert ranks.place(6) == Place(0, 1, 2)


def test_nodes_follow_from_the_plan_or_the_machine():
    assert list(RankMap(ring(1, 4, 2, nodes=2).layout.placement, 2).nodes.values()) == [0, 0, 1, 1, 2, 3]
    assert list(RankMap(ring(1, 4, 2, nodes=2).layout.placement, 2, 3).nodes.values()) == [0, 0, 0, 1, 1, 1]
    # Workers that name the same nodes share them.
    placement = ring(1, 2, 2, nodes=2).layout.placement
    shared = replace(placement, workers=tuple(replace(w, node_ids=(5, 7)) for w in placement.workers), replicas=2)
    assert list(RankMap(shared, 2).nodes.values()) == [0, 1, 0, 1, 2, 3, 2, 3]


def test_what_does_not_fit_is_one_clear_line():
    with pytest.raises(LaunchError, match=r"5 processes were started, the plan needs 6: 2 x \(A0 1 \+ F0 2\)"):
        RankMap(ring(1, 1, 2, dp=2).layout.placement, 2).check_world(5)
    with pytest.raises(LaunchError, match="S0 has 4 ranks, which ep 3 does not divide"):
        RankMap(stages(1, 4, 2).layout.placement, 3)
    with pytest.raises(LaunchError, match="node_size 0"):
        RankMap(stages(1, 4, 2).layout.placement, 2, 0)


def reductions(context, plan, tied):
    """Sums of (rank + 1) over every reduction group of a rank."""
    groups = Groups.create(plan, device=CPU, timeout_s=10.0, tied=tied)
    placement, found = plan.layout.placement, {}
    pairs = sorted({*zip(placement.attn, placement.ffn, strict=True)})
    wanted = [("worker",), ("dense",)]
    wanted += [("norm", a, f) for a, f in pairs if groups.me.worker in (a, f) and a != f]
    wanted += [("expert",)] if groups.me.worker in placement.ffn else []
    wanted += [("tied",)] if tied and groups.me.worker in (placement.embed, *placement.heads) else []
    for key in wanted:
        value = torch.tensor([context.rank + 1])
        if (group := groups.reduction(*key)) is not None:
            dist.all_reduce(value, group=group)
        found[key] = int(value)
    with pytest.raises(KeyError):
        groups.reduction("nothing")
    groups.destroy()
    return found


def test_groups_reduce_over_the_right_ranks_five_times_in_a_row(pools):
    plan = ring(1, 1, 1, dp=2, layers=1)
    for _ in range(5):
        found = pools(4).run(reductions, plan, True)
        # A: ranks 0 and 2, F: 1 and 3 (values 1, 3 and 2, 4); the head is on F.
        a = {("worker",): 1, ("dense",): 4, ("norm", 0, 1): 10, ("tied",): 10}
        f = {("worker",): 2, ("dense",): 6, ("norm", 0, 1): 10, ("expert",): 6, ("tied",): 10}
        assert found == [a, f, a | {("worker",): 3}, f | {("worker",): 4}]
    found = pools(4).run(reductions, stages(2, 2, 1, mirror=True), False)
    assert [f["dense",] for f in found] == [10] * 4 and [f["expert",] for f in found] == [10] * 4
    found = pools(4).run(reductions, stages(2, 2, 2, mirror=True), False)
    assert [f["expert",] for f in found] == [4, 6, 4, 6]


def test_a_world_that_does_not_fit_ends_every_rank():
    with pytest.raises(Exception, match=r"failed: LaunchError: 3 processes were started, the plan needs 4"):
        spawn(3, reductions, (ring(1, 2, 2), False))


def walk(context, plan, head):
    """Rows pass all layers of a ring and come back; every expert is the identity with gate weights that sum to 1.

    A layer doubles every row then (its own and the experts'); the output gradient comes back multiplied alike.
    """
    model = replace(load_model("tiny"), hidden=4, experts=4, top_k=2, layers=2)
    groups = Groups.create(plan, device=CPU, timeout_s=10.0)
    exchanges = Exchanges(groups, model, transport="pairs", merge="node", dtype=torch.float64)
    placement, me, tokens = plan.layout.placement, groups.me, 6
    total = tokens * placement.workers[0].gpus
    everything = torch.arange(total * 4.0, dtype=torch.float64).view(total, 4)
    ids = torch.stack((torch.arange(total) % 4, (torch.arange(total) + 1) % 4), 1)
    weights = torch.tensor([[0.25, 0.75]], dtype=torch.float64).expand(total, 2)
    y, kept = None, {}

    def op(kind, layer, phase=Phase.F):
        return Op(kind, phase, layer, 0)

    for layer in range(2):
        if me.worker in (placement.attn[layer], placement.ffn[layer]):
            exchange, blocks = exchanges.dispatch(layer), exchanges.before(layer, tokens)
            mine = blocks.range_of(context.rank)
            given = {}
            if me.worker == placement.attn[layer]:
                cut = slice(mine.start, mine.stop)
                given = {"x": everything[cut] if layer == 0 else y, "ids": ids[cut], "weights": weights[cut]}
            kept["dispatch", layer] = exchange.dispatch(op(Kind.DISPATCH, layer), blocks, **given)
        target = combine_target(placement, layer)
        if me.worker in (placement.ffn[layer], target):
            exchange, blocks = exchanges.combine(layer), exchanges.after(layer, tokens)
            route, arrived = (
                kept.get(("dispatch", layer), (None, None)) if me.worker == placement.ffn[layer] else (None, None)
            )
            made = None
            if arrived is not None:
                made = arrived.rows * arrived.weights.sum(1, keepdim=True)
                made[arrived.home] += arrived.rows[arrived.home]
            kept["combine", layer], y = exchange.combine(op(Kind.COMBINE, layer), blocks, route, made)
    result = None
    if me.worker == combine_target(placement, 1):
        mine = exchanges.after(1, tokens).range_of(context.rank)
        result = bool(torch.allclose(y, 4 * everything[mine.start : mine.stop]))
    grad = y
    for layer in (1, 0):
        if ("combine", layer) in kept:
            grad = exchanges.combine(layer).combine_backward(
                op(Kind.COMBINE, layer, Phase.B), kept["combine", layer], grad
            )
        if ("dispatch", layer) in kept:
            route, arrived = kept["dispatch", layer]
            rows_grad = None
            if arrived is not None:
                rows_grad = grad * arrived.weights.sum(1, keepdim=True)
                rows_grad[arrived.home] += grad[arrived.home]
            back = exchanges.dispatch(layer).dispatch_backward(op(Kind.DISPATCH, layer, Phase.B), route, rows_grad)
            grad = None if back is None else back[0]
    if me.worker == placement.attn[0]:
        mine = exchanges.before(0, tokens).range_of(context.rank)
        result = bool(torch.allclose(grad, 16 * everything[mine.start : mine.stop]))
    groups.destroy()
    return result


@pytest.mark.parametrize(
    ("p", "m", "n", "head"), [(2, 1, 1, "last_f"), (1, 1, 3, "last_f"), (1, 3, 1, "next_a"), (2, 1, 1, "next_a")]
)
def test_rows_walk_the_ring_and_back(pools, p, m, n, head):
    results = pools(4).run(walk, ring(p, m, n, head=head, nodes=2), head)
    assert True in results and False not in results


def pass_on(context, plan):
    """Rows to the next stage, gradients back."""
    groups = Groups.create(plan, device=CPU, timeout_s=10.0)
    model = replace(load_model("tiny"), hidden=3)
    exchanges = Exchanges(groups, model, transport="pairs", merge="rank", dtype=torch.float32)
    relay, op = exchanges.relay(0, 1), Op(Kind.P2P, Phase.F, 0, 0)
    back = op._replace(phase=Phase.B)
    rows = torch.full((5, 3), float(context.rank + 1))
    if groups.me.worker == 0:
        relay.send(op, rows)
        got = relay.receive(back, 5, back=True)
    else:
        got = relay.receive(op, 5)
        relay.send(back, rows, back=True)
    relay_bytes = exchanges.ledger.total()
    groups.destroy()
    return got.unique().tolist(), relay_bytes.payload, relay_bytes.metadata_inter + relay_bytes.metadata_intra


def test_stage_transfers(pools):
    """Rank i of a stage to rank i of the next: 0 and 2, 1 and 3; 5 rows of 3 fp32 values and no metadata."""
    assert pools(4).run(pass_on, stages(2, 2, 2)) == [([v], 60, 0) for v in (3.0, 4.0, 1.0, 2.0)]
