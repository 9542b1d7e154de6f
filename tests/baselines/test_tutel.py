"""Tutel: capacity, dropped tokens, degrees, all-to-all algorithms, rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.megatron import Megatron1F1B
from baselines.tutel import DEGREES, Tutel, capacity, dropped_share
from disagmoe.cost.calibration import Contention, load_calibration
from disagmoe.cost.model import CostModel
from disagmoe.ops import Kind, Phase
from disagmoe.plan.bounds import layer_s, lower_bound_s
from disagmoe.plan.plan import Layout
from disagmoe.plan.pricing import LayoutCosts, price
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.system import NotApplicable, Problem, System, variants_of
from tests.problems import problem, small_cluster

PIPELINE = {"ep": 16, "pp": 2, "virtual": 2, "micro_batch": 1, "group": 2}


def undisturbed(pr: Problem) -> Problem:
    """The same problem where nothing slows anything down."""
    ideal = {name: Contention(1.0, 1.0) for name in ("nccl", "deepep", "m2n_rdma")}
    calibration = load_calibration(pr.cluster.calibration).with_contention(ideal)
    return replace(pr, costs=CostModel(pr.model, pr.cluster, calibration, pr.workload))


def layout_of(system: Tutel, pr: Problem, **more: str | int) -> Layout:
    return system.layout(pr, {**PIPELINE, "degree": 2, **more})


def step_s(system: System, pr: Problem, layout: Layout) -> float:
    program = system.program(pr, layout)
    verify(program)
    return simulate(program, price(layout, program, pr.costs)).step_s


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "factor", "skew", "degree", "rows"),
    [
        (4096, 128, 8, 1.0, 1.0, 1, 256),  # k int(1 x 32)
        (4096, 128, 8, 1.25, 1.0, 1, 320),
        (4096, 60, 4, 1.0, 1.0, 1, 276),  # ceil(4096 / 60) = 69
        (4096, 60, 4, 1.0, 1.0, 8, 280),  # rounded up to a multiple of the degree
        (4096, 60, 4, 1.1, 1.0, 1, 300),  # int(75.9) = 75 slots of each of the four choices
        (4096, 128, 8, 0.0, 1.3, 4, 336),  # dropless: the fullest expert, 332.8 rows
        (4096, 128, 8, -1.0, 1.3, 4, 256),  # dropless up to a capacity factor of 1
        (4096, 128, 8, -2.0, 1.3, 4, 336),
    ],
)
def test_capacity(tokens: int, experts: int, top_k: int, factor: float, skew: float, degree: int, rows: int) -> None:
    """k int(cf ceil(T / E)) or the fullest expert, in whole chunks (tutel/impls/fast_dispatch.py)."""
    assert capacity(tokens, experts, top_k, factor, skew, degree) == rows


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tutel capacity_factor=0.01 leaves no row per expert for 64 tokens of 8"):
        capacity(64, 8, 2, 0.01, 1.0, 1)


def test_dropped_tokens_are_counted() -> None:
    """Skew 1.5 over 16 ranks at capacity 1: the hot rank loses half a mean load, 1/32 of all."""
    assert dropped_share(1.0, 1.5, 16) == pytest.approx(0.5 / 16)
    # A capacity below the mean: the others (14.5 / 15 of the mean each) lose too.
    assert dropped_share(0.9, 1.5, 16) == pytest.approx((0.6 + 15 * (14.5 / 15 - 0.9)) / 16)
    assert dropped_share(0.5, 1.0, 1) == 0.5
    pr = problem("qwen3_30b", skew=1.5, global_batch=128)
    layout = layout_of(Tutel(capacity_factor=1.0), pr)
    assert layout.tokens_dropped == 128 * 4096 // 32
    assert layout.details["capacity"] == 256
    assert layout_of(Tutel(capacity_factor=1.5), pr).tokens_dropped == 0


@given(st.floats(1.0, 4.0), st.sampled_from(DEGREES))
def test_dropless_drops_nothing(skew: float, degree: int) -> None:
    rows = capacity(4096, 128, 8, 0.0, skew, degree)
    load = rows * 128 / (4096 * 8)
    assert load >= skew - 1e-9
    assert dropped_share(load, skew, 16) == pytest.approx(0.0, abs=1e-9)


def test_padding_moves_and_computes_the_capacity() -> None:
    """Dropless under skew: every rank sends and computes the fullest rank's load; Megatron sends the mean."""
    even, skewed = (problem("qwen3_30b", skew=skew) for skew in (1.0, 2.0))
    tutel = [LayoutCosts(layout_of(Tutel(), pr), pr.costs) for pr in (even, skewed)]
    plain = [LayoutCosts(Megatron1F1B().layout(pr, PIPELINE), pr.costs) for pr in (even, skewed)]
    sent = [costs.op(Kind.DISPATCH, Phase.F, 1).nic_bytes for costs in (*tutel, *plain)]
    assert sent[1] == pytest.approx(2 * sent[0])
    assert sent[3] == sent[2] == pytest.approx(2 * sent[0])  # one chunk instead of two
    # A fixed capacity caps both, and a smaller one thins them out.
    for factor, load in ((1.0, 1.0), (0.5, 0.5)):
        costs = LayoutCosts(layout_of(Tutel(capacity_factor=factor), skewed), skewed.costs)
        assert costs.op(Kind.DISPATCH, Phase.F, 1).nic_bytes == pytest.approx(load * sent[0])
        assert costs.imbalance == pytest.approx(load)


def test_without_overlap_and_skew_it_is_megatron() -> None:
    pr = problem("qwen3_30b", global_batch=64)
    steps = [step_s(s, pr, s.layout(pr, {**PIPELINE, "degree": 1})) for s in (Tutel(degree=1), Megatron1F1B())]
    assert steps[0] == pytest.approx(steps[1], rel=1e-12)


@pytest.mark.parametrize("degree", DEGREES)
def test_closed_form_of_every_degree(degree: int) -> None:
    """T = max(d(D+C), D+E+dC, D+dE+C, dD+E+C) of whole plans, without contention and in one stage."""
    pr = undisturbed(problem("qwen3_30b", global_batch=64))
    layout = Tutel().layout(pr, {**PIPELINE, "pp": 1, "virtual": 1, "group": 1, "degree": degree})
    costs = LayoutCosts(layout, pr.costs)
    chain = 0.0
    for phase, kinds in ((Phase.F, (Kind.DISPATCH, Kind.COMBINE)), (Phase.B, (Kind.COMBINE, Kind.DISPATCH))):
        first, second = (costs.op(kind, phase, 0).seconds for kind in kinds)
        e, d = costs.op(Kind.FFN, phase, 0).seconds, degree
        block = max(d * (first + second), first + e + d * second, first + d * e + second, d * first + e + second)
        attention = costs.op(Kind.ATTN, phase, 0).seconds
        assert layer_s(costs, 0, phase) == pytest.approx(attention + block, rel=1e-12)
        ends = costs.op(Kind.EMBED, phase, -1).seconds + costs.op(Kind.HEAD, phase, -1).seconds
        chain += 48 * (attention + block) + ends
    program = Tutel().program(pr, layout)
    pricing = price(layout, program, pr.costs)
    reduced = (program.kind == int(Kind.GRAD_SYNC)) & (program.phase == int(Phase.B))
    pricing = replace(pricing, duration_s=np.where(reduced, 0.0, pricing.duration_s))
    update = sum(costs.worker_op(*key, -1, 0).seconds for key in ((Kind.OPTIM, Phase.F), (Kind.GRAD_SYNC, Phase.F)))
    microbatches = layout.batch.microbatches
    step = simulate(program, pricing).step_s
    assert step == pytest.approx(microbatches * chain + update, rel=1e-9)
    assert lower_bound_s(layout, pr.costs) == pytest.approx(step, rel=1e-9)


@given(st.sampled_from(DEGREES), st.sampled_from([1, 2]), st.integers(1, 2), st.floats(1.0, 2.0), st.booleans())
@settings(max_examples=20, deadline=None)
def test_bounds_hold(degree: int, pp: int, virtual: int, skew: float, two_level: bool) -> None:
    pr = problem("tiny", small_cluster(nodes=4), ep=16, skew=skew)
    candidate = {**PIPELINE, "pp": pp, "virtual": virtual if pp > 1 else 1, "group": pp, "degree": degree}
    layout = Tutel().layout(pr, {**candidate, "algorithm": "2dh" if two_level else "linear"})
    assert lower_bound_s(layout, pr.costs) <= step_s(Tutel(), pr, layout) * (1 + 1e-12)


def test_rows_at_degree_one_and_at_the_best() -> None:
    forms = variants_of(Tutel(capacity_factor=1.0), "native")
    assert [(f.label, f.system.degree, f.system.capacity_factor) for f in forms] == [  # type: ignore[attr-defined]
        ("degree 1", 1, 1.0),
        ("best degree", None, 1.0),
    ]
    assert [f.label for f in variants_of(Tutel(degree=4), "uniform")] == ["degree 4"]


def test_degrees_and_algorithms_are_checked_and_refined() -> None:
    with pytest.raises(ValueError, match="tutel degree=3: allowed are 1, 2, 4, 8"):
        Tutel(degree=3)
    with pytest.raises(ValueError, match="tutel algorithm=ring: allowed are linear, 2dh"):
        Tutel(algorithm="ring")
    pr = problem("tiny", ep=8)
    first = next(iter(Tutel().candidates(pr)))
    refined = [(c["degree"], c["algorithm"]) for c in Tutel().refinements(pr, first)]
    assert refined == [(d, a) for d in (1, 2, 4, 8) for a in ("linear", "2dh")]
    fixed = Tutel(degree=1, algorithm="linear").refinements(pr, first)
    assert [(c["degree"], c["algorithm"]) for c in fixed] == [(1, "linear")]


def test_two_levels_cost_more_for_two_nodes_and_cannot_merge() -> None:
    pr = problem("qwen3_30b", global_batch=64)
    steps = [step_s(Tutel(), pr, layout_of(Tutel(), pr, algorithm=a)) for a in ("linear", "2dh")]
    assert steps[0] < steps[1]
    merged = problem("qwen3_30b", transport="deepep", merge="node")
    with pytest.raises(NotApplicable, match=r"2DH moves every copy of a token and cannot merge them \(merge=node\)"):
        layout_of(Tutel(), merged, algorithm="2dh")
