"""Keeping experts evenly loaded: auxiliary loss, z loss and the bias update that needs no loss.

Decides the normalisation. The balance loss is *per sequence*: E * sum_i f_i P_i
with f_i the share of the sequence's k * seq choices that fell on expert i and P_i
the mean share of its score (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), averaged
over the sequences of the global batch and summed over layers: 1 for balanced
routing, E / k at most. The z loss is the mean over tokens of the squared
log-partition (ST-MoE, arXiv 2202.08906), summed over layers. A sequence is never
split between micro-batches or ranks, so both, and their gradients, do not depend
on the number of micro-batches, on ranks or on placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossWeights:
    """Coefficients of the two router losses beside the cross entropy; 0 = absent."""

    balance: float = 0.0
    z: float = 0.0

    def balance_scale(self, sequences: int) -> float:
        """Gradient of the loss in a part's summed `balance`, for a global batch of `sequences`."""
        return self.balance / sequences

    def z_scale(self, tokens: int) -> float:
        """Gradient of the loss in a part's summed `z`, for a global batch of `tokens`."""
        return self.z / tokens


def sequence_balance(shares: Tensor, chosen: Tensor, seq: int) -> Tensor:
    """Balance loss summed over the sequences of t tokens: shares [t, E] (rows sum to 1), chosen [t, k] -> scalar."""
    tokens, experts = shares.shape
    sequences, k = tokens // seq, chosen.shape[1]
    counts = shares.new_zeros(sequences, experts)
    choices = chosen.reshape(sequences, seq * k)
    counts.scatter_add_(1, choices, torch.ones_like(choices, dtype=shares.dtype))
    means = shares.reshape(sequences, seq, experts).mean(1)
    return (counts * means).sum() * (experts / (k * seq))


def z_penalty(logits: Tensor) -> Tensor:
    """Squared log-partition summed over tokens: logits [t, E] -> scalar."""
    return logits.logsumexp(-1).square().sum()


@torch.no_grad()
def update_correction_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Move `bias` [E] in place by `rate` towards idle experts and away from busy ones (arXiv 2408.15664).

    Once per optimizer step, with `counts` [E] summed over all micro-batches and
    all attention ranks, first forward passes only.
    """
    loads = counts.to(bias.dtype)
    bias.add_(torch.sign(loads.mean() - loads), alpha=rate)
