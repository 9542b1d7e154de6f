"""The numbers of an option are those the plan is priced with."""

from __future__ import annotations

from math import ceil

import pytest

from disagmoe.allocator.options import Option, Shape, Sizes, options, shapes, static_memory_of
from disagmoe.ops import Kind, Phase
from disagmoe.plan.memory import static_memory
from disagmoe.plan.plan import Layout
from disagmoe.plan.pricing import LayoutCosts
from disagmoe.system import Problem
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


def planned(pr: Problem, shape: Shape) -> Layout:
    candidate = {
        "nics": "halves", "p": shape.p, "dp": shape.dp, "m": shape.m, "n": shape.n, "stage_nodes": 0,
        "micro_batch": shape.micro_batch, "order": "megatron", "group": 2 * shape.p, "compute_streams": 1,
    }  # fmt: skip
    return DisagMoE().layout(pr, candidate)


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
    option = priced(pr, shape)
    assert option.compute_s == pytest.approx((count * max(attention), count * max(experts)))


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


def test_fill_is_one_trip_around_the_ring() -> None:
    pr = on("deepseek_moe", nodes=4)
    shape = Shape(1, 1, 16, 16, 1)
    prices = LayoutCosts(planned(pr, shape), pr.costs)
    one = [
        sum(prices.op(kind, phase, 0).seconds for phase in (Phase.F, Phase.B))
        for kind in (Kind.ATTN, Kind.FFN, Kind.DISPATCH, Kind.COMBINE)
    ]
    assert priced(pr, shape).fill_s == pytest.approx(sum(one) - max(one[:2]))
    assert priced(pr, Shape(2, 1, 16, 16, 1)).fill_s == pytest.approx(2 * sum(one) - max(one[:2]))


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
