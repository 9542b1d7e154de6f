"""Speed of the simulator and of what every simulated candidate goes through.

The rates asserted here are the ones that make tuning by simulation affordable;
they are far below what one current core reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagmoe.ops import COMM_KINDS
from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.dependencies import build_graph
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.timeline.metrics import worker_metrics
from disagmoe.timeline.trace import write_trace

MIN_OPERATIONS_PER_S = 1e6
MAX_PLAN_S = 0.150
LAYERS, MICROBATCHES = 94, 32


def af_pipe(microbatches: int) -> Program:
    """Qwen3-235B's depth on four attention and four expert groups."""
    return af_pipe_program(p=4, layers=LAYERS, m=microbatches, group=8, order="comm_stage")


def contended(program: Program) -> Pricing:
    """Every transfer and every compute beside it slow each other, and hardly two operations end together."""
    moves = np.isin(program.kind, [int(k) for k in COMM_KINDS])
    duration_s = np.where(moves, 1e-3, 1.3e-3) * (1 + 0.01 * (program.layer % 7))
    return Pricing(
        duration_s=duration_s,
        link=np.zeros(len(program), dtype=np.int8),
        slows_compute=np.where(moves, 1.25, 1.0),
        slowed_by_compute=np.where(moves, 1.5, 1.0),
        wire_bytes=np.zeros(len(program)),
    )


def best_s(benchmark: Any) -> float | None:
    """The fastest round; None under --benchmark-disable."""
    return float(benchmark.stats.stats.min) if benchmark.stats else None


def measure(benchmark: Any, work: Callable[[], object], operations: int) -> None:
    """Time `work`, which handles `operations` operations, and hold it to the required rate."""
    work()  # compile, or load the compiled code
    benchmark(work)
    seconds = best_s(benchmark)
    if seconds is not None:
        benchmark.extra_info["operations_per_s"] = round(operations / seconds)
        assert operations / seconds >= MIN_OPERATIONS_PER_S


@pytest.mark.parametrize("microbatches", [8, 32, 128, 512])
def test_simulate(benchmark: Any, microbatches: int) -> None:
    """Contention on; the rate must not fall with the number of operations."""
    program = af_pipe(microbatches)
    graph, pricing = build_graph(program), contended(program)
    measure(benchmark, lambda: simulate(program, pricing, graph), graph.n_nodes)


def test_plan_of_94_layers_and_32_microbatches(benchmark: Any) -> None:
    """Build, verify and simulate one AF-Pipe plan."""

    def plan() -> None:
        program = af_pipe(MICROBATCHES)
        graph = build_graph(program)
        verify(program, graph=graph)
        simulate(program, contended(program), graph)

    plan()
    benchmark(plan)
    seconds = best_s(benchmark)
    assert seconds is None or seconds < MAX_PLAN_S


def test_metrics(benchmark: Any) -> None:
    """Interval accounting of all workers."""
    program = af_pipe(MICROBATCHES)
    timeline = simulate(program, contended(program))
    measure(benchmark, lambda: worker_metrics(timeline), len(program))


def test_trace(benchmark: Any, tmp_path: Path) -> None:
    """Writing a whole trace."""
    program = af_pipe(MICROBATCHES)
    timeline = simulate(program, contended(program))
    benchmark(lambda: write_trace(timeline, None, tmp_path / "trace.json.gz", "speed"))
