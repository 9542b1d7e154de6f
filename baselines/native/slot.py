"""A window on a peer's parameter under our global name.

Decides how values and gradients of ours are read from and written to storage that a
peer lays out in its own way (fused, stacked, transposed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from disagmoe.model.init import initial_value
from disagmoe.specs import ModelSpec


def _whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Slot:
    """One parameter of ours, of `shape`: the window `of` on the storage of a peer's parameter."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    of: Callable[[Tensor], Tensor] = _whole

    @classmethod
    def plain(cls, parameter: nn.Parameter) -> Slot:
        """A parameter that is stored as ours is."""
        return cls(parameter, tuple(parameter.shape))

    def value(self) -> Tensor:
        """A copy of the value, in our shape."""
        return self.of(self.parameter.detach()).reshape(self.shape).clone()

    def gradient(self) -> Tensor:
        """A copy of the gradient, in our shape; Megatron's DDP keeps its own in `main_grad`."""
        gradient: Tensor | None = getattr(self.parameter, "main_grad", self.parameter.grad)
        if gradient is None:
            return torch.zeros(self.shape, dtype=self.parameter.dtype)
        return self.of(gradient).reshape(self.shape).clone()

    @torch.no_grad()
    def fill(self, value: Tensor) -> None:
        """Overwrite the value."""
        window = self.of(self.parameter.detach())
        window.copy_(value.reshape(window.shape))

    def start(self, name: str, spec: ModelSpec, seed: int) -> Tensor:
        """What our own model starts with: a function of the seed and the global name, whatever the rank."""
        return initial_value(name, self.shape, seed=seed, layers=spec.layers)
