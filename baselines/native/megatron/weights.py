"""Our parameter names to Megatron-Core's storage, and back.

Decides where every parameter of ours lives in one GPTModel chunk. Differences are of
layout only: Megatron fuses the projections of a query group (its query heads, then its
key, then its value) into `linear_qkv`, gate and up projection into `linear_fc1`, and
counts experts within a rank. A `Slot` is a window on that storage under our name, for
values and for gradients alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from disagmoe.model.init import initial_value
from disagmoe.specs import ModelSpec


def _whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Slot:
    """One parameter of ours, of `shape`: the window `of` on the storage of a Megatron parameter."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    of: Callable[[Tensor], Tensor] = _whole

    def value(self) -> Tensor:
        """A copy of the value, in our shape."""
        return self.of(self.parameter.detach()).reshape(self.shape).clone()

    def gradient(self) -> Tensor:
        """A copy of the gradient that Megatron's DDP accumulated, in our shape."""
        gradient: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]  # DDP's own attribute
        return self.of(gradient).reshape(self.shape).clone()

    @torch.no_grad()
    def fill(self, value: Tensor) -> None:
        """Overwrite the value."""
        window = self.of(self.parameter.detach())
        window.copy_(value.reshape(window.shape))


def slots_of(chunk: Any, spec: ModelSpec, first_expert: int) -> dict[str, Slot]:
    """Global name -> slot of every parameter in one GPTModel; its experts start at `first_expert`."""
    found: dict[str, Slot] = {}
    if chunk.pre_process:
        found["embedding.weight"] = _plain(chunk.embedding.word_embeddings.weight)
    for layer in chunk.decoder.layers:
        prefix = f"layers.{layer.layer_number - 1}."
        for name, slot in _layer(layer, spec, first_expert):
            found[prefix + name] = slot
    if chunk.post_process:
        found["head.norm.weight"] = _plain(chunk.decoder.final_layernorm.weight)
        found["head.weight"] = _plain(chunk.output_layer.weight)
    held = {id(slot.parameter) for slot in found.values()}
    unknown = [name for name, parameter in chunk.named_parameters() if id(parameter) not in held]
    if unknown:
        raise ValueError(f"Megatron-Core parameter {unknown[0]} has no counterpart in model {spec.name}")
    return found


def starting_value(name: str, slot: Slot, spec: ModelSpec, seed: int) -> Tensor:
    """What our own model starts with: a function of the seed and the global name, whatever the rank."""
    return initial_value(name, slot.shape, seed=seed, layers=spec.layers)


def _plain(parameter: nn.Parameter) -> Slot:
    return Slot(parameter, tuple(parameter.shape))


def _layer(layer: Any, spec: ModelSpec, first_expert: int) -> Iterator[tuple[str, Slot]]:
    attention = layer.self_attention
    yield "attention_norm.weight", _plain(layer.input_layernorm.weight)
    yield from _attention(attention.linear_qkv.weight, spec)
    yield "attention.wo", _plain(attention.linear_proj.weight)
    if spec.qk_norm:
        yield "attention.q_norm.weight", _plain(attention.q_layernorm.weight)
        yield "attention.k_norm.weight", _plain(attention.k_layernorm.weight)
    yield "ffn_norm.weight", _plain(layer.pre_mlp_layernorm.weight)
    if not spec.is_moe(layer.layer_number - 1):
        yield from _mlp("dense.", layer.mlp)
        return
    yield "router.weight", _plain(layer.mlp.router.weight)
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
    yield f"{prefix}w2", _plain(mlp.linear_fc2.weight)
