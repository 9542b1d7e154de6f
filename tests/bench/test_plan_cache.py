"""Tuned plans kept by content."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from baselines.megatron import Megatron1F1B
from bench import plan_cache
from disagmoe.allocator import Tuned
from disagmoe.plan.plan import Plan
from disagmoe.plan.pricing import price
from disagmoe.plan.text import to_text
from disagmoe.simulator import simulate
from disagmoe.system import Problem
from tests.problems import problem, small_cluster


class Timed:
    """A step function that counts how often it is asked."""

    def __init__(self, pr: Problem) -> None:
        self.problem = pr
        self.calls = 0

    def __call__(self, plan: Plan) -> float:
        self.calls += 1
        return simulate(plan.program, price(plan.layout, plan.program, self.problem.costs)).step_s


def ask(pr: Problem, cache: Path, system: Megatron1F1B | None = None, budget: int = 64) -> tuple[Tuned, int]:
    step = Timed(pr)
    return plan_cache.tuned(system or Megatron1F1B(), pr, step, budget=budget, cache=cache), step.calls


def test_second_answer_is_the_first_without_timing_anything(tmp_path: Path) -> None:
    pr = problem("tiny", ep=8)
    first, calls = ask(pr, tmp_path)
    again, none = ask(pr, tmp_path)
    assert calls > 0
    assert none == 0
    assert first.plan is not None
    assert again.plan is not None
    assert again.plan.layout == first.plan.layout
    assert to_text(again.plan.program) == to_text(first.plan.program)
    assert (again.status, again.step_s, again.needed_gib) == (first.status, first.step_s, first.needed_gib)
    assert [t.outcome for t in again.trials] == [t.outcome for t in first.trials]


def test_whatever_decides_a_plan_is_part_of_the_key(tmp_path: Path) -> None:
    base = problem("tiny", ep=8)
    ask(base, tmp_path)
    others = [
        replace(base, transport="deepep"),
        replace(base, merge="node"),
        replace(base, ep=4),
        problem("tiny", ep=8, seq=2048),
        problem("tiny", ep=8, skew=1.5),
        problem("tiny", small_cluster(nodes=2), ep=8),
    ]
    for other in others:
        assert ask(other, tmp_path)[1] > 0
    assert ask(base, tmp_path, Megatron1F1B(virtual=1))[1] > 0
    assert ask(base, tmp_path, budget=63)[1] > 0
    assert ask(base, tmp_path)[1] == 0


def test_out_of_memory_is_kept_too(tmp_path: Path) -> None:
    pr = problem("qwen3", small_cluster(nodes=2))
    first, _ = ask(pr, tmp_path)
    again, _ = ask(pr, tmp_path)
    assert first.status == again.status == "oom"
    assert first.reason == again.reason


def test_a_broken_entry_is_tuned_again(tmp_path: Path) -> None:
    pr = problem("tiny", ep=8)
    ask(pr, tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_text(entry.read_text()[:-20])
    assert ask(pr, tmp_path)[1] > 0
    json.loads(entry.read_text())


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert ask(problem("tiny", ep=8), blocked / "cache")[0].status == "ok"
