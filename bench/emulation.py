"""Runs one cut on real processes, and simulates the very same cut.

Decides the pace. The smallest exchange takes at least 5 ms on the wall on 4
processes and 10 ms on 8, and a step long enough for the processors at hand; the
slack is a quarter of the smallest exchange, fixed before anything runs.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.cut import CutPlan
from disagmoe.ops import COMM_KINDS
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.emulate import EmulatedStep, Emulation, emulate, patience_s
from disagmoe.runtime.launch import spawn
from disagmoe.runtime.pacing import Pace, Pacing
from disagmoe.runtime.step import RunOptions
from disagmoe.runtime.traffic import Logbook
from disagmoe.simulator import simulate
from disagmoe.timeline.timeline import Timeline

DEFAULT_PROCESSES = 4
LEAST_EXCHANGE_S = 5e-3
"""Wall time of the smallest exchange on up to 4 processes, twice that on more: a host needs so long to start it."""
HOST_S_PER_ROW = 1.4e-3
MOST_OWN_LOAD = 0.4
"""Share of the machine's cores that the ranks may need, at HOST_S_PER_ROW for every row of every rank."""
TOKENS = 8
"""Tokens per sequence of the small model."""
BLOCKED = 1e6
"""Slow-down of compute beside communication where overlap is forbidden."""


@dataclass(frozen=True)
class Ran:
    """A cut that was run: its pace, the simulation of the very same cut, and the repeats."""

    cut: CutPlan
    pace: Pace
    simulated: Timeline
    steps: list[EmulatedStep]

    @property
    def best(self) -> EmulatedStep:
        """The fastest repeat."""
        return min(self.steps, key=lambda step: step.timeline.step_s)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / fastest of the repeats."""
        times = [step.timeline.step_s for step in self.steps]
        return (max(times) - min(times)) / min(times)


def without_overlap(cut: CutPlan) -> CutPlan:
    """The negative control: every transfer stops the compute of its workers while its bytes move."""
    comm = np.isin(cut.plan.program.kind, [int(kind) for kind in COMM_KINDS])
    blocked = np.where(comm, BLOCKED, cut.pricing.slows_compute)
    return replace(cut, pricing=replace(cut.pricing, slows_compute=blocked))


def pace_of(cut: CutPlan, simulated_step_s: float, processes: int, cores: int) -> Pace:
    """The pace of a cut whose simulated step takes so long."""
    smallest = cut.smallest_exchange_s or simulated_step_s / len(cut.plan.program)
    least = LEAST_EXCHANGE_S * (1 if processes <= 4 else 2)
    gpus = np.array([worker.gpus for worker in cut.plan.layout.placement.workers])
    host_s = HOST_S_PER_ROW * float(gpus[cut.plan.program.worker].sum()) / (MOST_OWN_LOAD * cores)
    return Pace.of_exchange(max(least / smallest, host_s / simulated_step_s), smallest)


def run_cut(cut: CutPlan, processes: int, repeats: int, *, warm_ups: int = 1, pace: Pace | None = None) -> Ran:
    """Simulate and run a cut. Raises RankError where a rank fails."""
    simulated = simulate(cut.plan.program, cut.pricing)
    step_s = simulated.step_s
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pace = pace or pace_of(cut, step_s, processes, cores)
    patience = patience_s(step_s, pace.dilation)
    layout = cut.plan.layout
    ranks = layout.batch.data_ranks * layout.batch.microbatches
    with tempfile.TemporaryDirectory(prefix="disagmoe-pace-") as folder:
        file = Logbook.create(Path(folder) / "times", processes, len(cut.plan.program))
        emulation = Emulation(
            plan=cut.plan,
            model=cut.model,
            cut=Cut(ranks, TOKENS, layout.placement.replicas, layout.batch.microbatches),
            pacing=Pacing(cut.pricing, pace, file),
            options=RunOptions(timeout_s=patience),
            warm_ups=warm_ups,
            repeats=repeats,
        )
        steps = spawn(
            processes,
            emulate,
            (emulation,),
            timeout_s=(warm_ups + repeats) * patience + 60.0,
            silence_s=patience + 30.0,
            group_timeout_s=patience,
        )[0]
    return Ran(cut, pace, simulated, steps)
