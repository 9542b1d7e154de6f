"""Weights and conventions of a Hugging Face model, under our global names.

Decides which tensor of a transformers state dict is which parameter. Both layouts
of experts are read: one tensor per expert and projection (files on the Hub), and
all experts of a layer stacked (transformers 5 in memory; GPT-OSS, whose gate and up
projections are interleaved and transposed, everywhere). Nothing is skipped silently:
a tensor without a place in the model is an error, and so is a parameter without a
tensor. Source: transformers, models/{qwen3_moe,mixtral,gpt_oss,deepseek_v2,deepseek_v3}.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from disagmoe.model.conventions import Conventions, Yarn, conventions_of
from disagmoe.specs import ModelSpec
from disagmoe.specs.fields import as_bool, as_float, as_int, as_str

State = Mapping[str, Tensor]
Named = Iterator[tuple[str, Tensor]]

_NORMS = {"attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
_ATTENTION = {
    **{f"w{letter}": f"{letter}_proj.weight" for letter in "qkvo"},
    **{f"b{letter}": f"{letter}_proj.bias" for letter in "qkvo"},
    "q_norm.weight": "q_norm.weight",
    "k_norm.weight": "k_norm.weight",
    "sinks": "sinks",
}
_LATENT = {
    "wq": "q_proj.weight",
    "wq_a": "q_a_proj.weight",
    "q_norm.weight": "q_a_layernorm.weight",
    "wq_b": "q_b_proj.weight",
    "wkv_a": "kv_a_proj_with_mqa.weight",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "wkv_b": "kv_b_proj.weight",
    "wo": "o_proj.weight",
}
_MLP = {"w1": "gate_proj.weight", "w3": "up_proj.weight", "w2": "down_proj.weight"}
_MIXTRAL_EXPERT = {name: f"{name}.weight" for name in _MLP}
_ROUTER = {"weight": "weight", "bias": "bias", "correction_bias": "e_score_correction_bias"}


def load_hf_weights(values: Mapping[str, Tensor], spec: ModelSpec, state: State) -> None:
    """Fill `values` (global name -> view, of a ReferenceModel or of one rank's parts) from a state dict.

    Raises ValueError where names or shapes do not fit.
    """
    found = hf_weights(spec, state)
    if missing := sorted(values.keys() - found.keys()):
        raise ValueError(f"model {spec.name}: the state dict has nothing for {_some(missing)}")
    with torch.no_grad():
        for name, value in values.items():
            if value.shape != found[name].shape:
                raise ValueError(
                    f"model {spec.name}: {name} has shape {list(value.shape)}, "
                    f"the state dict gives {list(found[name].shape)}"
                )
            value.copy_(found[name])


def hf_weights(spec: ModelSpec, state: State) -> dict[str, Tensor]:
    """Global name -> tensor (a view where possible) of a whole `...ForCausalLM` state dict.

    Layers from `spec.layers` on are left out (a model cut short; modules for multi-token prediction).
    Raises ValueError for a tensor that has no place in the model.
    """
    source = _Source(state)
    found = dict(source.renamed("", {"embedding.weight": "model.embed_tokens.weight"}))
    found |= source.renamed("", {"head.norm.weight": "model.norm.weight"})
    head = dict(source.renamed("", {"head.weight": "lm_head.weight"}))
    found |= {} if spec.tied else head
    for layer in range(spec.layers):
        for name, tensor in _layer(source, spec, layer):
            found[f"layers.{layer}.{name}"] = tensor
    unread = [name for name in source.unread() if not _beyond(name, spec.layers)]
    if unread:
        raise ValueError(f"model {spec.name} has no place for {_some(unread)} of the state dict")
    return found


def hf_conventions(config: Mapping[str, object], spec: ModelSpec) -> Conventions:
    """Rotary base, its stretching and the norm's epsilon of a config.json; the family's where it names none."""
    rules = conventions_of(spec)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"model {spec.name}: rope_parameters must be a mapping, got {rope!r}")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    epsilon = config.get("rms_norm_eps")
    interleaved = config.get("rope_interleave")
    return replace(
        rules,
        rope_theta=rules.rope_theta if theta is None else as_float(theta, "rope_theta"),
        norm_epsilon=rules.norm_epsilon if epsilon is None else as_float(epsilon, "rms_norm_eps"),
        rope_interleaved=rules.rope_interleaved if interleaved is None else as_bool(interleaved, "rope_interleave"),
        yarn=_yarn(rope, config, spec),
    )


def _yarn(rope: Mapping[str, object], config: Mapping[str, object], spec: ModelSpec) -> Yarn | None:
    kind = as_str(rope.get("rope_type", rope.get("type", "default")), "rope_type")
    if kind == "default":
        return None
    if kind != "yarn" or rope.get("attention_factor") is not None:
        what = repr(kind) if kind != "yarn" else "yarn with attention_factor"
        raise ValueError(f"model {spec.name}: rope_type {what} is not known; known: default, yarn without it")

    def number(key: str, default: float) -> float:
        value = rope.get(key)
        return default if value is None else as_float(value, f"rope_parameters: {key}")

    positions = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    truncate = rope.get("truncate")
    return Yarn(
        factor=as_float(rope.get("factor"), "rope_parameters: factor"),
        original_positions=as_int(positions, "rope_parameters: original_max_position_embeddings"),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=True if truncate is None else as_bool(truncate, "rope_parameters: truncate"),
        mscale=number("mscale", 0.0),
        mscale_all_dim=number("mscale_all_dim", 0.0),
    )


class _Source:
    """A state dict, and what of it has been read."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._unread = dict.fromkeys(state)

    def has(self, name: str) -> bool:
        return name in self._state

    def take(self, name: str) -> Tensor:
        self._unread.pop(name, None)
        return self._state[name]

    def renamed(self, folder: str, table: Mapping[str, str], prefix: str = "") -> Named:
        """(`prefix` + ours, tensor) for every name of the table (ours -> theirs) that is there."""
        for ours, theirs in table.items():
            if self.has(folder + theirs):
                yield prefix + ours, self.take(folder + theirs)

    def unread(self) -> list[str]:
        return list(self._unread)


def _layer(source: _Source, spec: ModelSpec, layer: int) -> Named:
    """Names within the layer, and tensors."""
    folder = f"model.layers.{layer}."
    yield from source.renamed(folder, _NORMS)
    yield from source.renamed(f"{folder}self_attn.", _LATENT if spec.mla else _ATTENTION, "attention.")
    mixtral = source.has(f"{folder}block_sparse_moe.gate.weight")
    mlp = f"{folder}{'block_sparse_moe' if mixtral else 'mlp'}."
    if not spec.is_moe(layer):
        yield from source.renamed(mlp, _MLP, "dense.")
        return
    for gate in ("gate.", "router."):
        yield from source.renamed(mlp + gate, _ROUTER, "router.")
    yield from source.renamed(f"{mlp}shared_experts.", _MLP, "shared.")
    if not source.has(f"{mlp}experts.gate_up_proj"):
        for expert in range(spec.experts):
            table = _MIXTRAL_EXPERT if source.has(f"{mlp}experts.{expert}.w1.weight") else _MLP
            yield from source.renamed(f"{mlp}experts.{expert}.", table, f"experts.{expert}.")
    elif spec.family == "gpt_oss":
        yield from _interleaved(source, f"{mlp}experts.")
    else:
        yield from _stacked(source, f"{mlp}experts.")


def _stacked(source: _Source, folder: str) -> Named:
    """gate_up_proj [E, 2 * width, hidden], gate first; down_proj [E, hidden, width]."""
    both, down = source.take(f"{folder}gate_up_proj"), source.take(f"{folder}down_proj")
    for expert, (gate_up, w2) in enumerate(zip(both, down, strict=True)):
        w1, w3 = gate_up.chunk(2)
        yield from ((f"experts.{expert}.{name}", w) for name, w in (("w1", w1), ("w3", w3), ("w2", w2)))


def _interleaved(source: _Source, folder: str) -> Named:
    """gate_up_proj [E, hidden, 2 * width], gate and up by turns; down_proj [E, width, hidden]; biases."""
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    tensors = [source.take(folder + name) for name in names]
    for expert, (both, down, both_bias, b2) in enumerate(zip(*tensors, strict=True)):
        weights = {"w1": both[:, 0::2].T, "w3": both[:, 1::2].T, "w2": down.T}
        biases = {"b1": both_bias[0::2], "b3": both_bias[1::2], "b2": b2}
        yield from ((f"experts.{expert}.{name}", value) for name, value in (weights | biases).items())


def _beyond(name: str, layers: int) -> bool:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= layers


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
