"""Which experts a token goes to, and with what weights.

Decides scores (softmax over all experts, sigmoid, or softmax over the chosen
logits), the limit to the best expert groups, the order of ties (lowest id first,
the same on every device and rank) and the gate weights: taken from the scores
without the correction bias, normalised where the model says so, scaled once.
Everything runs in at least fp32, whatever the type of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disagmoe.model.balance import sequence_balance, z_penalty
from disagmoe.model.deferred import Tape, exact, linear
from disagmoe.model.parts import Blueprint, Holder
from disagmoe.specs import ModelSpec

NO_ZERO_DIVISION = 1e-20
"""Added to a sum of chosen scores (as in DeepSeek-V3's code); below the resolution of any sum that matters."""


@dataclass(frozen=True)
class Routing:
    """The routing of t tokens to k of E experts.

    `ids` [t, k] in order of falling score; `weights` [t, k] in at least fp32;
    `counts` [E] how many tokens chose each expert. `balance` is the balance loss
    summed over sequences, `z` the squared log-partition summed over tokens: sums,
    so that whoever knows the global batch divides (see `balance.py`).
    """

    ids: Tensor
    weights: Tensor
    counts: Tensor
    balance: Tensor
    z: Tensor


class Router(Holder):
    """Linear scores of E experts and the choice among them. Pure: nothing is counted or updated inside."""

    correction_bias: Tensor | None

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        spec = blueprint.spec
        self.spec: ModelSpec = spec
        self.dtype = blueprint.accumulation
        self.weight = blueprint.parameter(spec.experts, spec.hidden)
        self.bias = blueprint.parameter(spec.experts) if spec.router_bias else None
        bias = torch.zeros(spec.experts, dtype=self.dtype, device=blueprint.device) if spec.correction_bias else None
        self.register_buffer("correction_bias", bias)

    def forward(self, x: Tensor, seq: int, tape: Tape | None = None, chosen: Tensor | None = None) -> Routing:
        """Normed rows x [t, hidden] of sequences of `seq` tokens -> their routing.

        `chosen` [t, k]: experts chosen earlier; recomputation passes them so that
        it cannot route differently.
        """
        logits = linear(x, self.weight, self.bias, tape=tape, dtype=self.dtype)
        with exact(x):
            return route(logits, self.spec, seq=seq, correction_bias=self.correction_bias, chosen=chosen)


def route(
    logits: Tensor,
    spec: ModelSpec,
    *,
    seq: int,
    correction_bias: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Routing:
    """Route tokens by their logits [t, E] in the way of `spec`."""
    scores = torch.sigmoid(logits) if spec.scoring == "sigmoid" else logits.softmax(-1)
    if chosen is None:
        choice = logits if spec.scoring == "softmax_after_topk" else scores
        choice = choice.detach() if correction_bias is None else choice.detach() + correction_bias
        chosen = choose(choice, spec)
    shares = scores / (scores.sum(-1, keepdim=True) + NO_ZERO_DIVISION) if spec.scoring == "sigmoid" else scores
    return Routing(
        ids=chosen,
        weights=_gate_weights(logits, scores, chosen, spec),
        counts=torch.bincount(chosen.flatten(), minlength=spec.experts),
        balance=sequence_balance(shares, chosen, seq),
        z=z_penalty(logits),
    )


def choose(choice: Tensor, spec: ModelSpec) -> Tensor:
    """The `top_k` experts [t, k] with the largest `choice` [t, E], within the best groups where limited."""
    if spec.topk_group < spec.n_group:
        groups = choice.view(-1, spec.n_group, spec.experts // spec.n_group)
        if spec.group_score == "max":
            group_scores = groups.amax(-1)
        else:
            group_scores = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(-1, stable_top(group_scores, spec.topk_group), True)
        # -inf, not 0: kept scores may be negative.
        choice = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    return stable_top(choice, spec.top_k)


def stable_top(values: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the k largest values, equal ones by lowest index (torch.topk promises no order)."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _gate_weights(logits: Tensor, scores: Tensor, chosen: Tensor, spec: ModelSpec) -> Tensor:
    if spec.scoring == "softmax_after_topk":
        weights = logits.gather(-1, chosen).softmax(-1)
    else:
        weights = scores.gather(-1, chosen)
        if spec.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + NO_ZERO_DIVISION)
    return weights * spec.routed_scaling_factor
