"""RMSNorm, computed in at least fp32 and returned in the type of its input."""

from __future__ import annotations

import torch
from torch import Tensor

from disagmoe.model.parts import Blueprint, Holder, accumulation_dtype


class RMSNorm(Holder):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension (`width` entries)."""

    def __init__(self, blueprint: Blueprint, width: int) -> None:
        super().__init__()
        self.weight = blueprint.parameter(width)
        self.epsilon = blueprint.rules.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        dtype = accumulation_dtype(x.dtype)
        wide = x.to(dtype)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * self.weight.to(dtype)).to(x.dtype)
