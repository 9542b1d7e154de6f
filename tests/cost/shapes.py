"""Models made up for single tests: Qwen3 with some dimensions replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from disagmoe.specs import ModelSpec, load_model

KEYS = ("hidden", "experts", "top_k", "n_group", "topk_group", "expert_width", "shared_width", "heads", "kv_heads")


def model_with(**dimensions: int) -> ModelSpec:
    """Qwen3-235B with other dimensions."""
    return replace(load_model("qwen3"), **dimensions)  # type: ignore[arg-type]


def model_of(row: Mapping[str, str]) -> ModelSpec:
    """The MoE layer a reference row describes; what it does not name is Qwen3's."""
    return model_with(**{key: int(row[key]) for key in KEYS if key in row})
