"""Small models of every family, and models filled with values that leave no term at zero."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from disagmoe.model import Blueprint, Part, ReferenceModel
from disagmoe.model.init import standard_normal
from disagmoe.specs import LatentAttention, ModelSpec

BASE = ModelSpec(
    name="small",
    title="small",
    family="qwen3_moe",
    layers=2,
    hidden=12,
    vocab=23,
    heads=4,
    kv_heads=2,
    head_dim=6,
    experts=6,
    top_k=2,
    expert_width=5,
    qk_norm=True,
)
MLA = LatentAttention(q_lora_rank=None, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)
FAMILIES = {
    "qwen3": BASE,
    "mixtral": replace(BASE, family="mixtral", qk_norm=False),
    "gpt_oss": replace(
        BASE,
        family="gpt_oss",
        qk_norm=False,
        attention_bias=True,
        router_bias=True,
        expert_bias=True,
        sinks=True,
        window_tokens=3,
        windowed_layers=(0,),
        scoring="softmax_after_topk",
    ),
    "deepseek": replace(
        BASE,
        family="deepseek",
        qk_norm=False,
        dense_layers=(0,),
        dense_width=7,
        shared_width=6,
        norm_topk_prob=False,
        top_k=3,
    ),
    "deepseek_v2": replace(
        BASE,
        family="deepseek_v2",
        qk_norm=False,
        mla=MLA,
        shared_width=4,
        norm_topk_prob=False,
        routed_scaling_factor=16.0,
        n_group=3,
        topk_group=2,
        experts=9,
        top_k=4,
    ),
    "deepseek_v3": replace(
        BASE,
        family="deepseek_v3",
        qk_norm=False,
        mla=replace(MLA, q_lora_rank=7),
        attention_bias=True,
        dense_layers=(0,),
        dense_width=7,
        shared_width=4,
        scoring="sigmoid",
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        experts=8,
        top_k=3,
        group_score="top2_sum",
        correction_bias=True,
    ),
    "tied_all_experts": replace(BASE, family="mixtral", tied=True, top_k=6, window_tokens=2, windowed_layers=(0, 1)),
    "sinks_mla": replace(BASE, family="deepseek_v2", qk_norm=False, mla=MLA, sinks=True, top_k=1),
}


def scramble(part: Part, scale: float = 0.3) -> None:
    """Overwrite every piece with values of its name, of order `scale`; norms around 1."""
    for piece in part.all_pieces():
        noise = standard_normal(piece.name, piece.value.shape, seed=11).to(piece.value.dtype) * scale
        piece.value.copy_(noise + (1.0 if piece.name.endswith("norm.weight") else 0.0))


def blueprint(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Blueprint:
    return Blueprint(spec, dtype)


def scrambled_reference(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> ReferenceModel:
    model = ReferenceModel(spec, 0, dtype, chunk_tokens=5)
    for part in model.parts():
        scramble(part)
    return model


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_batch(spec: ModelSpec, sequences: int, seq: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, spec.vocab, (sequences, seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
