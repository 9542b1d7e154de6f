"""The numbers of an option are those the plan is priced with."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from disagmoe.allocator.options import Option, options, pricer
from disagmoe.allocator.shapes import Shape, Sizes, shapes
from disagmoe.allocator.static_memory import static_memory_of
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Kind, Phase
from disagmoe.plan.memory import static_memory
from disagmoe.plan.plan import Layout, Worker
from disagmoe.plan.pricing import LayoutCosts, price
from disagmoe.simulator import simulate
from disagmoe.system import NotApplicable, Problem
from disagmoe.systems import DisagMoE
from tests.problems import problem, small_cluster

LEVELS = ((50.0, 100.0), (50.0, 80.0))


def on(
    model: str, *, seq: int = 4096, batch: int = 128, skew: float = 1.0, ep: int | None = 16, nodes: int = 16
) -> Problem:
    return problem(
        model,
        small_cluster(nodes=nodes),
        seq=seq,
        global_batch=batch,
        skew=skew,
        ep=ep,
        transport="m2n_rdma",
        merge="node",
    )


def priced(pr: Problem, shape: Shape) -> Option:
    return options(pr, LEVELS, [shape])[0]


def plain_candidate(shape: Shape) -> dict[str, str | int | float]:
    return {
        "nics": "halves", "p": shape.p, "dp": shape.dp, "m": shape.m, "n": shape.n, "stage_nodes": 0,
        "micro_batch": shape.micro_batch, "order": "megatron", "group": 2 * shape.p, "compute_streams": 1,
    }  # fmt: skip


def planned(pr: Problem, shape: Shape) -> Layout:
    return DisagMoE().layout(pr, plain_candidate(shape))


def faster(layout: Layout) -> tuple[Worker, ...]:
    """The workers with the fastest NICs of LEVELS, a group on as few nodes as hold it."""
    return tuple(
        replace(w, nic_gbs=LEVELS[w.pool == "F"][-1], nodes=ceil(w.gpus / 8)) for w in layout.placement.workers
    )


CASES = [
    ("deepseek_moe", 1.0, Shape(2, 2, 16, 16, 2)),
    ("deepseek_moe_16b", 1.0, Shape(3, 1, 16, 8, 1)),  # a dense first layer, layers that do not divide
    ("gpt_oss", 1.5, Shape(4, 1, 16, 16, 1)),  # windows, skewed routing
    ("qwen3", 1.0, Shape(4, 1, 10, 16, 4)),  # 128 experts on 10 GPUs
]


@pytest.mark.parametrize(("model", "skew", "shape"), CASES)
def test_times_are_those_of_the_plan(model: str, skew: float, shape: Shape) -> None:
    pr = on(model, skew=skew)
    layout = planned(pr, shape)
    prices = LayoutCosts(layout, pr.costs)
    both = (Phase.F, Phase.B)

    def op(kind: Kind, layer: int) -> float:
        return sum(prices.op(kind, phase, layer).seconds for phase in both)

    count = ceil(128 / (shape.micro_batch * shape.dp * shape.m))
    groups = [range(g, pr.model.layers, shape.p) for g in range(shape.p)]
    attention = [sum(op(Kind.ATTN, layer) for layer in group) for group in groups]
    attention[0] += op(Kind.EMBED, -1)
    experts = [sum(op(Kind.FFN, layer) for layer in group) for group in groups]
    experts[(pr.model.layers - 1) % shape.p] += op(Kind.HEAD, -1)
    # A group waits until a micro-batch has been through the groups before it, and for its gradient to go back through
    # them; NICs are the fastest there are.
    fast = replace(layout, placement=replace(layout.placement, workers=faster(layout)))
    moved = [2 * LayoutCosts(fast, pr.costs).op(Kind.DISPATCH, Phase.F, layer).seconds for layer in range(shape.p)]
    stages = [(op(Kind.ATTN, layer), op(Kind.FFN, layer)) for layer in range(shape.p)]
    before_a = [sum(a + f + 2 * t for (a, f), t in zip(stages[:g], moved[:g], strict=True)) for g in range(shape.p)]
    before_f = [before_a[g] + stages[g][0] + moved[g] for g in range(shape.p)]
    expected = (
        max(wait + count * work for wait, work in zip(before_a, attention, strict=True)),
        max(wait + count * work for wait, work in zip(before_f, experts, strict=True)),
    )
    assert priced(pr, shape).compute_s == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("model", "skew", "shape"), [CASES[0], CASES[2]])
def test_transfers_are_those_of_the_plan(model: str, skew: float, shape: Shape) -> None:
    # Both pools at 50 GB/s: a transfer takes what the slower end takes.
    pr = on(model, skew=skew)
    layout = planned(pr, shape)
    assert [w.nic_gbs for w in layout.placement.workers] == [50.0] * (2 * shape.p)
    prices = LayoutCosts(layout, pr.costs)
    layers = range(0, pr.model.layers, shape.p)
    # To the experts: dispatch forward, combine backward (the last layer's combine never leaves its pool).
    sends = sum(prices.op(Kind.DISPATCH, Phase.F, layer).seconds * 2 for layer in layers)
    count = ceil(128 / (shape.micro_batch * shape.dp * shape.m))
    network = priced(pr, shape).network_s
    assert max(network[0][0], network[1][0]) == pytest.approx(count * sends)
    # Faster NICs never slow a transfer down.
    assert network[0][1] <= network[0][0]
    assert network[1][1] <= network[1][0]


@pytest.mark.parametrize(("model", "skew", "shape"), CASES)
def test_memory_is_that_of_the_plan(model: str, skew: float, shape: Shape) -> None:
    pr = on(model, skew=skew)
    held = [
        part.weights_gib + part.gradients_gib + part.optimizer_gib
        for part in static_memory(planned(pr, shape), pr.model)
    ]
    assert static_memory_of(pr)(shape) == pytest.approx((max(held[: shape.p]), max(held[shape.p :])))


@pytest.mark.parametrize(("model", "seq", "batch"), [("deepseek_moe", 4096, 64), ("gpt_oss_20b", 8192, 32)])
def test_no_step_is_shorter_than_an_option_says(model: str, seq: int, batch: int) -> None:
    pr = on(model, seq=seq, batch=batch, nodes=4)
    rates = (tuple(50.0 * 8 / gpus for gpus in range(8, 0, -1)),) * 2
    timed = 0
    for shape in list(shapes(pr, Sizes(p=(1, 2), dp=(1, 2), micro_batch=(1, 2))))[::3]:
        option = options(pr, rates, [shape])[0]
        for rule in ("halves", "own"):
            try:
                layout = DisagMoE().layout(pr, {**plain_candidate(shape), "nics": rule})
                program = DisagMoE().program(pr, layout)
            except NotApplicable:
                continue
            timed += 1
            step_s = simulate(program, price(layout, program, pr.costs)).step_s
            assert option.floor_s <= step_s * (1 + 1e-9), (shape, rule)
    assert timed >= 10


def test_a_straggler_slows_its_group() -> None:
    slow = problem("deepseek_moe", small_cluster(), transport="m2n_rdma", merge="node", stragglers=((0, 2.0),))
    plain = problem("deepseek_moe", small_cluster(), transport="m2n_rdma", merge="node")
    shape = Shape(1, 1, 16, 16, 1)
    assert priced(slow, shape).compute_s[0] == pytest.approx(2 * priced(plain, shape).compute_s[0])
    assert priced(slow, shape).compute_s[1] == priced(plain, shape).compute_s[1]


def test_shapes_keep_every_number_of_microbatches() -> None:
    pr = on("deepseek_moe", nodes=4)
    some, every = set(shapes(pr)), set(shapes(pr, all_m=True))
    assert some < every

    def counts(of: set[Shape]) -> set[tuple[int, ...]]:
        return {(s.p, s.dp, s.n, s.micro_batch, ceil(128 / (s.micro_batch * s.dp * s.m))) for s in of}

    assert counts(some) == counts(every)
    for shape in every:
        assert sum(shape.gpus) <= 32
        assert shape.micro_batch <= max(1, 128 // (shape.dp * shape.m))


def test_no_option_left_out_is_faster() -> None:
    pr = on("gpt_oss_20b", nodes=4)
    some, every = (options(pr, LEVELS, shapes(pr, all_m=flag)) for flag in (False, True))
    limit = pr.cluster.limit_gib
    assert min(o.floor_s for o in some if o.needed_gib <= limit) == min(
        o.floor_s for o in every if o.needed_gib <= limit
    )


def test_free_expert_sizes_change_the_experts_per_gpu() -> None:
    pr = on("deepseek_moe", ep=None, nodes=2)
    sizes = {shape.n for shape in shapes(pr)}
    # 64 experts: 64 / n rounded up is 64, 32, 22, 16, 13, 11, 10, 8, 7, 6 and 5 with up to 13 GPUs.
    assert sizes == {1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13}


def test_sizes_are_checked() -> None:
    assert {s.p for s in shapes(on("deepseek_moe"), Sizes(p=(2, 3)))} == {2, 3}
    for bad in ({"p": ()}, {"m": (0,)}):
        with pytest.raises(ValueError, match="at least one, all at least 1"):
            Sizes(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "extra",
    [
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute": "selective", "recompute_ffn": "full", "recompute_tokens": "keep"},
    ],
)
def test_what_is_recomputed_costs_what_the_plan_pays(extra: dict[str, str]) -> None:
    """A ring of one group: its work alone, as no group is before it."""
    pr, shape = on("qwen3"), Shape(1, 1, 64, 32, 1)
    layout = DisagMoE().layout(pr, {**plain_candidate(shape), **extra})
    policy = Recompute.of(layout.options)
    prices, again = LayoutCosts(layout, pr.costs), policy.repeated(disaggregated=True)

    def op(kind: Kind) -> float:
        phases = (Phase.F, Phase.B, Phase.R) if kind in again else (Phase.F, Phase.B)
        return pr.model.layers * sum(prices.op(kind, phase, 0).seconds for phase in phases)

    def end(kind: Kind) -> float:
        return sum(prices.op(kind, phase, -1).seconds for phase in (Phase.F, Phase.B))

    option = pricer(pr, LEVELS, recompute=lambda shape: policy)(shape)
    plain = priced(pr, shape)
    count = ceil(128 / 32)
    assert option.compute_s[0] == pytest.approx(count * (op(Kind.ATTN) + end(Kind.EMBED)), rel=1e-6)
    waited = plain.compute_s[1] - count * (
        end(Kind.HEAD)
        + pr.model.layers * sum(prices_of(pr, shape).op(Kind.FFN, p, 0).seconds for p in (Phase.F, Phase.B))
    )
    assert option.compute_s[1] == pytest.approx(waited + count * (op(Kind.FFN) + end(Kind.HEAD)), rel=1e-6)
    # Tokens that are sent again go the way of the forward dispatch: half as much again in this direction.
    factor = 1.5 if Kind.DISPATCH in again else 1.0
    assert option.network_s[0] == pytest.approx([factor * s for s in plain.network_s[0]], rel=1e-6)


def prices_of(pr: Problem, shape: Shape) -> LayoutCosts:
    return LayoutCosts(planned(pr, shape), pr.costs)


def test_shared_nodes_keep_their_part_of_the_dispatch_on_nvlink() -> None:
    """Groups of 16 and 16 on four nodes: a quarter of a token's experts are on its own node."""
    pr, shape = on("qwen3", seq=8192), Shape(4, 1, 16, 16, 1)
    candidate = {**plain_candidate(shape), "nics": "shared_nodes", "stage_nodes": 4}
    layout = DisagMoE().layout(pr, candidate)
    rates = {w.nic_gbs for w in layout.placement.workers}
    assert rates == {50.0}  # half of eight NICs for four GPUs
    prices = LayoutCosts(layout, pr.costs)
    layers, count = range(0, pr.model.layers, 4), ceil(128 / 16)
    sent = (prices.op(Kind.DISPATCH, Phase.F, 0), prices.op(Kind.COMBINE, Phase.B, 0))
    assert sent[0].seconds < sent[1].seconds  # the next layer's attention is on other nodes
    option = pricer(pr, LEVELS, shared=True)(shape)
    slower = max(option.network_s[0][0], option.network_s[1][0])
    assert slower == pytest.approx(count * len(layers) * sum(t.seconds for t in sent), rel=1e-6)
