"""An output head that is spread by vocabulary: final norm, some rows of the output matrix, and the part of the softmax.

Decides what the shards tell each other: per token the largest logit, the sum of
exponentials below it, and the logit of the target where the shard has it. With the
statistics of all shards every one of them knows the loss and the error of its own
logits. The logits of all tokens never exist together, as in `disagmoe.model.head`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from disagmoe.model import Blueprint, Part, Piece
from disagmoe.model.deferred import accumulate, compute_dtype, exact
from disagmoe.model.head import CHUNK_TOKENS
from disagmoe.model.init import initial_value
from disagmoe.model.norm import RMSNorm
from disagmoe.model.parts import accumulation_dtype

WEIGHT_NAME = "head.weight"
STATISTICS = 3


@dataclass(frozen=True)
class Fragment(Piece):
    """Rows `first` and following of a parameter with `rows` rows in all; `tensor[index]` has only those."""

    first: int = 0
    rows: int = 0

    @property
    def label(self) -> str:
        return f"{self.name}[{self.first}:{self.first + self.value.shape[0]}]"


class HeadShard(Part):
    """The final norm and the rows `vocabulary` of the output matrix."""

    prefix = "head."

    def __init__(self, blueprint: Blueprint, vocabulary: range, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        super().__init__()
        if blueprint.spec.tied:
            raise ValueError("an output matrix tied to the embedding cannot be spread over several workers")
        self.vocabulary = vocabulary
        self.chunk_tokens = chunk_tokens
        self._vocab = blueprint.spec.vocab
        self.norm = RMSNorm(blueprint, blueprint.spec.hidden)
        self.weight = blueprint.parameter(len(vocabulary), blueprint.spec.hidden)
        self.initialise(blueprint)

    def pieces(self, prefix: str) -> Iterator[Piece]:
        yield from self.norm.pieces(f"{prefix}norm.")
        yield Fragment(f"{prefix}weight", self.weight, first=self.vocabulary.start, rows=self._vocab)

    def initialise(self, blueprint: Blueprint) -> None:
        """As a whole head's: a shard starts with its rows of the same matrix."""
        with torch.no_grad():
            self.norm.weight.fill_(1.0)
            if blueprint.seed is None:
                self.weight.zero_()
                return
            shape = (self._vocab, blueprint.spec.hidden)
            whole = initial_value(WEIGHT_NAME, shape, seed=blueprint.seed, layers=blueprint.spec.layers)
            self.weight.copy_(whole[self.vocabulary.start : self.vocabulary.stop])

    def start(self, x: Tensor, targets: Tensor) -> tuple[Tensor, SavedShard]:
        """Rows x [t, hidden], next tokens [t] -> statistics [3, t] for the other shards, the handle for backward."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            normed = self.norm(leaf)
        saved = SavedShard(self, leaf, normed, targets, compute_dtype(normed))
        return saved.statistics(), saved


class SavedShard:
    """What a shard keeps between its forward and its backward pass. Used once."""

    def __init__(self, head: HeadShard, leaf: Tensor, normed: Tensor, targets: Tensor, dtype: torch.dtype) -> None:
        self._head = head
        self._leaf = leaf
        self._normed = normed
        self._operand = normed.detach().to(dtype)
        vocabulary = head.vocabulary
        self._here = (targets >= vocabulary.start) & (targets < vocabulary.stop)
        self._column = torch.where(self._here, targets - vocabulary.start, 0).unsqueeze(1)

    @torch.no_grad()
    def statistics(self) -> Tensor:
        """[3, t]: largest logit, sum of exp(logit - largest), logit of the target (0 where another shard has it)."""
        found = self._operand.new_zeros(STATISTICS, self._operand.shape[0], dtype=self._wide)
        for part, logits in self._logits():
            largest = logits.amax(1)
            found[0, part] = largest
            found[1, part] = (logits - largest.unsqueeze(1)).exp().sum(1)
            found[2, part] = logits.gather(1, self._column[part]).squeeze(1) * self._here[part]
        return found

    @torch.no_grad()
    def backward(self, statistics: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Statistics [shards, 3, t] of all shards; `scale` is the gradient of the summed loss.

        Returns the loss summed over tokens and this shard's part of the gradient of
        x; adds the gradients of its parameters.
        """
        largest = statistics[:, 0].amax(0)
        partition = largest + ((statistics[:, 0] - largest).exp() * statistics[:, 1]).sum(0).log()
        loss = (partition - statistics[:, 2].sum(0)).sum()
        matrix = self._head.weight.to(self._operand.dtype)
        grad_normed = torch.empty_like(self._operand)
        grad_weight = torch.zeros_like(self._head.weight, dtype=self._wide)
        for part, logits in self._logits():
            error = (logits - partition[part].unsqueeze(1)).exp()
            error.scatter_add_(1, self._column[part], -self._here[part].unsqueeze(1).to(error.dtype))
            error = (error * scale).to(self._operand.dtype)
            grad_normed[part] = error @ matrix
            grad_weight += error.t() @ self._operand[part]
        accumulate(self._head.weight, grad_weight)
        torch.autograd.backward([self._normed], [grad_normed.to(self._normed.dtype)])
        assert self._leaf.grad is not None
        return loss, self._leaf.grad

    @property
    def _wide(self) -> torch.dtype:
        return accumulation_dtype(self._operand.dtype)

    def _logits(self) -> Iterator[tuple[slice, Tensor]]:
        """The shard's logits, some tokens at a time."""
        step = self._head.chunk_tokens
        matrix = self._head.weight.detach().to(self._operand.dtype)
        for first in range(0, self._operand.shape[0], step):
            part = slice(first, first + step)
            with exact(self._operand):
                logits = (self._operand[part] @ matrix.t()).to(self._wide)
            yield part, logits
