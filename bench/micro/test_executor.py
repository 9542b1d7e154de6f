"""What the executor costs per operation, without and with its exchanges, on CPU.

Without: the Program of one attention worker whose operations return at once. With:
whole training steps of a model so small that its compute is next to nothing,
divided by the operations of a rank. Nothing is asserted (see test_exchange.py).
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.executor import Executor
from disagmoe.runtime.launch import Pool
from disagmoe.runtime.script import script_of
from disagmoe.runtime.step import RunOptions, StepRunner
from disagmoe.specs import ModelSpec
from disagmoe.train.plan import RingShape, ring_plan

LAYERS, SEQ = 4, 2
MICROBATCHES = 8
STEPS_PER_CALL, ROUNDS = 3, 5
AIM_BARE_S, AIM_WHOLE_S = 200e-6, 1.5e-3
MODEL = ModelSpec(
    name="next_to_nothing",
    title="next to nothing",
    family="qwen3_moe",
    layers=LAYERS,
    hidden=12,
    vocab=23,
    heads=4,
    kv_heads=2,
    head_dim=6,
    experts=6,
    top_k=2,
    expert_width=5,
    qk_norm=True,
)

_RUNNERS: dict[tuple[RingShape, int], StepRunner] = {}
"""Per rank: what outlives one call of the pool."""


def say(capsys: pytest.CaptureFixture[str], what: str, seconds: float, fastest_s: float, aim_s: float) -> None:
    with capsys.disabled():
        print(f"\n{what}: {seconds * 1e6:.0f} us per operation (fastest {fastest_s * 1e6:.0f}; aim {aim_s * 1e6:.0f})")


@pytest.mark.parametrize("microbatches", [8, 32])
def test_without_exchange(benchmark: Any, capsys: pytest.CaptureFixture[str], microbatches: int) -> None:
    """Streams, dependencies, stamps and the record."""
    script = script_of(af_pipe_program(p=1, layers=LAYERS, m=microbatches, group=4, order="comm_stage"), 0)
    executor = Executor(script, lambda task: None, device=torch.device("cpu"))
    operations = len(script.tasks())
    benchmark.pedantic(executor.step, rounds=20, warmup_rounds=2)
    executor.close()
    if benchmark.stats:
        typical_s, fastest_s = (benchmark.stats.stats.median / operations, benchmark.stats.stats.min / operations)
        benchmark.extra_info["per_operation_s"] = typical_s
        say(capsys, f"executor alone, {operations} operations", typical_s, fastest_s, AIM_BARE_S)


def whole_steps(context: Context, shape: RingShape, microbatches: int) -> list[float]:
    """Seconds per operation of some steps on this rank."""
    key = shape, microbatches
    if key not in _RUNNERS:
        plan = ring_plan(MODEL, shape, microbatches=microbatches, sequences=microbatches)
        cut = Cut(microbatches, SEQ, shape.dp, microbatches)
        _RUNNERS[key] = StepRunner(context, plan, MODEL, cut, RunOptions(precision="fp32"))
    runner = _RUNNERS[key]
    tokens = torch.arange(microbatches * (SEQ + 1)).reshape(microbatches, SEQ + 1) % MODEL.vocab
    tasks = runner.executor.script.tasks()
    times = []
    for _ in range(STEPS_PER_CALL):
        begin = time.perf_counter()
        runner.step(lambda wanted: tokens[wanted.start : wanted.stop])
        times.append((time.perf_counter() - begin) / len(tasks))
    return times


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 2)])
def test_with_exchange(benchmark: Any, capsys: pytest.CaptureFixture[str], m: int, n: int) -> None:
    """Compute, exchanges and gradients; no parameter is updated."""
    shape = RingShape(m=m, n=n)
    found: list[float] = []
    with Pool(shape.ranks) as pool:

        def once() -> None:
            per_rank = pool.run(whole_steps, shape, MICROBATCHES)
            found.extend(max(step) for step in zip(*per_rank, strict=True))

        once()
        found.clear()
        benchmark.pedantic(once, rounds=ROUNDS)
    typical_s = sorted(found)[len(found) // 2]
    benchmark.extra_info["per_operation_s"] = typical_s
    say(capsys, f"whole step, {m} A + {n} F", typical_s, min(found), AIM_WHOLE_S)
