"""Self-attention of one layer: grouped queries or multi-head latent attention.

Decides the projections, their biases, head norms, rotary parts and the scale of
the scores. Rows come flat [tokens, hidden]; `seq` says where sequences end.
Sources: transformers (modeling_qwen3_moe, modeling_gpt_oss, modeling_deepseek_v3)
and arXiv 2405.04434 for latent attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from disagmoe.model.deferred import Tape, linear
from disagmoe.model.norm import RMSNorm
from disagmoe.model.parts import Blueprint, Holder
from disagmoe.model.rope import rotate, rotation
from disagmoe.model.scores import attend
from disagmoe.specs import ModelSpec


class Attention(Holder, ABC):
    """What both kinds share: sinks, window, scale, and the way from rows to heads and back."""

    def __init__(self, blueprint: Blueprint, layer: int) -> None:
        super().__init__()
        spec = blueprint.spec
        self.spec: ModelSpec = spec
        self.rules = blueprint.rules
        self.window = spec.window(layer)
        self.scale = spec.qk_dim**-0.5
        self.wo = blueprint.parameter(spec.hidden, spec.heads * spec.v_dim)
        self.bo = blueprint.parameter(spec.hidden) if spec.attention_bias else None
        self.sinks = blueprint.parameter(spec.heads) if spec.sinks else None

    @abstractmethod
    def project(self, x: Tensor, seq: int, tape: Tape | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [t, hidden] -> query, key and value [b, seq, heads, width], rotated."""

    def forward(self, x: Tensor, seq: int, tape: Tape | None = None) -> Tensor:
        """Normed rows [t, hidden] of t / seq sequences -> [t, hidden]."""
        query, key, value = (part.transpose(1, 2) for part in self.project(x, seq, tape))
        mixed = attend(query, key, value, scale=self.scale, window=self.window, sinks=self.sinks)
        rows = mixed.transpose(1, 2).reshape(x.shape[0], self.wo.shape[1])
        return linear(rows, self.wo, self.bo, tape=tape)


class GroupedQueryAttention(Attention):
    """Query heads share key and value heads; optional biases and RMSNorm on every query and key head."""

    def __init__(self, blueprint: Blueprint, layer: int) -> None:
        super().__init__(blueprint, layer)
        spec = blueprint.spec
        width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.wq = blueprint.parameter(width, spec.hidden)
        self.wk = blueprint.parameter(kv_width, spec.hidden)
        self.wv = blueprint.parameter(kv_width, spec.hidden)
        self.bq = blueprint.parameter(width) if spec.attention_bias else None
        self.bk = blueprint.parameter(kv_width) if spec.attention_bias else None
        self.bv = blueprint.parameter(kv_width) if spec.attention_bias else None
        self.q_norm = RMSNorm(blueprint, spec.head_dim) if spec.qk_norm else None
        self.k_norm = RMSNorm(blueprint, spec.head_dim) if spec.qk_norm else None

    def project(self, x: Tensor, seq: int, tape: Tape | None) -> tuple[Tensor, Tensor, Tensor]:
        spec, batch = self.spec, x.shape[0] // seq
        query = linear(x, self.wq, self.bq, tape=tape).view(batch, seq, spec.heads, spec.head_dim)
        key = linear(x, self.wk, self.bk, tape=tape).view(batch, seq, spec.kv_heads, spec.head_dim)
        value = linear(x, self.wv, self.bv, tape=tape).view(batch, seq, spec.kv_heads, spec.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cosine, sine = rotation(seq, spec.head_dim, self.rules, x)
        interleaved = self.rules.rope_interleaved
        query = rotate(query, cosine, sine, interleaved=interleaved)
        return query, rotate(key, cosine, sine, interleaved=interleaved), value


class LatentAttention(Attention):
    """Multi-head latent attention: low-rank keys and values, one rotary key for all heads.

    `wq` where queries are projected directly (`q_lora_rank` None), otherwise
    `wq_a`, its norm and `wq_b`.
    """

    def __init__(self, blueprint: Blueprint, layer: int) -> None:
        super().__init__(blueprint, layer)
        spec = blueprint.spec
        if spec.mla is None:
            raise ValueError(f"model {spec.name} has no latent attention")
        self.mla = mla = spec.mla
        query = spec.heads * spec.qk_dim
        bias = spec.attention_bias
        self.q_norm: RMSNorm | None = None
        if mla.q_lora_rank is None:
            self.wq = blueprint.parameter(query, spec.hidden)
        else:
            self.wq_a = blueprint.parameter(mla.q_lora_rank, spec.hidden)
            self.bq_a = blueprint.parameter(mla.q_lora_rank) if bias else None
            self.q_norm = RMSNorm(blueprint, mla.q_lora_rank)
            self.wq_b = blueprint.parameter(query, mla.q_lora_rank)
        down = mla.kv_lora_rank + mla.qk_rope_head_dim
        self.wkv_a = blueprint.parameter(down, spec.hidden)
        self.bkv_a = blueprint.parameter(down) if bias else None
        self.kv_norm = RMSNorm(blueprint, mla.kv_lora_rank)
        self.wkv_b = blueprint.parameter(spec.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        if self.rules.yarn is not None:
            self.scale *= self.rules.yarn.score_scale

    def _query(self, x: Tensor, tape: Tape | None) -> Tensor:
        if self.q_norm is None:
            return linear(x, self.wq, tape=tape)
        return linear(self.q_norm(linear(x, self.wq_a, self.bq_a, tape=tape)), self.wq_b, tape=tape)

    def project(self, x: Tensor, seq: int, tape: Tape | None) -> tuple[Tensor, Tensor, Tensor]:
        spec, mla, batch = self.spec, self.mla, x.shape[0] // seq
        nope, rope = mla.qk_nope_head_dim, mla.qk_rope_head_dim
        cosine, sine = rotation(seq, rope, self.rules, x)
        interleaved = self.rules.rope_interleaved

        query = self._query(x, tape).view(batch, seq, spec.heads, spec.qk_dim)
        plain, turning = torch.split(query, [nope, rope], dim=-1)
        query = torch.cat((plain, rotate(turning, cosine, sine, interleaved=interleaved)), dim=-1)

        latent, turning = torch.split(linear(x, self.wkv_a, self.bkv_a, tape=tape), [mla.kv_lora_rank, rope], dim=-1)
        turned = rotate(turning.view(batch, seq, 1, rope), cosine, sine, interleaved=interleaved)
        up = linear(self.kv_norm(latent), self.wkv_b, tape=tape).view(batch, seq, spec.heads, nope + mla.v_head_dim)
        plain, value = torch.split(up, [nope, mla.v_head_dim], dim=-1)
        key = torch.cat((plain, turned.expand(batch, seq, spec.heads, rope)), dim=-1)
        return query, key, value


def attention_of(blueprint: Blueprint, layer: int) -> Attention:
    """The attention of `layer` that the spec asks for."""
    kind = GroupedQueryAttention if blueprint.spec.mla is None else LatentAttention
    return kind(blueprint, layer)
