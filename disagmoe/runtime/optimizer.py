"""AdamW on this rank's shards, gradient clipping by global norm, the learning-rate schedule.

Decides the arithmetic of an update: that of `torch.optim.AdamW` and
`torch.nn.utils.clip_grad_norm_`, applied to shards of flat buckets. Weight decay
applies to matrices only (`buckets.decays`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from disagmoe.runtime.buckets import Bucket

CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters. Warm-up is linear to `lr`, then a half cosine to `min_lr` at `steps`; `clip` 0: none."""

    lr: float = 3e-3
    min_lr: float = 3e-4
    warmup: int = 10
    steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        for label, value in (("lr", self.lr), ("min_lr", self.min_lr), ("warmup", self.warmup), ("clip", self.clip)):
            if not value >= 0:
                raise ValueError(f"{label}={value}: must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: both must lie in [0, 1)")

    def lr_at(self, step: int) -> float:
        """Learning rate of step 0, 1, ..."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * done))

    def clip_factor(self, norm: float) -> float:
        """Factor on all gradients of this global norm."""
        return min(1.0, self.clip / (norm + CLIP_EPSILON)) if self.clip else 1.0


class ShardedAdamW:
    """Moments of the shards of `buckets`; `updates` counts the updates made."""

    def __init__(self, buckets: Iterable[Bucket], recipe: Recipe) -> None:
        self.buckets = tuple(buckets)
        self.recipe = recipe
        self.updates = 0
        self.first = [torch.zeros_like(b.values[b.shard]) for b in self.buckets]
        self.second = [torch.zeros_like(b.values[b.shard]) for b in self.buckets]

    @torch.no_grad()
    def update(self, factor: float) -> None:
        """One AdamW update of all shards with gradients times `factor`."""
        lr, (beta1, beta2) = self.recipe.lr_at(self.updates), self.recipe.betas
        self.updates += 1
        unbiased1, unbiased2 = 1 - beta1**self.updates, 1 - beta2**self.updates
        for bucket, first, second in zip(self.buckets, self.first, self.second, strict=True):
            values = bucket.values[bucket.shard]
            gradient = bucket.gradients[bucket.shard] * factor
            _decayed(bucket, values).mul_(1 - lr * self.recipe.weight_decay)
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            divisor = (second.sqrt() / math.sqrt(unbiased2)).add_(self.recipe.epsilon)
            values.addcdiv_(first, divisor, value=-lr / unbiased1)


def _decayed(bucket: Bucket, shard: Tensor) -> Tensor:
    """The part of a shard that takes weight decay."""
    return shard[: max(0, bucket.decayed - bucket.shard.start)]
