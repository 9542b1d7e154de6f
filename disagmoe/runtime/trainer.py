"""The training loop of one rank: data, steps, logs, checkpoints.

Decides the course of a run: resume the newest valid checkpoint (or start), run
steps, write a line per step on rank 0, save every so often and at the end.
Timelines are gathered on the steps that are shown, as gathering costs a little.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from disagmoe.cost.flops import mfu, train_flops_per_token
from disagmoe.plan.plan import Plan
from disagmoe.runtime.checkpoint import Checkpoints
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.data import Source
from disagmoe.runtime.measured import clock_offset_s, gather_timeline
from disagmoe.runtime.metrics_log import Log, StepMetrics, expert_load, open_logs
from disagmoe.runtime.step import RunOptions, StepResult, StepRunner
from disagmoe.specs import ModelSpec, device
from disagmoe.timeline.metrics import Breakdown, summarize, worker_metrics
from disagmoe.timeline.timeline import Timeline
from disagmoe.timeline.trace import write_trace

RESUME = ("auto", "none")


@dataclass(frozen=True)
class Course:
    """How long a run goes on and what it leaves.

    `folder` None writes nothing. `save_every` 0 saves at the end only; `resume`
    "auto" takes the newest valid checkpoint of the folder, "none" starts afresh.
    `show_every` steps there is a measured Timeline; `peak_device` names the GPU
    whose peak MFU refers to (None: no MFU).
    """

    steps: int
    folder: Path | None = None
    save_every: int = 0
    keep: int = 3
    resume: str = "auto"
    show_every: int = 10
    peak_device: str | None = None
    screen: bool = True

    def __post_init__(self) -> None:
        for label, value, least in (
            ("steps", self.steps, 1), ("save_every", self.save_every, 0), ("keep", self.keep, 1),
            ("log_every", self.show_every, 1),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{label}={value}: must be at least {least}")
        if self.resume not in RESUME:
            raise ValueError(f"resume={self.resume!r} is unknown; allowed: {', '.join(RESUME)}")


class Trainer:
    """One rank's part of a run. `say` gets one-line messages on rank 0."""

    def __init__(
        self,
        context: Context,
        plan: Plan,
        spec: ModelSpec,
        cut: Cut,
        options: RunOptions,
        source: Source,
        course: Course,
        *,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        if options.recipe is None:
            raise ValueError("training needs an optimizer recipe")
        self.context, self.plan, self.spec, self.cut, self.course = context, plan, spec, cut, course
        self.source = source
        self._recipe = options.recipe
        self._say = say if context.rank == 0 else lambda line: None
        self.runner = StepRunner(context, plan, spec, cut, options)
        identity = {
            "model": _fingerprint(spec), "layers": spec.layers, "precision": options.precision, "seed": options.seed,
            "batch": cut.sequences, "seq": cut.seq, "data": source.title,
        }  # fmt: skip
        self.checkpoints = None
        if course.folder is not None:
            self.checkpoints = Checkpoints(course.folder / "checkpoints", self.runner, identity, keep=course.keep)
        self._flops = train_flops_per_token(spec, cut.seq)
        self._peak_tflops = device(course.peak_device).peak_bf16_tflops if course.peak_device else None
        self._offset_s = clock_offset_s(context)

    def run(self) -> list[StepMetrics]:
        """Train to the end; the metrics of every step of this call, on every rank."""
        first, last, every = self._resume(), self.course.steps, self.course.save_every
        logs: list[Log] = []
        if self.context.rank == 0:
            logs = open_logs(self.course.folder, first, last, self.course.show_every, screen=self.course.screen)
        history: list[StepMetrics] = []
        try:
            for step in range(first, last):
                done = step + 1
                history.append(self._step(step, shown=done % self.course.show_every == 0 or done == last))
                for log in logs:
                    log.write(history[-1])
                if self.checkpoints and (done == last or (every and done % every == 0)):
                    self.checkpoints.save(done)
                self.context.beat()
        finally:
            for log in logs:
                log.close()
        return history

    def close(self) -> None:
        self.runner.close()

    def _resume(self) -> int:
        if self.checkpoints is None:
            return 0
        self.checkpoints.prepare()
        if self.course.resume == "none":
            return 0
        found = self.checkpoints.newest()
        for reason in found.passed_over:
            self._say(f"warning: passed over {reason}")
        if found.folder is None:
            return 0
        self._say(f"resuming {found.folder} after {found.step} steps")
        return self.checkpoints.load(found.folder)

    def _step(self, step: int, *, shown: bool) -> StepMetrics:
        begin = step * self.cut.sequences
        start_s = time.perf_counter()
        result = self.runner.step(lambda wanted: self.source.samples(range(begin + wanted.start, begin + wanted.stop)))
        took_s = time.perf_counter() - start_s
        timeline = None
        if shown:
            program, ranks = self.plan.program, self.runner.site.groups.ranks
            timeline = gather_timeline(program, ranks, result.record, self._offset_s)
        return self._metrics(step, result, took_s, timeline)

    def _metrics(self, step: int, result: StepResult, took_s: float, timeline: Timeline | None) -> StepMetrics:
        report = result.report
        busiest, idle = expert_load(report.counts)
        rate = result.sums.tokens / took_s
        split: Breakdown | None = None
        if timeline is not None:
            split = summarize(worker_metrics(timeline), self.plan.layout.placement).mean
            if self.course.folder is not None and step + 1 == self.course.steps:
                title = f"{self.spec.title}, step {step + 1}, measured"
                write_trace(timeline, self.plan.layout, self.course.folder / "trace.json.gz", title)
        return StepMetrics(
            step=step,
            loss=report.loss,
            cross_entropy=report.cross_entropy,
            balance=report.balance,
            z=report.z,
            grad_norm=result.grad_norm,
            lr=self._recipe.lr_at(step),
            tokens=result.sums.tokens,
            step_s=took_s,
            tokens_per_s=rate,
            expert_load=busiest,
            idle_experts=idle,
            mfu=self._mfu(rate),
            compute_s=None if split is None else split.compute_s,
            overlapped_comm_s=None if split is None else split.overlapped_s,
            exposed_comm_s=None if split is None else split.exposed_s,
            bubble_s=None if split is None else split.bubble_s,
            wait_s=None if split is None else split.wait_s,
            dropped_copies=int(result.sums.dropped.sum()),
        )

    def _mfu(self, tokens_per_s: float) -> float | None:
        if self._peak_tflops is None:
            return None
        try:
            return mfu(tokens_per_s / self.context.world_size, self._flops, self._peak_tflops)
        except ValueError as reason:  # above 1: no figure at all rather than a wrong one
            self._say(f"warning: no MFU is reported, peak={self.course.peak_device} cannot be right: {reason}")
            self._peak_tflops = None
            return None


def train(
    context: Context, plan: Plan, spec: ModelSpec, cut: Cut, options: RunOptions, source: Source, course: Course
) -> list[StepMetrics]:
    """A whole run on one rank; the metrics of every step of this call."""
    trainer = Trainer(context, plan, spec, cut, options, source, course)
    history = trainer.run()
    trainer.close()
    return history


def _fingerprint(spec: ModelSpec) -> str:
    """Name of a model and a digest of everything that makes it."""
    digest = hashlib.sha256(repr(replace(spec, title="", assumptions=())).encode()).hexdigest()
    return f"{spec.name} ({digest[:12]})"
