"""Training runs on several ranks: what runs on every rank of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from disagmoe.model import LossWeights
from disagmoe.ops import Kind
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.data import Source, Synthetic
from disagmoe.runtime.metrics_log import StepMetrics
from disagmoe.runtime.optimizer import Recipe
from disagmoe.runtime.single import SingleTrainer
from disagmoe.runtime.step import RunOptions
from disagmoe.runtime.trainer import Course, Trainer
from disagmoe.specs import ModelSpec
from disagmoe.train.plan import RingShape, ring_plan
from tests.model.shapes import BASE

RECIPE = Recipe(lr=0.01, min_lr=0.001, warmup=2, steps=6, clip=0.5)
SMALL = replace(BASE, layers=3)


@dataclass(frozen=True)
class Run:
    """A short training run."""

    model: ModelSpec = SMALL
    shape: RingShape = field(default_factory=RingShape)
    steps: int = 3
    batch: int = 6
    seq: int = 5
    microbatches: int = 3
    streams: int = 1
    head: str = "last_f"
    precision: str = "fp64"
    recipe: Recipe = RECIPE
    weights: LossWeights = field(default_factory=lambda: LossWeights(0.01, 0.001))
    bias_rate: float = 0.0
    recompute: tuple[Kind, ...] = ()
    folder: Path | None = None
    save_every: int = 0
    keep: int = 3
    resume: str = "auto"
    seed: int = 3
    show_every: int = 100
    peak_device: str | None = None

    @property
    def source(self) -> Source:
        return Synthetic(self.model.vocab, self.seq, self.seed)

    @property
    def options(self) -> RunOptions:
        return RunOptions(
            seed=self.seed,
            precision=self.precision,
            weights=self.weights,
            recipe=self.recipe,
            bias_rate=self.bias_rate,
            timeout_s=20.0,
        )

    def trainer(self, context: Context) -> Trainer:
        plan = ring_plan(
            self.model,
            self.shape,
            microbatches=self.microbatches,
            sequences=self.batch,
            compute_streams=self.streams,
            head=self.head,
            recompute=frozenset(self.recompute),
        )
        course = Course(
            self.steps,
            self.folder,
            self.save_every,
            self.keep,
            self.resume,
            show_every=self.show_every,
            screen=False,
            peak_device=self.peak_device,
        )
        cut = Cut(self.batch, self.seq, self.shape.dp, self.microbatches)
        return Trainer(context, plan, self.model, cut, self.options, self.source, course)

    def single(self) -> SingleTrainer:
        return SingleTrainer(
            self.model,
            self.recipe,
            self.source,
            batch=self.batch,
            seed=self.seed,
            precision=self.precision,
            weights=self.weights,
            bias_rate=self.bias_rate,
        )


@dataclass(frozen=True)
class Ran:
    """What one rank has after a run: its metrics and, by global name, its values before and after."""

    history: list[StepMetrics]
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    @property
    def losses(self) -> list[float]:
        return [metrics.loss for metrics in self.history]


def train(context: Context, run: Run) -> Ran:
    """Run it; collective."""
    trainer = run.trainer(context)
    before = {name: value.clone() for name, value in trainer.runner.values().items()}
    history = trainer.run()
    after = {name: value.clone() for name, value in trainer.runner.values().items()}
    trainer.close()
    return Ran(history, before, after)


def train_single(run: Run) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final values of the same run in one process."""
    trainer = run.single()
    steps = [trainer.step() for _ in range(run.steps)]
    return [s.report.loss for s in steps], [s.grad_norm for s in steps], trainer.model.values()


def same_bits(values: list[dict[str, Tensor]]) -> set[str]:
    """Names that several ranks hold; asserts that all holders have the same bits."""
    first: dict[str, Tensor] = {}
    shared: set[str] = set()
    for of_rank in values:
        for name, value in of_rank.items():
            if name in first:
                shared.add(name)
                assert torch.equal(first[name], value), name
            first.setdefault(name, value)
    return shared
