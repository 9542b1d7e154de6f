"""Final norm, output matrix and cross entropy, in chunks of tokens.

The logits of all tokens never exist together: forward keeps one log-partition
per token, backward makes the logits of a chunk again. The loss is a sum over
tokens; whoever knows the global batch divides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from disagmoe.model.deferred import Tape, compute_dtype, exact, give, linear
from disagmoe.model.embedding import EMBEDDING_NAME
from disagmoe.model.norm import RMSNorm
from disagmoe.model.parts import Blueprint, Part, Piece, accumulation_dtype
from disagmoe.model.segment import Saved, run_segment

CHUNK_TOKENS = 4096


class HeadPart(Part):
    """Final norm and output matrix. A tied one is a copy of the embedding: their gradients add up."""

    prefix = "head."

    def __init__(self, blueprint: Blueprint, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        super().__init__()
        if chunk_tokens <= 0:
            raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
        spec = blueprint.spec
        self.tied = spec.tied
        self.chunk_tokens = chunk_tokens
        self.norm = RMSNorm(blueprint, spec.hidden)
        self.weight = blueprint.parameter(spec.vocab, spec.hidden)
        self.initialise(blueprint)

    def pieces(self, prefix: str) -> Iterator[Piece]:
        yield from self.norm.pieces(f"{prefix}norm.")
        yield Piece(EMBEDDING_NAME if self.tied else f"{prefix}weight", self.weight)

    def logits(self, x: Tensor) -> Tensor:
        """Rows [t, hidden] -> logits [t, vocab]."""
        return linear(self.norm(x), self.weight)

    def forward(self, x: Tensor, targets: Tensor, tape: Tape | None = None) -> Tensor:
        """Rows x [t, hidden], next tokens `targets` [t] -> cross entropy summed over tokens, in at least fp32."""
        normed = self.norm(x)
        arguments = (normed, self.weight, targets, tape, compute_dtype(normed), self.chunk_tokens)
        loss: Tensor = _CrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        return loss

    def start(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Saved]:
        """Forward with autograd cut. The handle takes the gradient of the sum (1 / tokens of the global batch)."""

        def forward(tape: Tape, leaf: Tensor) -> tuple[Tensor, ...]:
            return (self.forward(leaf, targets, tape),)

        (loss,), saved = run_segment(forward, x)
        return loss, saved


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, tape: Tape | None, dtype: torch.dtype, chunk: int
    ) -> Tensor:
        wide = accumulation_dtype(dtype)
        with exact(x):
            operand, matrix = x.to(dtype), weight.to(dtype)
            partitions = torch.empty(x.shape[0], dtype=wide, device=x.device)
            loss = torch.zeros((), dtype=wide, device=x.device)
            for part in _chunks(x.shape[0], chunk):
                logits = (operand[part] @ matrix.t()).to(wide)
                partitions[part] = logits.logsumexp(-1)
                loss += (partitions[part] - logits.gather(1, targets[part].unsqueeze(1)).squeeze(1)).sum()
            ctx.save_for_backward(operand, weight, targets, partitions)
            ctx.tape, ctx.chunk, ctx.input_dtype = tape, chunk, x.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets, partitions = ctx.saved_tensors
        x = x.detach()  # a deferred gradient must not keep the graph alive
        chunk, saved = ctx.chunk, (x, weight, targets, partitions, grad)
        later = ctx.tape is not None and ctx.tape.deferring
        with exact(x):
            matrix = weight.to(x.dtype)
            grad_x = torch.empty_like(x)
            grad_weight = None if later else torch.zeros_like(weight, dtype=partitions.dtype)
            for part in _chunks(x.shape[0], chunk):
                error = _error(saved, part)
                grad_x[part] = error @ matrix
                if grad_weight is not None:
                    grad_weight += error.t() @ x[part]
            # Deferred, the logits are made once more: keeping them is what chunks avoid.
            ready = (lambda: grad_weight) if grad_weight is not None else (lambda: _weight_gradient(saved, chunk))
            given = give(ctx.tape, weight, ready)
        return grad_x.to(ctx.input_dtype), given, None, None, None, None


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    for start in range(0, tokens, chunk):
        yield slice(start, min(start + chunk, tokens))


def _error(saved: tuple[Tensor, ...], part: slice) -> Tensor:
    """Gradient of the logits of one chunk: (softmax - one-hot) times the gradient of the loss."""
    x, weight, targets, partitions, grad = saved
    logits = (x[part] @ weight.to(x.dtype).t()).to(partitions.dtype)
    error = (logits - partitions[part].unsqueeze(1)).exp()
    error[torch.arange(error.shape[0], device=error.device), targets[part]] -= 1
    return (error * grad).to(x.dtype)


def _weight_gradient(saved: tuple[Tensor, ...], chunk: int) -> Tensor:
    x, weight, _, partitions, _ = saved
    total = torch.zeros_like(weight, dtype=partitions.dtype)
    for part in _chunks(x.shape[0], chunk):
        total += _error(saved, part).t() @ x[part]
    return total
