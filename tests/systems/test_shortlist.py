"""The short list keeps the best: its estimates are bounds, and tuning loses little by it and by refining."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from disagmoe.allocator import tune
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.plan.memory import peak_static_gib
from disagmoe.plan.memory_report import lower_bound_gib, peak_gib
from disagmoe.plan.pricing import price
from disagmoe.simulator import simulate
from disagmoe.system import Candidate, Problem
from disagmoe.systems import DisagMoE
from disagmoe.systems.shortlist import FASTEST, SMALLEST, _Estimate, shortlist
from tests.problems import problem, small_cluster


def all_splits(pr: Problem) -> list[Candidate]:
    """Every split of every EP size, before anything is left out."""
    system = DisagMoE()
    return [
        {**c, "order": "megatron", "group": 4 * int(c["p"])} for n in (4, 8, 16, 32) for c in system._of_size(pr, n)
    ]


@pytest.mark.parametrize("model", ["qwen3", "deepseek_moe_16b"])
def test_estimates_are_below_the_bounds_they_stand_for(model: str) -> None:
    pr = problem(model, "h800_128", global_batch=2048, ep=None)
    estimate = _Estimate(pr)
    splits = all_splits(pr)
    for c in splits[:: max(1, len(splits) // 60)]:
        layout = DisagMoE().layout(pr, c)
        assert estimate.seconds(c) <= lower_bound_s(layout, pr.costs) * (1 + 1e-9)
        assert estimate.gib(c) <= peak_static_gib(layout, pr.model) * (1 + 1e-9)


def test_a_long_list_is_cut_to_the_fastest_that_fit_and_the_smallest() -> None:
    pr = problem("qwen3", "h800_128", global_batch=2048, ep=None)
    splits = all_splits(pr)
    kept = shortlist(pr, splits)
    assert len(kept) <= FASTEST + SMALLEST < len(splits)
    assert [c for c in splits if c in kept] == kept  # in their order
    estimate = _Estimate(pr)
    fitting = [c for c in splits if estimate.gib(c) <= pr.cluster.limit_gib]
    assert min(fitting, key=estimate.seconds) in kept
    assert min(splits, key=estimate.gib) in kept
    assert shortlist(pr, splits[:100]) == splits[:100]


@dataclass(frozen=True)
class Exhaustive(DisagMoE):
    """Every split, order, group size and number of streams; bounds alone leave something out."""

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        for c in super().candidates(problem):
            if c["tier"] == 0:
                yield from super().refinements(problem, c)

    def refinements(self, problem: Problem, candidate: Candidate) -> list[Candidate]:
        return []


@pytest.mark.slow
@pytest.mark.parametrize(("model", "seq", "batch"), [("gpt_oss", 8192, 1024), ("deepseek_moe", 4096, 2048)])
def test_tuning_is_within_one_percent_of_an_exhaustive_search(model: str, seq: int, batch: int) -> None:
    pr = problem(model, "h800_128", seq=seq, global_batch=batch, transport="m2n_rdma", merge="node")

    def step(system: DisagMoE, budget: int) -> float:
        found = tune(
            system, pr, lambda p: simulate(p.program, price(p.layout, p.program, pr.costs)).step_s, budget=budget
        )
        assert found.step_s is not None
        return found.step_s

    assert step(DisagMoE(), 64) <= 1.01 * step(Exhaustive(), 100_000)


@pytest.mark.parametrize("model", ["deepseek_moe_16b", "qwen3_30b"])
def test_layers_in_flight_bound_the_memory_from_below(model: str) -> None:
    """What the order makes the first groups hold is less than what the Program needs, at every level of recompute."""
    pr = problem(model, small_cluster(nodes=6), global_batch=96, transport="m2n_rdma", merge="node", ep=8)
    system = DisagMoE()
    splits = [c for c in system.candidates(pr) if c["tier"] == 0]
    for c in splits[:: max(1, len(splits) // 8)]:
        bounds = []
        for level in system.recompute_levels:
            layout = system.layout(pr, {**c, **level})
            bounds.append(lower_bound_gib(layout, pr.model, pr.workload))
            needed = peak_gib(layout, system.program(pr, layout), pr.model, pr.workload)
            assert bounds[-1] <= needed
            if not level:
                assert bounds[-1] > 0.5 * needed  # close enough to be of use
