"""How a model is cut: parts that one worker holds, and the global name of every parameter.

Decides the naming. A part stores its tensors as its kernels want them (experts
stacked, gate and up projections fused); to everybody else a parameter is a
*piece*: a global name such as `layers.3.experts.17.w1` and a view of the storage.
Initial values, gradients, checkpoints and comparisons go by global name. A name
that several parts hold (an FFN norm, a tied embedding) is one parameter: its
gradient is the sum over all parts that hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from disagmoe.model.conventions import Conventions, conventions_of
from disagmoe.model.init import initial_value
from disagmoe.specs import ModelSpec

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Blueprint:
    """What every part is built from.

    `seed` None leaves parameters at zero (to be loaded); on the `meta` device
    nothing is filled. `conventions` default to those of the model's family.
    """

    spec: ModelSpec
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int | None = 0
    conventions: Conventions | None = None

    @property
    def rules(self) -> Conventions:
        """The conventions in force."""
        return conventions_of(self.spec) if self.conventions is None else self.conventions

    @property
    def accumulation(self) -> torch.dtype:
        """The type of norms, routing, softmax and sums: at least fp32."""
        return accumulation_dtype(self.dtype)

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter."""
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=self.device))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Piece:
    """One parameter under its global name: `tensor[index]`."""

    name: str
    tensor: Tensor
    index: Index = ()

    @property
    def value(self) -> Tensor:
        """A view of the storage; writing to it writes the parameter."""
        return self.tensor.detach()[self.index]

    @property
    def gradient(self) -> Tensor | None:
        """A view of the gradient, None where there is none (yet)."""
        return None if self.tensor.grad is None else self.tensor.grad[self.index]


class Holder(nn.Module):
    """A module whose parameters and persistent buffers are pieces, named by their path."""

    def pieces(self, prefix: str) -> Iterator[Piece]:
        """Every piece of this module, `prefix` before each name."""
        for name, parameter in self.named_parameters(recurse=False):
            yield Piece(prefix + name, parameter)
        for name, buffer in self.named_buffers(recurse=False):
            if name not in self._non_persistent_buffers_set:
                yield Piece(prefix + name, buffer)
        for name, child in self.named_children():
            if isinstance(child, Holder):
                yield from child.pieces(f"{prefix}{name}.")


class Part(Holder):
    """What one worker holds of the embedding, the head or one half of a layer."""

    prefix = ""

    def all_pieces(self) -> list[Piece]:
        """Every piece of this part under its global name, in a fixed order."""
        return list(self.pieces(self.prefix))

    def values(self) -> dict[str, Tensor]:
        """Global name -> view of the parameter or buffer."""
        return {piece.name: piece.value for piece in self.all_pieces()}

    def gradients(self) -> dict[str, Tensor]:
        """Global name -> view of the gradient; names without a gradient are absent."""
        found = ((piece.name, piece.gradient) for piece in self.all_pieces())
        return {name: gradient for name, gradient in found if gradient is not None}

    def fill_gradients(self) -> None:
        """Give a zero gradient to every parameter that has none, so that every rank joins every reduction."""
        for parameter in self.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def initialise(self, blueprint: Blueprint) -> None:
        """Fill every piece with its starting value (zeros without a seed, nothing on `meta`)."""
        if blueprint.device.type == "meta":
            return
        with torch.no_grad():
            for piece in self.all_pieces():
                if blueprint.seed is None:
                    piece.value.zero_()
                else:
                    shape = piece.value.shape
                    piece.value.copy_(
                        initial_value(piece.name, shape, seed=blueprint.seed, layers=blueprint.spec.layers)
                    )
