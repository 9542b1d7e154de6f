"""The whole model in one process, from the same parts: the truth distributed runs are compared with.

Nothing is cut: plain autograd through all parts. A name that several parts hold
is one tensor here, so its gradient is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from disagmoe.model.balance import LossWeights
from disagmoe.model.block import AttentionPart, ExpertPart
from disagmoe.model.conventions import Conventions
from disagmoe.model.embedding import EmbeddingPart
from disagmoe.model.head import CHUNK_TOKENS, HeadPart
from disagmoe.model.parts import Blueprint, Part
from disagmoe.model.router import Routing
from disagmoe.specs import ModelSpec

Batch = tuple[Tensor, Tensor]
"""Token ids and next tokens, both [sequences, seq]."""


@dataclass(frozen=True)
class LossReport:
    """What a batch gave. `loss` = cross_entropy + weighted router losses.

    `cross_entropy` is a mean over all tokens of the batch; `balance` a mean over
    its sequences and `z` over its tokens, both summed over layers; `counts` maps
    an MoE layer to the tokens of each expert [E].
    """

    loss: float
    cross_entropy: float
    balance: float
    z: float
    counts: dict[int, Tensor]


class ReferenceModel(nn.Module):
    """Embedding, all layers and head of `spec`."""

    def __init__(
        self,
        spec: ModelSpec,
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        *,
        device: torch.device | str = "cpu",
        conventions: Conventions | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__()
        self.spec = spec
        blueprint = Blueprint(spec, dtype, torch.device(device), seed, conventions)
        self.embedding = EmbeddingPart(blueprint)
        self.attention_parts = nn.ModuleList(AttentionPart(blueprint, layer) for layer in range(spec.layers))
        self.expert_parts = nn.ModuleList(ExpertPart(blueprint, layer) for layer in range(spec.layers))
        self.head = HeadPart(blueprint, chunk_tokens=chunk_tokens)
        if spec.tied:
            self.head.weight = self.embedding.weight
        for attention, expert in self.layer_parts():
            if attention.ffn_norm is not None:
                attention.ffn_norm = expert.ffn_norm

    def layer_parts(self) -> list[tuple[AttentionPart, ExpertPart]]:
        """The two halves of every layer."""
        pairs = zip(self.attention_parts, self.expert_parts, strict=True)
        return [(a, f) for a, f in pairs if isinstance(a, AttentionPart) and isinstance(f, ExpertPart)]

    def parts(self) -> list[Part]:
        """Every part, in the order of the forward pass."""
        halves: list[Part] = [half for pair in self.layer_parts() for half in pair]
        return [self.embedding, *halves, self.head]

    def values(self) -> dict[str, Tensor]:
        """Global name -> view of the parameter or buffer, each once."""
        return {name: value for part in self.parts() for name, value in part.values().items()}

    def gradients(self) -> dict[str, Tensor]:
        """Global name -> view of the gradient; names without a gradient are absent."""
        return {name: value for part in self.parts() for name, value in part.gradients().items()}

    def trunk(self, tokens: Tensor) -> tuple[Tensor, dict[int, Routing]]:
        """Token ids [sequences, seq] -> rows [t, hidden] before the head, and the routing of every MoE layer."""
        seq = tokens.shape[1]
        x: Tensor = self.embedding(tokens.flatten())
        routings: dict[int, Routing] = {}
        for layer, (attention, expert) in enumerate(self.layer_parts()):
            output = attention.forward(x, seq)
            if output.routing is None:
                x = expert.forward(output.x)
            else:
                routings[layer] = output.routing
                x = expert.forward(output.x, output.routing.ids, output.routing.weights)
        return x, routings

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [sequences, seq] -> logits [sequences, seq, vocab]."""
        x, _ = self.trunk(tokens)
        return self.head.logits(x).view(*tokens.shape, self.spec.vocab)

    def accumulate(self, micro_batches: Sequence[Batch], weights: LossWeights | None = None) -> LossReport:
        """Add the gradients of the loss of the whole batch to `.grad`, one micro-batch after the other.

        The loss is a mean over all tokens (sequences, for balance) of the batch,
        however it is cut. Clear `.grad` beforehand for the gradients alone.
        """
        weights = weights or LossWeights()
        tokens = sum(ids.numel() for ids, _ in micro_batches)
        sequences = sum(ids.shape[0] for ids, _ in micro_batches)
        sums = {"cross_entropy": 0.0, "balance": 0.0, "z": 0.0}
        counts: dict[int, Tensor] = {}
        for ids, targets in micro_batches:
            x, routings = self.trunk(ids)
            cross_entropy = self.head.forward(x, targets.flatten())
            loss = cross_entropy / tokens
            for layer, routing in routings.items():
                loss = loss + weights.balance_scale(sequences) * routing.balance + weights.z_scale(tokens) * routing.z
                sums["balance"] += routing.balance.item()
                sums["z"] += routing.z.item()
                counts[layer] = counts[layer] + routing.counts if layer in counts else routing.counts
            torch.autograd.backward(loss)
            sums["cross_entropy"] += cross_entropy.item()
        mean, balance, z = sums["cross_entropy"] / tokens, sums["balance"] / sequences, sums["z"] / tokens
        return LossReport(mean + weights.balance * balance + weights.z * z, mean, balance, z, counts)
