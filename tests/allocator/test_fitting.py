"""Whether anything fits, against the tuner's own answer."""

from __future__ import annotations

import pytest

from baselines import get_system, system_names
from disagmoe.allocator import tune
from disagmoe.allocator.fitting import fits
from disagmoe.plan.pricing import price
from disagmoe.simulator import simulate
from tests.problems import problem, small_cluster


@pytest.mark.parametrize("name", [n for n in system_names() if n != "comet"])
@pytest.mark.parametrize("memory_gib", [30.0, 120.0])
def test_agrees_with_the_tuner(name: str, memory_gib: float) -> None:
    cluster = small_cluster(nodes=2, memory_gib=memory_gib)
    pr = problem("gpt_oss_20b", cluster, ep=8, global_batch=32)
    system = get_system(name)
    tuned = tune(system, pr, lambda plan: simulate(plan.program, price(plan.layout, plan.program, pr.costs)).step_s)
    expected = {"ok": True, "oom": False, "not_applicable": None}[tuned.status]
    assert fits(system, pr) is expected


def test_memory_as_it_runs_counts() -> None:
    pr = problem("tiny", ep=8)
    assert fits(get_system("megatron_1f1b"), pr, lambda plan: 1e9) is False
    assert fits(get_system("megatron_1f1b"), pr, lambda plan: 0.1) is True
