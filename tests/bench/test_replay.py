"""Plans of one batch tried on another."""

from __future__ import annotations

from functools import cache

from baselines.megatron import Megatron1F1B
from bench.replay import KEPT, Fixed, best_candidates, from_default_batch, replayed
from bench.simulated import Simulated
from disagmoe.allocator import Trial, Tuned, tune
from disagmoe.specs import default_global_batch
from disagmoe.system import Problem, recompute_levels, without_recompute
from tests.problems import problem, small_cluster

SYSTEM = Megatron1F1B()


def search(pr: Problem) -> Tuned:
    simulated = Simulated(pr)
    return tune(SYSTEM, pr, simulated.step, peak=simulated.peak)


def moe(global_batch: int = 128) -> Problem:
    return problem("deepseek_moe", small_cluster(nodes=4), ep=8, global_batch=global_batch)


@cache
def found_at(batch: int) -> Tuned:
    return search(moe(batch))


def test_the_best_plans_are_the_fastest_timed_ones() -> None:
    found = found_at(128)
    kept = best_candidates(found)
    steps = sorted(trial.step_s for trial in found.trials if trial.outcome == "timed" and trial.step_s is not None)
    assert len(kept) == KEPT
    assert found.candidate is not None
    assert kept[0] == without_recompute({k: v for k, v in found.candidate.items() if k != "tier"})
    assert [replayed(SYSTEM, moe(), [c]).step_s for c in kept] == steps[:KEPT]


def test_the_best_of_the_default_batch_is_simulated_at_the_other() -> None:
    usual = moe(default_global_batch(4096))
    large = moe(4 * usual.workload.global_batch)
    asked: list[Problem] = []

    def counted(pr: Problem) -> Tuned:
        asked.append(pr)
        return search(pr)

    found = from_default_batch(SYSTEM, large, counted)
    assert [pr.workload for pr in asked] == [usual.workload]
    assert asked[0].costs.workload == usual.workload
    assert len({tuple(trial.candidate.items()) for trial in found.trials}) == KEPT
    assert found.plan is not None
    assert found.candidate is not None
    batch = found.plan.layout.batch
    assert batch.microbatches * batch.sequences * batch.data_ranks == large.workload.global_batch
    assert SYSTEM.layout(large, found.candidate) == found.plan.layout
    assert found.step_s == min(trial.step_s for trial in found.trials if trial.step_s is not None)


def test_at_the_default_batch_it_is_the_search_itself() -> None:
    usual = moe(default_global_batch(4096))
    assert from_default_batch(SYSTEM, usual, lambda pr: found_at(128)) is found_at(128)


def test_what_cannot_run_at_the_default_batch_is_said() -> None:
    big = problem("qwen3", small_cluster(nodes=2), global_batch=16)
    found = from_default_batch(SYSTEM, big, search)
    assert found.status == "oom"
    assert "(at 2,048 sequences)" in found.reason


def test_recompute_is_settled_anew() -> None:
    """What a plan had to recompute elsewhere it does not recompute where it fits without."""
    pr = moe()
    (best, *_) = best_candidates(found_at(128))
    assert recompute_levels(Fixed(SYSTEM, (best,))) == recompute_levels(SYSTEM)
    trial = Trial({**best, "recompute": "full", "tier": 1}, "timed", step_s=1.0)
    again = best_candidates(Tuned("ok", "", None, None, None, None, (trial,)))
    assert again == (best,)
    assert replayed(SYSTEM, pr, again).step_s == replayed(SYSTEM, pr, [best]).step_s


def test_no_candidates_no_plan() -> None:
    assert replayed(SYSTEM, moe(), []).status == "not_applicable"
