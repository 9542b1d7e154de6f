"""The search around a seed: what it tries, in which order, and that it never loses."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.allocator.local_search import Axis, Found, Point, Space, Value, local_search
from disagmoe.allocator.milp import allocate
from disagmoe.allocator.ring import ring_candidates, ring_space, sizes_of
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.pricing import price
from disagmoe.plan.program import Program
from disagmoe.simulator import simulate
from disagmoe.system import Candidate, NotApplicable, Problem
from disagmoe.systems import DisagMoE
from tests.problems import problem, small_cluster


@dataclass(frozen=True)
class Grid:
    """A system whose layouts carry their candidate; x = 13 cannot be placed."""

    name: str = "grid"
    native_transport: str = "nccl"

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        return ()

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        if candidate["x"] == 13:
            raise NotApplicable("thirteen is not placed")
        return replace(some_plan().layout, options=dict(candidate))

    def program(self, problem: Problem, layout: Layout) -> Program:
        return some_plan().program


def ring_seed() -> dict[str, Value]:
    return {
        "nics": "halves", "p": 1, "dp": 1, "m": 2, "n": 2, "stage_nodes": 0,
        "micro_batch": 1, "order": "megatron", "group": 4, "compute_streams": 1,
    }  # fmt: skip


PROBLEM = problem("tiny", small_cluster(nodes=2, gpus=2, nics=2), seq=128, global_batch=8, ep=2)


@cache
def some_plan() -> Plan:
    layout = DisagMoE().layout(PROBLEM, ring_seed())
    return Plan(layout, DisagMoE().program(PROBLEM, layout))


AXES = (Axis("x", tuple(range(8))), Axis("y", (1, 2, 4, 8)), Axis("rule", ("a", "b", "c"), ordered=False))


def grid(seed: Point) -> Space:
    return Space(AXES, seed, lambda point: dict(point))


def search(heights: Mapping[Point, float], start: Point, **how: object) -> Found:
    """Search a table of step times; points that are not in it do not fit in memory."""

    def at(plan: Plan) -> Point:
        return tuple(plan.layout.options[axis.name] for axis in AXES)

    return local_search(
        Grid(),
        PROBLEM,
        lambda plan: heights[at(plan)],
        grid(start),
        needed_gib=lambda plan: 1.0 if at(plan) in heights else 1e6,
        **how,  # type: ignore[arg-type]
    )


points = list(itertools.product(*(axis.values for axis in AXES)))
tables = st.lists(st.integers(1, 20), min_size=len(points), max_size=len(points)).map(
    lambda values: dict(zip(points, map(float, values), strict=True))
)


@settings(max_examples=40)
@given(tables, st.sampled_from(points), st.integers(0, 3), st.integers(0, 30), st.integers(0, 3), st.booleans())
def test_never_worse_than_its_seed_and_within_its_budget(
    table: dict[Point, float], seed: Point, radius: int, trials: int, draw: int, recentre: bool
) -> None:
    found = search(table, seed, radius=radius, trials=trials, seed=draw, recentre=recentre)
    assert found.seed_s == table[seed]
    assert found.step_s is not None
    assert found.step_s <= table[seed]
    assert found.trials <= trials + 1
    timed = [a for a in found.attempts if a.outcome == "timed"]
    assert found.step_s == min(a.step_s for a in timed if a.step_s is not None)
    assert [a.step_s for a in timed if a.best] == sorted({a.step_s for a in timed if a.best}, reverse=True)
    assert found.attempts == search(table, seed, radius=radius, trials=trials, seed=draw, recentre=recentre).attempts


@settings(max_examples=40)
@given(tables, st.sampled_from(points), st.integers(0, 3))
def test_without_recentring_the_whole_ball_is_tried_and_nothing_else(
    table: dict[Point, float], seed: Point, radius: int
) -> None:
    found = search(table, seed, radius=radius, trials=1000, recentre=False)

    def distance(point: Point) -> int:
        ordered = [
            abs(axis.values.index(a) - axis.values.index(b)) for axis, a, b in zip(AXES[:2], point, seed, strict=False)
        ]
        return sum(ordered) + (point[2] != seed[2])

    ball = {point for point in points if distance(point) <= radius}
    assert {tuple(a.point.values()) for a in found.attempts} == ball
    assert found.step_s == min(table[point] for point in ball)


@settings(max_examples=40)
@given(tables, st.sampled_from(points))
def test_a_radius_that_spans_the_space_finds_the_best_of_all(table: dict[Point, float], seed: Point) -> None:
    assert search(table, seed, radius=11, trials=1000).step_s == min(table.values())


def test_a_slope_is_followed_to_its_foot() -> None:
    table = {(x, y, r): 1.0 + x + y + "abc".index(r) for x, y, r in points}
    found = search(table, (7, 8, "c"), radius=1, trials=100)
    assert found.step_s == table[0, 1, "a"]
    fixed = search(table, (7, 8, "c"), radius=1, trials=100, recentre=False)
    # One step away: x 6 instead of 7, y 4 instead of 8, or rule a instead of c.
    assert fixed.step_s == min(1.0 + 6 + 8 + 2, 1.0 + 7 + 4 + 2, 1.0 + 7 + 8 + 0)


def test_what_does_not_fit_or_cannot_be_placed_is_no_trial() -> None:
    table = {point: 5.0 for point in points if point[0] != 3}
    found = search(table, (2, 2, "a"), radius=1, trials=100)
    outcomes = {tuple(a.point.values()): a.outcome for a in found.attempts}
    assert outcomes[3, 2, "a"] == "memory"
    assert found.trials == sum(outcome == "timed" for outcome in outcomes.values())
    spaces = Space((Axis("x", (12, 13)),), (13,), lambda point: dict(point))
    found = local_search(Grid(), PROBLEM, lambda plan: 1.0, spaces, needed_gib=lambda plan: 1.0)
    assert [a.outcome for a in found.attempts] == ["not placeable", "timed"]
    assert found.seed_s is None
    assert found.step_s == 1.0
    nothing = local_search(Grid(), PROBLEM, lambda plan: 1.0, replace(spaces, axes=(Axis("x", (13,)),)))
    assert (nothing.plan, nothing.step_s) == (None, None)


def test_progress_is_reported() -> None:
    seen: list[int] = []
    search(dict.fromkeys(points, 1.0), (2, 2, "a"), radius=1, trials=3, on_trial=seen.append)
    assert seen == [2, 3, 4]


def test_bad_spaces_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        Axis("x", (1, 1))
    with pytest.raises(ValueError, match="x=9 is not on its axis"):
        grid((9, 1, "a"))
    with pytest.raises(ValueError, match="2 values for 3 axes"):
        grid((1, 1))
    with pytest.raises(ValueError, match="neither may be negative"):
        search({}, (1, 1, "a"), radius=-1)


def step_of(pr: Problem):  # type: ignore[no-untyped-def]
    return lambda plan: simulate(plan.program, price(plan.layout, plan.program, pr.costs)).step_s


DEFAULTS: dict[str, Value] = {"order": "megatron", "compute_streams": 2}
OTHERS: dict[str, tuple[Value, ...]] = {"order": ("megatron", "comm_stage"), "compute_streams": (2, 1)}


def brute_force(pr: Problem, space: Space) -> float:
    """The best step of every point of a space."""
    best = float("inf")
    everything = (space.candidate(space.named(p)) for p in itertools.product(*(axis.values for axis in space.axes)))
    for candidate in {tuple(sorted(c.items())): c for c in everything if c is not None}.values():
        try:
            layout = DisagMoE().layout(pr, candidate)
            plan = Plan(layout, DisagMoE().program(pr, layout))
        except NotApplicable:
            continue
        best = min(best, step_of(pr)(plan))
    return best


@pytest.mark.parametrize(("seq", "batch"), [pytest.param(512, 64, marks=pytest.mark.slow), (2048, 32)])
def test_a_seed_of_the_program_comes_close_to_brute_force(seq: int, batch: int) -> None:
    pr = problem(
        "tiny",
        small_cluster(nodes=4, gpus=2, nics=2),
        seq=seq,
        global_batch=batch,
        ep=2,
        transport="m2n_rdma",
        merge="node",
    )
    seed = ring_candidates(allocate(pr), DEFAULTS)[0]
    space = ring_space(pr, seed, others=OTHERS)
    found = local_search(DisagMoE(), pr, step_of(pr), space, trials=60)
    assert found.step_s is not None
    best = brute_force(pr, space)
    assert best <= found.step_s <= 1.05 * best


@pytest.mark.parametrize("rule", ["whole_nodes", "equal_nics"])
def test_an_allocation_is_a_candidate_of_the_planner(rule: str) -> None:
    pr = problem("deepseek_moe", small_cluster(nodes=4), transport="m2n_rdma", merge="node")
    plan = allocate(pr, mode=rule)
    for candidate in ring_candidates(plan, DEFAULTS):
        layout = DisagMoE().layout(pr, candidate)
        workers = layout.placement.workers
        gpus = {pool: layout.placement.replicas * sum(w.gpus for w in workers if w.pool == pool) for pool in "AF"}
        assert (gpus["A"], gpus["F"]) == plan.shape.gpus
        space = ring_space(pr, candidate, others=OTHERS)
        assert space.candidate(space.named(space.seed)) == candidate


def test_a_shared_node_is_a_candidate_too() -> None:
    pr = problem("tiny", "laptop", seq=512, global_batch=32, ep=2)
    candidate = ring_candidates(allocate(pr), DEFAULTS)[0]
    assert candidate["nics"] == "shared_nodes"
    assert DisagMoE().layout(pr, candidate).placement.gpus_used <= 8


def test_options_of_the_user_stay_fixed() -> None:
    pr = problem("deepseek_moe", small_cluster(nodes=4), transport="m2n_rdma", merge="node")
    fixed: dict[str, Value] = {"p": 2, "dp": 1, "n": 4, "m": 8, "nics": "halves", "order": "megatron"}
    plan = allocate(pr, sizes=sizes_of(fixed))
    assert (plan.shape.p, plan.shape.dp, plan.shape.n, plan.shape.m) == (2, 1, 4, 8)
    seed = {**ring_candidates(plan, DEFAULTS)[0], "nics": "halves"}
    space = ring_space(pr, seed, fixed=fixed, others=OTHERS)
    found = local_search(DisagMoE(), pr, step_of(pr), space, trials=10)
    for attempt in found.attempts:
        assert attempt.candidate is not None
        assert {key: attempt.candidate[key] for key in fixed} == fixed
    assert sizes_of({"order": "megatron"}) is None
