"""Training in one process: the reference model, plain autograd and torch's own AdamW.

Decides nothing of its own: same data, schedule, clipping and weight decay as a
distributed run, by other code. What a distributed run is compared with.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from disagmoe.model import LossReport, LossWeights, ReferenceModel, update_correction_bias
from disagmoe.runtime.buckets import decays
from disagmoe.runtime.data import Source
from disagmoe.runtime.metrics_log import StepMetrics, expert_load, open_logs
from disagmoe.runtime.optimizer import CLIP_EPSILON, Recipe
from disagmoe.runtime.step import PRECISIONS, RunOptions
from disagmoe.runtime.trainer import Course
from disagmoe.specs import ModelSpec


@dataclass(frozen=True)
class SingleStep:
    """One step: its losses and the gradient norm before clipping."""

    report: LossReport
    grad_norm: float


class SingleTrainer:
    """One process that trains the whole model."""

    def __init__(
        self,
        spec: ModelSpec,
        recipe: Recipe,
        source: Source,
        *,
        batch: int,
        seed: int = 0,
        precision: str = "fp32",
        weights: LossWeights | None = None,
        bias_rate: float = 0.0,
    ) -> None:
        types = PRECISIONS[precision]
        if types.autocast is not None:
            raise ValueError(f"precision={precision}: the single-process trainer runs fp32 or fp64")
        self.model = ReferenceModel(spec, seed, types.parameters)
        self._recipe, self._source, self._batch = recipe, source, batch
        self._weights = weights or LossWeights()
        self._bias_rate = bias_rate
        self._optimizer = torch.optim.AdamW(
            self._groups(recipe.weight_decay), lr=recipe.lr, betas=recipe.betas, eps=recipe.epsilon
        )
        self.steps = 0

    def step(self) -> SingleStep:
        """Train on the next batch."""
        begin = self.steps * self._batch
        tokens = self._source.samples(range(begin, begin + self._batch))
        self._optimizer.zero_grad()
        report = self.model.accumulate([(tokens[:, :-1], tokens[:, 1:])], self._weights)
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self._recipe.clip:
            factor = min(1.0, self._recipe.clip / (float(norm) + CLIP_EPSILON))
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.lr_at(self.steps)
        self._optimizer.step()
        self._move_biases(report)
        self.steps += 1
        return SingleStep(report, float(norm))

    def _groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Parameters with and without weight decay, each once."""
        split: dict[bool, dict[int, nn.Parameter]] = {True: {}, False: {}}
        for part in self.model.parts():
            for piece in part.all_pieces():
                if isinstance(piece.tensor, nn.Parameter):
                    split[decays(piece.name, piece.tensor)][id(piece.tensor)] = piece.tensor
        return [
            {"params": list(split[True].values()), "weight_decay": weight_decay},
            {"params": list(split[False].values()), "weight_decay": 0.0},
        ]

    def _move_biases(self, report: LossReport) -> None:
        for layer, (part, _) in enumerate(self.model.layer_parts()):
            bias = None if part.router is None else part.router.correction_bias
            if bias is not None and self._bias_rate:
                update_correction_bias(bias, report.counts[layer], self._bias_rate)


def train_single(
    spec: ModelSpec, options: RunOptions, source: Source, course: Course, batch: int, seq: int
) -> list[StepMetrics]:
    """A whole run in this process: logs, no checkpoints."""
    assert options.recipe is not None
    trainer = SingleTrainer(
        spec,
        options.recipe,
        source,
        batch=batch,
        seed=options.seed,
        precision=options.precision,
        weights=options.weights,
        bias_rate=options.bias_rate,
    )
    history: list[StepMetrics] = []
    logs = open_logs(course.folder, 0, course.steps, course.show_every, screen=course.screen)
    for step in range(course.steps):
        begin_s = time.perf_counter()
        found = trainer.step()
        took_s = time.perf_counter() - begin_s
        report = found.report
        busiest, idle = expert_load(report.counts)
        metrics = StepMetrics(
            step=step,
            loss=report.loss,
            cross_entropy=report.cross_entropy,
            balance=report.balance,
            z=report.z,
            grad_norm=found.grad_norm,
            lr=options.recipe.lr_at(step),
            tokens=batch * seq,
            step_s=took_s,
            tokens_per_s=batch * seq / took_s,
            expert_load=busiest,
            idle_experts=idle,
        )
        history.append(metrics)
        for log in logs:
            log.write(metrics)
    for log in logs:
        log.close()
    return history
