"""Emulated steps of a Plan on the ranks of one machine: warm up, repeat, and say how well the pace was kept.

Decides what a repeat is worth. Beside its Timeline every repeat tells how late
operations started beyond the slack, how much of the machine's processors the ranks
used, and how much others did: a repeat on a busy machine is known for one.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from disagmoe.plan.plan import Plan
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.measured import gather_timeline
from disagmoe.runtime.pacing import Pacing
from disagmoe.runtime.step import RunOptions, StepRunner
from disagmoe.specs import ModelSpec
from disagmoe.timeline.timeline import Timeline

WARM_UP_SPEED = 8.0
"""How much faster than the repeats a warm-up goes: it fills caches and buffers, its times are thrown away."""


@dataclass(frozen=True)
class Emulation:
    """What every rank is told. `model` is the small one whose tensors move, in the shape of the Plan."""

    plan: Plan
    model: ModelSpec
    cut: Cut
    pacing: Pacing
    options: RunOptions = field(default_factory=RunOptions)
    warm_ups: int = 1
    repeats: int = 3


@dataclass(frozen=True)
class EmulatedStep:
    """One repeat. Times of `timeline` are logical; `wall_s` is what the clock on the wall showed.

    `late_s` is the latest start of any operation beyond the slack, logical;
    `late_share` the share of operations that started late at all. `own_load` and
    `foreign_load` are processors in use, by the ranks and by everybody else (None
    where the system does not tell).
    """

    timeline: Timeline
    wall_s: float
    late_s: float
    late_share: float
    own_load: float
    foreign_load: float | None


def patience_s(simulated_step_s: float, dilation: float) -> float:
    """How long a rank may wait for one thing inside an emulated step: on a busy machine some take several times theirs.

    A rank that dies is noticed at once; this is for one that hangs.
    """
    return 60.0 + 5.0 * simulated_step_s * dilation


def emulate(context: Context, emulation: Emulation) -> list[EmulatedStep]:
    """Run every repeat on this rank; the steps on rank 0, nothing on the others."""
    told = emulation
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, told.model.vocab, (told.cut.sequences, told.cut.seq + 1), generator=generator)
    steps: list[EmulatedStep] = []
    with StepRunner(context, told.plan, told.model, told.cut, told.options, pacing=told.pacing) as runner:
        pacer = runner.pacer
        assert pacer is not None
        pace = told.pacing.pace
        for repeat in range(told.warm_ups + told.repeats):
            pacer.pace = pace if repeat >= told.warm_ups else replace(pace, dilation=pace.dilation / WARM_UP_SPEED)
            busy, used, began = _busy_s(), time.process_time(), time.perf_counter()
            result = runner.step(lambda wanted: tokens[wanted.start : wanted.stop])
            wall_s, used = time.perf_counter() - began, time.process_time() - used
            busy_s = None if busy is None else (_busy_s() or busy) - busy
            late = [x for x in pacer.late_s if x > 0.0]
            share = len(late) / max(1, len(pacer.late_s))
            timeline = gather_timeline(
                told.plan.program, runner.site.groups.ranks, result.record, 0.0, origin="emulated"
            )
            told_by: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * context.world_size
            dist.all_gather_object(told_by, (max(late, default=0.0), share, used))
            if timeline is not None and repeat >= told.warm_ups:
                own_s = sum(entry[2] for entry in told_by)
                foreign = None if busy_s is None else max(0.0, busy_s - own_s) / wall_s
                shares = [entry[1] for entry in told_by]
                worst = max(entry[0] for entry in told_by)
                steps.append(EmulatedStep(timeline, wall_s, worst, sum(shares) / len(shares), own_s / wall_s, foreign))
            context.beat()
    return steps


def _busy_s() -> float | None:
    """Processor seconds of everybody since the machine started (Linux; elsewhere unknown)."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
    except (OSError, UnicodeDecodeError):
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(x) for x in fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
