"""What a step of a peer gives, whoever ran it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from disagmoe.ops import Phase


class Action(NamedTuple):
    """One forward or backward of one micro-batch through one chunk of a rank."""

    phase: Phase
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class NativeStep:
    """One step. `loss` is the mean over the tokens of the global batch, equal on all ranks.

    `grad_norm` is global, before clipping (None without a recipe). `seconds` is this
    rank's wall time from the first micro-batch to the updated weights. `dropped` counts
    token-expert pairs beyond a capacity, over all ranks, layers and micro-batches.
    `actions` are this rank's in the order of their starts, where the peer tells.
    """

    loss: float
    grad_norm: float | None
    seconds: float
    dropped: int = 0
    actions: tuple[Action, ...] = ()
