"""Our parameter names to Megatron-Core's storage, and back.

Decides where every parameter of ours lives in one GPTModel chunk. Differences are of
layout only: Megatron fuses the projections of a query group (its query heads, then its
key, then its value) into `linear_qkv`, gate and up projection into `linear_fc1`, and
counts experts within a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from baselines.native.slot import Slot
from disagmoe.specs import ModelSpec


def slots_of(chunk: Any, spec: ModelSpec, first_expert: int) -> dict[str, Slot]:
    """Global name -> slot of every parameter in one GPTModel; its experts start at `first_expert`."""
    found: dict[str, Slot] = {}
    if chunk.pre_process:
        found["embedding.weight"] = Slot.plain(chunk.embedding.word_embeddings.weight)
    for layer in chunk.decoder.layers:
        prefix = f"layers.{layer.layer_number - 1}."
        for name, slot in _layer(layer, spec, first_expert):
            found[prefix + name] = slot
    if chunk.post_process:
        found["head.norm.weight"] = Slot.plain(chunk.decoder.final_layernorm.weight)
        found["head.weight"] = Slot.plain(chunk.output_layer.weight)
    held = {id(slot.parameter) for slot in found.values()}
    unknown = [name for name, parameter in chunk.named_parameters() if id(parameter) not in held]
    if unknown:
        raise ValueError(f"Megatron-Core parameter {unknown[0]} has no counterpart in model {spec.name}")
    return found


def _layer(layer: Any, spec: ModelSpec, first_expert: int) -> Iterator[tuple[str, Slot]]:
    attention = layer.self_attention
    yield "attention_norm.weight", Slot.plain(layer.input_layernorm.weight)
    yield from _attention(attention.linear_qkv.weight, spec)
    yield "attention.wo", Slot.plain(attention.linear_proj.weight)
    if spec.qk_norm:
        yield "attention.q_norm.weight", Slot.plain(attention.q_layernorm.weight)
        yield "attention.k_norm.weight", Slot.plain(attention.k_layernorm.weight)
    yield "ffn_norm.weight", Slot.plain(layer.pre_mlp_layernorm.weight)
    if not spec.is_moe(layer.layer_number - 1):
        yield from _mlp("dense.", layer.mlp)
        return
    yield "router.weight", Slot.plain(layer.mlp.router.weight)
    for place, expert in enumerate(layer.mlp.experts.local_experts):
        yield from _mlp(f"experts.{first_expert + place}.", expert)
    if spec.shared_width:
        yield from _mlp("shared.", layer.mlp.shared_experts)


def _attention(weight: nn.Parameter, spec: ModelSpec) -> Iterator[tuple[str, Slot]]:
    """linear_qkv [kv_heads * (heads per kv head + 2) * head_dim, hidden]."""
    share = spec.heads // spec.kv_heads

    def window(first: int, last: int) -> Callable[[Tensor], Tensor]:
        return lambda t: t.view(spec.kv_heads, share + 2, spec.head_dim, spec.hidden)[:, first:last]

    width = spec.head_dim
    yield "attention.wq", Slot(weight, (spec.heads * width, spec.hidden), window(0, share))
    yield "attention.wk", Slot(weight, (spec.kv_heads * width, spec.hidden), window(share, share + 1))
    yield "attention.wv", Slot(weight, (spec.kv_heads * width, spec.hidden), window(share + 1, share + 2))


def _mlp(prefix: str, mlp: Any) -> Iterator[tuple[str, Slot]]:
    """linear_fc1 [2 * width, hidden]: gate above up."""
    fused = mlp.linear_fc1.weight
    width, hidden = fused.shape[0] // 2, fused.shape[1]
    yield f"{prefix}w1", Slot(fused, (width, hidden), lambda t: t[:width])
    yield f"{prefix}w3", Slot(fused, (width, hidden), lambda t: t[width:])
    yield f"{prefix}w2", Slot.plain(mlp.linear_fc2.weight)
