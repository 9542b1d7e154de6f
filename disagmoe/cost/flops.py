"""FLOPs of one token, by component.

Decides what is counted: matrix multiplies only (2 FLOPs per multiply-add), with
the weights a token really meets; no norm, no activation, no embedding look-up.
Scores cost query heads times head widths (the number of KV heads does not
matter) times the keys a token attends to: by default the exact causal mean, the
token itself included, cut to the layer's window. `causal=False` counts the full
square instead, as several tools do. Training is three times the forward pass;
recomputation is never counted as useful work.

All per-token figures are floats, as the causal mean of keys may end in a half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from disagmoe.specs.architecture import LatentAttention, ModelSpec
from disagmoe.specs.params import MATRICES_PER_MLP

TRAIN_OVER_FORWARD = 3.0
"""Forward, gradient of the input, gradient of the weights: equal matrix multiplies."""


@dataclass(frozen=True)
class ForwardFlops:
    """Forward FLOPs per token of a whole model, by component."""

    qkv: float
    scores: float
    output: float
    router: float
    routed_experts: float
    shared_experts: float
    dense_ffn: float
    head: float

    @property
    def total(self) -> float:
        """Sum over the components."""
        return self.attention_side + self.expert_side + self.head

    @property
    def attention_side(self) -> float:
        """Attention and router: what an attention worker computes."""
        return self.qkv + self.scores + self.output + self.router

    @property
    def expert_side(self) -> float:
        """Every MLP: what an FFN worker computes."""
        return self.routed_experts + self.shared_experts + self.dense_ffn


def mean_keys(seq: int, window: int | None, causal: bool = True) -> float:
    """Keys that a token of a `seq`-token sequence attends to, on average.

    Causal: (seq + 1) / 2, or the mean of min(position, window) with a window.
    Not causal (full square): seq, or the window where that is shorter.
    """
    if seq <= 0:
        raise ValueError(f"seq must be positive, got {seq!r}")
    span = seq if window is None else min(window, seq)
    if not causal:
        return float(span)
    return (span * (span + 1) / 2 + (seq - span) * span) / seq


def qkv_flops(model: ModelSpec) -> float:
    """Query, key and value projections of one token in one layer (MLA: down and up projections)."""
    if model.mla is None:
        return 2.0 * model.hidden * (model.heads + 2 * model.kv_heads) * model.head_dim
    return 2.0 * _latent_weights(model, model.mla)


def _latent_weights(model: ModelSpec, mla: LatentAttention) -> int:
    query = model.heads * model.qk_dim
    query_weights = model.hidden * query if mla.q_lora_rank is None else mla.q_lora_rank * (model.hidden + query)
    down = model.hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query_weights + down + up


def output_flops(model: ModelSpec) -> float:
    """Output projection of one token in one layer."""
    return 2.0 * model.heads * model.v_dim * model.hidden


def score_flops(model: ModelSpec, layer: int, seq: int, causal: bool = True) -> float:
    """Scores (QK) and their product with the values of one token in `layer`."""
    return _scores(model, model.window(layer), seq, causal)


def _scores(model: ModelSpec, window: int | None, seq: int, causal: bool) -> float:
    return 2.0 * model.heads * (model.qk_dim + model.v_dim) * mean_keys(seq, window, causal)


def router_flops(model: ModelSpec) -> float:
    """Router of one token in one MoE layer."""
    return 2.0 * model.hidden * model.experts


def expert_flops(model: ModelSpec) -> float:
    """One row through one routed expert; a token makes `top_k` rows."""
    return _mlp(model, model.expert_width)


def shared_flops(model: ModelSpec) -> float:
    """Shared experts of one token in one MoE layer."""
    return _mlp(model, model.shared_width)


def dense_flops(model: ModelSpec) -> float:
    """Dense MLP of one token in one dense layer."""
    return _mlp(model, model.dense_width)


def head_flops(model: ModelSpec) -> float:
    """Output head of one token."""
    return 2.0 * model.hidden * model.vocab


def _mlp(model: ModelSpec, width: int) -> float:
    return 2.0 * MATRICES_PER_MLP * model.hidden * width


def forward_flops(model: ModelSpec, seq: int, causal: bool = True, mtp: bool = False) -> ForwardFlops:
    """Forward FLOPs per token at sequence length `seq`, by component.

    With `mtp`, the multi-token-prediction modules count as further MoE layers
    with full attention, each with its own pass through the output head; their
    2 x hidden to hidden projection is under `dense_ffn`.
    """
    extra = model.mtp_layers if mtp else 0
    blocks, moe = model.layers + extra, model.moe_layers + extra
    scores = sum(score_flops(model, layer, seq, causal) for layer in range(model.layers))
    merge = 2.0 * 2 * model.hidden * model.hidden
    return ForwardFlops(
        qkv=blocks * qkv_flops(model),
        scores=scores + extra * _scores(model, None, seq, causal),
        output=blocks * output_flops(model),
        router=moe * router_flops(model),
        routed_experts=moe * model.top_k * expert_flops(model),
        shared_experts=moe * shared_flops(model),
        dense_ffn=len(model.dense_layers) * dense_flops(model) + extra * merge,
        head=(1 + extra) * head_flops(model),
    )


def train_flops_per_token(model: ModelSpec, seq: int, causal: bool = True, mtp: bool = False) -> float:
    """Model FLOPs of one token in training: three times its forward pass."""
    return TRAIN_OVER_FORWARD * forward_flops(model, seq, causal, mtp).total


def mfu(tokens_per_s_per_gpu: float, flops_per_token: float, peak_tflops: float) -> float:
    """Model FLOPs utilisation, 0 to 1: useful FLOP/s of a GPU over its dense peak.

    Raises ValueError where the result is not finite, negative or above 1: such a
    figure is a mistake in its inputs and must not reach a table.
    """
    if not 0.0 < peak_tflops < math.inf:
        raise ValueError(f"mfu: peak_tflops must be positive, got {peak_tflops!r}")
    value = tokens_per_s_per_gpu * flops_per_token / (peak_tflops * 1e12)
    if not 0.0 <= value <= 1.0:
        raise ValueError(
            f"mfu {value!r} is outside 0 to 1: {tokens_per_s_per_gpu!r} tokens/s/GPU at "
            f"{flops_per_token!r} FLOPs per token on a peak of {peak_tflops!r} TFLOP/s"
        )
    return value
