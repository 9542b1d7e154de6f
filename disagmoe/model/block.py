"""The two halves of a layer, cut where a disaggregated run cuts it.

`AttentionPart` is what an attention worker does: x + attention(norm(x)), then the
FFN norm for the router and the routing. `ExpertPart` is what an FFN worker does
with the rows it receives: the FFN norm again, its own experts, their sum weighted
by the gates; on rows whose *home* it is also the shared experts (or the dense MLP)
and the residual. Added over the workers that got a copy of a row, its results are
the row after the layer. Only the worker at home adds the residual.

Three gradients meet at the attention output: from the rows that were sent, from
the residual inside them, and from the router through the gate weights. The first
two come back together as the gradient of `x` (added over all copies), the third as
that of `weights`. The FFN norm exists in both halves under one global name: its
gradient is the sum of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from disagmoe.model.attention import attention_of
from disagmoe.model.deferred import Tape
from disagmoe.model.experts import GroupedExperts, Mlp
from disagmoe.model.norm import RMSNorm
from disagmoe.model.parts import Blueprint, Part, accumulation_dtype
from disagmoe.model.router import Router, Routing
from disagmoe.model.segment import Saved, run_segment


@dataclass(frozen=True)
class AttentionOutput:
    """Rows x [t, hidden] after attention and its residual; their routing (None in a dense layer)."""

    x: Tensor
    routing: Routing | None


class AttentionPart(Part):
    """Attention, its norm, and in an MoE layer the FFN norm and the router."""

    def __init__(self, blueprint: Blueprint, layer: int) -> None:
        super().__init__()
        self.prefix = f"layers.{layer}."
        moe = blueprint.spec.is_moe(layer)
        self.attention_norm = RMSNorm(blueprint, blueprint.spec.hidden)
        self.attention = attention_of(blueprint, layer)
        self.ffn_norm = RMSNorm(blueprint, blueprint.spec.hidden) if moe else None
        self.router = Router(blueprint) if moe else None
        self.initialise(blueprint)

    def forward(self, x: Tensor, seq: int, tape: Tape | None = None, chosen: Tensor | None = None) -> AttentionOutput:
        """Rows x [t, hidden] of t / seq whole sequences. `chosen` [t, k] repeats an earlier choice of experts."""
        if x.shape[0] % seq:
            raise ValueError(f"{x.shape[0]} tokens are no whole number of sequences of {seq}")
        x = x + self.attention(self.attention_norm(x), seq, tape)
        if self.router is None or self.ffn_norm is None:
            return AttentionOutput(x, None)
        return AttentionOutput(x, self.router(self.ffn_norm(x), seq, tape, chosen))

    def start(self, x: Tensor, seq: int, chosen: Tensor | None = None) -> tuple[AttentionOutput, Saved]:
        """Forward with autograd cut at both ends.

        The handle takes the gradients (x, weights, balance, z), in a dense layer
        (x), and returns that of the input.
        """
        routing: list[Routing] = []

        def forward(tape: Tape, leaf: Tensor) -> tuple[Tensor, ...]:
            output = self.forward(leaf, seq, tape, chosen)
            if output.routing is None:
                return (output.x,)
            routing.append(output.routing)
            return output.x, output.routing.weights, output.routing.balance, output.routing.z

        (out, *rest), saved = run_segment(forward, x)
        if not rest:
            return AttentionOutput(out, None), saved
        weights, balance, z = rest
        return AttentionOutput(out, replace(routing[0], weights=weights, balance=balance, z=z)), saved


class ExpertPart(Part):
    """FFN norm, the local routed experts, shared experts or dense MLP, residual.

    `experts` are the global ids of the local experts, ascending; None = all.
    """

    slots: Tensor

    def __init__(self, blueprint: Blueprint, layer: int, experts: Sequence[int] | None = None) -> None:
        super().__init__()
        spec = blueprint.spec
        self.prefix = f"layers.{layer}."
        self.layer = layer
        self.ffn_norm = RMSNorm(blueprint, spec.hidden)
        self.experts: GroupedExperts | None = None
        self.shared: Mlp | None = None
        self.dense: Mlp | None = None
        if not spec.is_moe(layer):
            self.dense = Mlp(blueprint, spec.dense_width)
        else:
            local = _checked(range(spec.experts) if experts is None else experts, spec.experts)
            self.experts = GroupedExperts(blueprint, local)
            self.shared = Mlp(blueprint, spec.shared_width) if spec.shared_width else None
            # Place of each global expert among the local ones; the one entry too many serves id -1.
            slots = torch.full((spec.experts + 1,), len(local), dtype=torch.int64)
            slots[list(local)] = torch.arange(len(local))
            self.register_buffer("slots", slots.to(blueprint.device), persistent=False)
        self.initialise(blueprint)

    def forward(
        self,
        rows: Tensor,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        home: Tensor | None = None,
        tape: Tape | None = None,
    ) -> Tensor:
        """Partial sums [r, hidden] of the rows [r, hidden] that came in.

        `ids` [r, k] are global expert ids; those that are not local, and -1, do
        nothing here. `weights` [r, k] are the gate weights. Without ids only the
        work at home is done. `home` are the indices of the rows whose home this
        is (each at most once); None = all.
        """
        dtype = accumulation_dtype(rows.dtype)
        normed = self.ffn_norm(rows)
        total = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
        if ids is not None and weights is not None:
            total = self._routed(total, normed, ids, weights, tape)
        own, own_normed = (rows, normed) if home is None else (rows.index_select(0, home), normed.index_select(0, home))
        at_home = own.to(dtype)
        mlp = self.shared if self.dense is None else self.dense
        if mlp is not None:
            at_home = at_home + mlp(own_normed, tape).to(dtype)
        total = total + at_home if home is None else total.index_add(0, home, at_home)
        return total.to(rows.dtype)

    def _routed(self, total: Tensor, normed: Tensor, ids: Tensor, weights: Tensor, tape: Tape | None) -> Tensor:
        """Add the weighted outputs of the local experts to `total` [r, hidden]."""
        if self.experts is None:
            raise ValueError(f"layer {self.layer} is dense: it takes no expert ids")
        number = len(self.experts.experts)
        slots = self.slots[ids.long()].flatten()
        counts: list[int] = torch.bincount(slots, minlength=number + 1)[:number].tolist()
        pairs = slots.argsort(stable=True)[: sum(counts)]  # local pairs by expert, then by row
        row = pairs // ids.shape[1]
        results = self.experts(normed.index_select(0, row), counts, tape)
        weighted = results.to(total.dtype) * weights.flatten()[pairs].to(total.dtype).unsqueeze(1)
        return total.index_add(0, row, weighted)

    def start(
        self,
        rows: Tensor,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        home: Tensor | None = None,
    ) -> tuple[Tensor, Saved]:
        """Forward with autograd cut at both ends.

        The handle takes the gradient of the result and returns those of
        (rows, weights), without ids that of (rows).
        """

        def routed(tape: Tape, rows: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
            return (self.forward(rows, ids, weights, home, tape),)

        def plain(tape: Tape, rows: Tensor) -> tuple[Tensor, ...]:
            return (self.forward(rows, home=home, tape=tape),)

        (out,), saved = run_segment(plain, rows) if weights is None else run_segment(routed, rows, weights)
        return out, saved


def _checked(experts: Sequence[int], total: int) -> tuple[int, ...]:
    local = tuple(experts)
    if not local or list(local) != sorted(set(local)) or local[0] < 0 or local[-1] >= total:
        raise ValueError(f"local experts must be distinct, ascending and within 0 to {total - 1}, got {list(local)}")
    return local
