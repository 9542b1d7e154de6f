"""Bytes a worker's GPU holds whatever the schedule: weights, gradients, optimizer state.

The recipe is Megatron-Core's mixed precision with a distributed optimizer: bf16
weights, fp32 gradients, and fp32 master weights and two Adam moments sharded
over the ranks that replicate the tensor (experts over expert-data-parallel ranks
only). Activations are not modelled here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from disagmoe.plan.plan import Layout
from disagmoe.specs import ModelSpec
from disagmoe.specs.params import (
    attention_params,
    embedding_params,
    expert_params,
    ffn_shared_params,
    head_params,
)

GIB = float(2**30)
WEIGHT_BYTES = 2
GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12


@dataclass(frozen=True)
class Holding:
    """Parameters one GPU of a worker holds, split by who replicates them.

    `dense_ranks` and `expert_ranks` count the GPUs that hold the same dense
    (attention, shared, embedding) and the same expert parameters.
    """

    dense: float
    expert: float
    dense_ranks: int
    expert_ranks: int

    @property
    def updated(self) -> float:
        """Parameters this GPU's optimizer shard updates."""
        return self.dense / self.dense_ranks + self.expert / self.expert_ranks


@dataclass(frozen=True)
class StaticMemory:
    """Static bytes of one GPU, in GiB."""

    weights_gib: float
    gradients_gib: float
    optimizer_gib: float

    @property
    def total_gib(self) -> float:
        return self.weights_gib + self.gradients_gib + self.optimizer_gib


def local_experts(model: ModelSpec, ep: int) -> int:
    """Experts on the fullest of `ep` ranks; uneven splits are placed near-equally."""
    return ceil(model.experts / ep)


def holdings(layout: Layout, model: ModelSpec) -> tuple[Holding, ...]:
    """What one GPU of each worker holds, in parameters."""
    placement = layout.placement
    per_expert = expert_params(model)
    experts = local_experts(model, layout.ep)
    out = []
    for index, worker in enumerate(placement.workers):
        dense = 0.0
        expert = 0.0
        for layer in range(model.layers):
            if index in placement.holders(placement.attn[layer]):
                dense += attention_params(model, layer)
            if index in placement.holders(placement.ffn[layer]):
                dense += ffn_shared_params(model, layer)
                expert += experts * per_expert if model.is_moe(layer) else 0.0
        if index in placement.holders(placement.embed):
            dense += embedding_params(model)
        if any(index in placement.holders(head) for head in placement.heads):
            dense += head_params(model) / len(placement.heads)
        ranks = worker.gpus * placement.copies
        out.append(Holding(dense, expert, ranks, max(1, ranks // layout.ep)))
    return tuple(out)


def static_memory(layout: Layout, model: ModelSpec) -> tuple[StaticMemory, ...]:
    """Static memory of one GPU of each worker."""
    return tuple(
        StaticMemory(
            weights_gib=(h.dense + h.expert) * WEIGHT_BYTES / GIB,
            gradients_gib=(h.dense + h.expert) * GRADIENT_BYTES / GIB,
            optimizer_gib=h.updated * OPTIMIZER_BYTES / GIB,
        )
        for h in holdings(layout, model)
    )


def peak_static_gib(layout: Layout, model: ModelSpec) -> float:
    """The fullest GPU's static memory; the bound that a plan must keep."""
    return max(m.total_gib for m in static_memory(layout, model))
