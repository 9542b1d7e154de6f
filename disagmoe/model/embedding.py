"""The input embedding. Its gradient is a weight gradient only: phase I has nothing to do but keep it."""

from __future__ import annotations

from torch import Tensor

from disagmoe.model.deferred import Tape, look_up
from disagmoe.model.parts import Blueprint, Part
from disagmoe.model.segment import Saved, run_segment

EMBEDDING_NAME = "embedding.weight"


class EmbeddingPart(Part):
    """Token ids to rows. A tied head holds the same parameter, under the same name."""

    prefix = "embedding."

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.weight = blueprint.parameter(blueprint.spec.vocab, blueprint.spec.hidden)
        self.initialise(blueprint)

    def forward(self, tokens: Tensor, tape: Tape | None = None) -> Tensor:
        """Token ids [t] -> rows [t, hidden]."""
        return look_up(self.weight, tokens, tape=tape)

    def start(self, tokens: Tensor) -> tuple[Tensor, Saved]:
        """Forward with autograd cut. The handle takes the gradient of the rows and returns nothing."""

        def forward(tape: Tape) -> tuple[Tensor, ...]:
            return (self.forward(tokens, tape),)

        (rows,), saved = run_segment(forward)
        return rows, saved
