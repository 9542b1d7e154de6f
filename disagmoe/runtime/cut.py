"""How the global batch is cut: replicas, micro-batches, ranks, tokens.

Decides that every sequence is used exactly once: micro-batches (of all replicas)
get near-equal runs of consecutive sequences, and so do the ranks of an attention
group within one. Nothing is dropped, padded or counted twice; a rank may get no
sequence at all. Sequences are never split between ranks or micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from disagmoe.runtime.merge import near_equal

Fetch = Callable[[range], Tensor]
"""Sequences of one step by their number in the global batch -> token ids [n, seq + 1]."""


@dataclass(frozen=True)
class Cut:
    """`sequences` of `seq` tokens over `replicas` x `microbatches` micro-batches."""

    sequences: int
    seq: int
    replicas: int
    microbatches: int

    def __post_init__(self) -> None:
        for label, value in (("global batch", self.sequences), ("seq", self.seq), ("micro-batches", self.microbatches)):
            if value < 1:
                raise ValueError(f"{label} {value}: must be at least 1")
        pieces = self.replicas * self.microbatches
        if self.sequences < pieces:
            raise ValueError(
                f"a global batch of {self.sequences} sequences cannot be cut into {pieces} micro-batches "
                f"({self.replicas} replicas x {self.microbatches}): each needs at least one sequence"
            )

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.sequences * self.seq

    def sequences_of(self, replica: int, microbatch: int) -> range:
        """The sequences of one micro-batch."""
        sizes = near_equal(self.sequences, self.replicas * self.microbatches)
        index = replica * self.microbatches + microbatch
        first = sum(sizes[:index])
        return range(first, first + sizes[index])

    def shares(self, replica: int, microbatch: int, ranks: int) -> tuple[int, ...]:
        """Tokens of a micro-batch on each of `ranks` attention ranks: whole sequences."""
        return tuple(n * self.seq for n in near_equal(len(self.sequences_of(replica, microbatch)), ranks))


class StepBatch:
    """The tokens of one step; fetches what a rank asks for and nothing else."""

    def __init__(self, cut: Cut, fetch: Fetch) -> None:
        self.cut = cut
        self._fetch = fetch

    def inputs(self, replica: int, microbatch: int, tokens: range) -> Tensor:
        """Token ids [t] of tokens numbered within a micro-batch."""
        return self._window(replica, microbatch, tokens, 0)

    def targets(self, replica: int, microbatch: int, tokens: range) -> Tensor:
        """The token after each of these tokens [t]."""
        return self._window(replica, microbatch, tokens, 1)

    def _window(self, replica: int, microbatch: int, tokens: range, shift: int) -> Tensor:
        seq = self.cut.seq
        if not len(tokens):
            return torch.empty(0, dtype=torch.int64)
        first, last = tokens.start // seq, -(-tokens.stop // seq)
        start = self.cut.sequences_of(replica, microbatch).start
        rows = self._fetch(range(start + first, start + last))
        flat = rows[:, shift : shift + seq].reshape(-1)
        return flat[tokens.start - first * seq : tokens.stop - first * seq]
