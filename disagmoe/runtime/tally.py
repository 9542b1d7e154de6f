"""What a step adds up: losses, tokens and the load of every expert.

Decides that everything is counted once: losses where the output head ran, router
losses and expert counts where the attention ran, both in the first forward only.
Sums stay on the device until the step ends; one vector then goes round all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disagmoe.model import Routing
from disagmoe.specs import ModelSpec

_HEAD = ("square_norm", "cross_entropy", "balance", "z", "tokens")


@dataclass(frozen=True)
class Sums:
    """Sums over all ranks.

    `counts` [layers, experts] tokens per expert (0 in dense layers), `dropped`
    [layers] copies of tokens that a full expert turned away; int64 on the host.
    """

    square_norm: float
    cross_entropy: float
    balance: float
    z: float
    tokens: int
    counts: Tensor
    dropped: Tensor


class Tally:
    """The sums of one rank over one step."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        size = len(_HEAD) + spec.layers * (spec.experts + 1)
        self._values = torch.zeros(size, dtype=torch.float64, device=device)
        self._dropped = self._values[len(_HEAD) : len(_HEAD) + spec.layers]
        self._counts = self._values[len(_HEAD) + spec.layers :].view(spec.layers, spec.experts)

    def add_loss(self, cross_entropy: Tensor, tokens: int) -> None:
        """A head's cross entropy, summed over `tokens`."""
        self._values[1] += cross_entropy
        self._values[4] += tokens

    def add_routing(self, layer: int, routing: Routing) -> None:
        """Router losses and expert counts of one forward."""
        self._values[2] += routing.balance
        self._values[3] += routing.z
        self._counts[layer] += routing.counts

    def add_dropped(self, layer: int, copies: int) -> None:
        """Copies of tokens that got no row of their expert's capacity."""
        self._dropped[layer] += copies

    def vector(self, square_norm: float) -> Tensor:
        """Everything in one vector, with this rank's share of the squared gradient norm."""
        self._values[0] = square_norm
        return self._values

    def read(self, summed: Tensor) -> Sums:
        """What a vector says that was summed over all ranks and lies on the host."""
        norm, cross_entropy, balance, z, tokens = summed[: len(_HEAD)].tolist()
        numbers = summed[len(_HEAD) :].round().long()
        layers = self._dropped.shape[0]
        counts = numbers[layers:].view(self._counts.shape)
        return Sums(norm, cross_entropy, balance, z, round(tokens), counts, numbers[:layers])
