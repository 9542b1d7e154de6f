"""Training steps of one Plan on one rank, timed as fast as the hardware goes.

Decides what a measured step is. All ranks start together; a rank is through when
its device is, optimizer included. Its time runs from when the first rank began, so
the slowest rank's is the step's. Between steps, outside the time, moments of all
rows are gathered. What ran must be what was planned, stream by stream. Memory is
the high-water mark of the rank: of its allocator on a GPU, of its process on a CPU
(code and libraries included).
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from disagmoe.ops import Stream
from disagmoe.plan.plan import Plan
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.data import Synthetic
from disagmoe.runtime.executor import Record
from disagmoe.runtime.measured import clock_offset_s, gather_timeline
from disagmoe.runtime.step import RunOptions, StepRunner
from disagmoe.specs import ModelSpec
from disagmoe.timeline.timeline import Timeline

GIB = 2.0**30


@dataclass(frozen=True)
class Trial:
    """What is run: a plan of a model on a batch, `warm_up` + `repeats` steps, each on its own data."""

    plan: Plan
    model: ModelSpec
    cut: Cut
    options: RunOptions
    warm_up: int
    repeats: int

    @property
    def steps(self) -> int:
        return self.warm_up + self.repeats


@dataclass(frozen=True)
class RankReport:
    """What one rank found. Of every step: seconds, loss and grad norm (equal on all ranks), copies dropped.

    `timelines` of the repeats on rank 0, where the implementation has any;
    `wire_bytes` this rank sends to others in a step.
    """

    steps_s: tuple[float, ...]
    losses: tuple[float, ...]
    peak_memory_gib: float
    wire_bytes: float | None = None
    dropped: tuple[int, ...] = ()
    timelines: tuple[Timeline, ...] = ()


def measure(context: Context, trial: Trial) -> RankReport:
    """Run a trial on this rank, by this suite's own executor. Collective over the world."""
    forget_peak_memory(context.device)
    source = Synthetic(trial.model.vocab, trial.cut.seq, trial.options.seed)
    offset_s = clock_offset_s(context)
    took_s: list[float] = []
    losses: list[float] = []
    dropped: list[int] = []
    timelines: list[Timeline] = []
    with StepRunner(context, trial.plan, trial.model, trial.cut, trial.options) as runner:
        for step in range(trial.steps):
            first = step * trial.cut.sequences
            batch = source.samples(range(first, first + trial.cut.sequences))  # made before the clock starts
            begin_s = together(context)
            result = runner.step(lambda wanted, batch=batch: batch[wanted.start : wanted.stop])  # type: ignore[misc]
            end_s = moment(context)
            check_order(runner, result.record)
            span = Span.of(begin_s + offset_s, end_s + offset_s, result.record.begin_s + offset_s)
            took_s.append(end_s + offset_s - span.begin_s)
            losses.append(result.report.loss)
            dropped.append(int(result.sums.dropped.sum()))
            if step >= trial.warm_up:
                timeline = gather_timeline(trial.plan.program, runner.site.groups.ranks, result.record, offset_s)
                timelines += [] if timeline is None else [span.around(timeline)]
            context.beat()
        sent = runner.exchanges.ledger.total()
    return RankReport(
        tuple(took_s),
        tuple(losses),
        peak_memory_gib(context.device),
        wire_bytes=sent.total / trial.steps,
        dropped=tuple(dropped),
        timelines=tuple(timelines),
    )


@dataclass(frozen=True)
class Span:
    """A step over all ranks, in rank 0's time: when the first began and the last was through."""

    begin_s: float
    end_s: float
    record_s: float  # when the first rank's record begins, the zero of a gathered Timeline

    @classmethod
    def of(cls, begin_s: float, end_s: float, record_s: float) -> Span:
        """From this rank's own moments. Collective over the world."""
        values = torch.tensor([begin_s, -end_s, record_s], dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.all_reduce(values, dist.ReduceOp.MIN)
        first, last, record = values.tolist()
        return cls(first, -last, record)

    def around(self, timeline: Timeline) -> Timeline:
        """The Timeline counted from when the first rank began, up to when the last was through."""
        late = max(0.0, self.record_s - self.begin_s)
        return replace(
            timeline,
            start_s=timeline.start_s + late,
            end_s=timeline.end_s + late,
            post_s=timeline.post_s + late,
            until_s=self.end_s - self.begin_s,
        )


def check_order(runner: StepRunner, record: Record) -> None:
    """Raise RuntimeError unless every stream ran the planned rows in the planned order."""
    for stream, tasks in runner.executor.script.streams.items():
        planned = [task.row for task in tasks]
        if record.ran[Stream(stream)] != planned:
            raise RuntimeError(f"stream {Stream(stream).name} did not run what was planned")


def together(context: Context) -> float:
    """Wait for all ranks and for the own device; returns this moment."""
    settle(context.device)
    if context.world_size > 1:
        dist.barrier()
    return time.perf_counter()


def moment(context: Context) -> float:
    """When all that the device was given is done."""
    settle(context.device)
    return time.perf_counter()


def settle(device: torch.device) -> None:
    """Wait until a GPU is through with everything; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak_memory(device: torch.device) -> None:
    """Start a new high-water mark."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # Linux only; elsewhere the mark is that of the whole process
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory_gib(device: torch.device) -> float:
    """High-water mark of this rank, GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024.0 / GIB
    unit = 1.0 if sys.platform == "darwin" else 1024.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
