"""Gated MLPs: the routed experts that live on one rank, shared experts, dense layers.

Decides the storage: gate and up projection are fused (`w13`), experts stacked, so
that a group of rows is two multiplies. Pieces keep their own names: `w1` gate,
`w3` up, `w2` down, `b1`, `b3`, `b2` where experts have biases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from disagmoe.model.conventions import Conventions
from disagmoe.model.deferred import Tape, linear
from disagmoe.model.grouped import grouped_linear
from disagmoe.model.parts import Blueprint, Holder, Piece


def activate(fused: Tensor, rules: Conventions) -> Tensor:
    """Gate and up projection side by side [n, 2 * width] -> [n, width].

    Plain: silu(gate) * up. With a limit, GPT-OSS: gate cut from above, up from both sides, (up + 1) * swish(gate).
    """
    gate, up = fused.chunk(2, dim=-1)
    if rules.activation_limit is None:
        return silu(gate) * up
    gate = gate.clamp(max=rules.activation_limit)
    up = up.clamp(-rules.activation_limit, rules.activation_limit)
    return (up + 1) * (gate * torch.sigmoid(gate * rules.activation_alpha))


class Mlp(Holder):
    """One gated MLP without biases: the fused shared experts, or the MLP of a dense layer."""

    def __init__(self, blueprint: Blueprint, width: int) -> None:
        super().__init__()
        hidden = blueprint.spec.hidden
        self.width = width
        self.w13 = blueprint.parameter(2 * width, hidden)
        self.w2 = blueprint.parameter(hidden, width)

    def forward(self, x: Tensor, tape: Tape | None = None) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        gate, up = linear(x, self.w13, tape=tape).chunk(2, dim=-1)
        return linear(silu(gate) * up, self.w2, tape=tape)

    def pieces(self, prefix: str) -> Iterator[Piece]:
        yield Piece(f"{prefix}w1", self.w13, (slice(0, self.width),))
        yield Piece(f"{prefix}w3", self.w13, (slice(self.width, None),))
        yield Piece(f"{prefix}w2", self.w2)


class GroupedExperts(Holder):
    """The routed experts `experts` (global ids) of one layer."""

    def __init__(self, blueprint: Blueprint, experts: Sequence[int]) -> None:
        super().__init__()
        spec = blueprint.spec
        self.experts = tuple(experts)
        self.rules = blueprint.rules
        self.width = width = spec.expert_width
        number = len(self.experts)
        self.w13 = blueprint.parameter(number, 2 * width, spec.hidden)
        self.w2 = blueprint.parameter(number, spec.hidden, width)
        self.b13 = blueprint.parameter(number, 2 * width) if spec.expert_bias else None
        self.b2 = blueprint.parameter(number, spec.hidden) if spec.expert_bias else None

    def forward(self, x: Tensor, counts: Sequence[int], tape: Tape | None = None) -> Tensor:
        """Rows x [n, hidden] sorted by expert, `counts` per local expert -> [n, hidden]."""
        inner = activate(grouped_linear(x, self.w13, self.b13, counts, tape=tape), self.rules)
        return grouped_linear(inner, self.w2, self.b2, counts, tape=tape)

    def pieces(self, prefix: str) -> Iterator[Piece]:
        gate, up = slice(0, self.width), slice(self.width, None)
        for slot, expert in enumerate(self.experts):
            path = f"{prefix}{expert}."
            yield Piece(f"{path}w1", self.w13, (slot, gate))
            yield Piece(f"{path}w3", self.w13, (slot, up))
            yield Piece(f"{path}w2", self.w2, (slot,))
            if self.b13 is not None and self.b2 is not None:
                yield Piece(f"{path}b1", self.b13, (slot, gate))
                yield Piece(f"{path}b3", self.b13, (slot, up))
                yield Piece(f"{path}b2", self.b2, (slot,))
