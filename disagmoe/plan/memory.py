"""Bytes a worker's GPU holds whatever the schedule: weights, gradients, optimizer state, and what comes with them.

The default recipe is Megatron-Core's mixed precision with a distributed
optimizer: bf16 weights, fp32 gradients, and fp32 master weights and two Adam
moments sharded over the ranks that replicate the tensor (experts over
expert-data-parallel ranks only). Activations are `plan/memory_timeline.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.memory import BF16, Shard
from disagmoe.ops import RECV_STREAMS, SEND_STREAMS, Stream
from disagmoe.plan.plan import Layout, Placement
from disagmoe.plan.program import Program, among
from disagmoe.specs import ModelSpec
from disagmoe.specs.params import (
    attention_params,
    embedding_params,
    expert_params,
    ffn_shared_params,
    head_params,
    router_params,
)

GIB = float(2**30)
WEIGHT_BYTES = 2
GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter: held by every rank (weight, gradient), sharded (optimizer), sharded during its step (step).

    `step` is 4 where gradients are bf16 and Megatron-Core makes fp32 copies of the
    shard for the optimizer (distrib_optimizer.py, _copy_model_grads_to_main_grads).
    """

    weight: int
    gradient: int
    optimizer: int
    step: int = 0


RECIPES = {
    "megatron": Recipe(WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES),
    # bf16 moments (2 + 2); of the fp32 master weight only the 16 bits that the bf16 weight lacks are stored.
    "precision_aware": Recipe(WEIGHT_BYTES, GRADIENT_BYTES, 6),
}
"""Optimizer recipes by name. `precision_aware` is Megatron-Core's --use-precision-aware-optimizer with bf16 moments
(DeepSeek-V3's choice, arXiv 2412.19437, section 3.3) and store_param_remainders (its default;
https://github.com/NVIDIA/Megatron-LM, megatron/core/optimizer/optimizer_config.py)."""

GROUP_COMMUNICATOR_GIB = 688 / 1024
PAIR_COMMUNICATOR_GIB = 544 / 1024
"""GPU memory of one NCCL communicator of more than two, and of two ranks, as measured on A100 with PyTorch
(https://github.com/NVIDIA/nccl/issues/964). Others report up to 1.6 GB (https://github.com/NVIDIA/nccl/issues/864). The
transports without SMs are taken to need as much for their own registered buffers."""

GEMM_WORKSPACE_BYTES = 6 * 32 * 2**20
"""32 MiB per cuBLAS handle on Hopper: Transformer Engine's own, its four of grouped GEMMs, and PyTorch's
(https://github.com/NVIDIA/TransformerEngine, transformer_engine/pytorch/cpp_extensions/gemm.py)."""


LAYOUTS_KEPT = 512
"""Placements whose holdings are remembered: a search asks for each several times."""


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
    """Static memory of one GPU, in GiB.

    `workspace_gib` are GEMM workspaces and the dummy weight gradients that
    Transformer Engine keeps, one per shape of weight, where gradients are
    accumulated in place (transformer_engine/pytorch/module/base.py, get_dummy_wgrad).
    """

    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    workspace_gib: float = 0.0
    communicators_gib: float = 0.0

    @property
    def total_gib(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Component name -> GiB."""
        return {
            "weights": self.weights_gib,
            "gradients": self.gradients_gib,
            "optimizer": self.optimizer_gib,
            "workspace": self.workspace_gib,
            "communicators": self.communicators_gib,
        }


@dataclass(frozen=True, eq=False)
class Held:
    """What every worker holds: flags [workers, layers] per side, a share of the embedding and the head [workers]."""

    attn: NDArray[np.bool_]
    ffn: NDArray[np.bool_]
    embed: NDArray[np.float64]
    head: NDArray[np.float64]


def held(layout: Layout, model: ModelSpec) -> Held:
    """What the placement makes every worker hold; mirrored workers hold their mirror's part too."""
    return _held(layout.placement, model)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _held(placement: Placement, model: ModelSpec) -> Held:
    workers = len(placement.workers)
    attn, ffn = (np.zeros((workers, model.layers), dtype=np.bool_) for _ in range(2))
    embed, head = (np.zeros(workers) for _ in range(2))
    for layer in range(model.layers):
        attn[list(placement.holders(placement.attn[layer])), layer] = True
        ffn[list(placement.holders(placement.ffn[layer])), layer] = True
    embed[list(placement.holders(placement.embed))] = 1.0
    for worker in placement.heads:
        head[list(placement.holders(worker))] = 1.0 / len(placement.heads)
    return Held(attn, ffn, embed, head)


def shard_of(layout: Layout) -> Shard:
    """Tensor and context parallel sizes of a Layout (options `tp` and `cp`; 1 unless asked)."""
    return Shard(int(layout.options.get("tp", 1)), int(layout.options.get("cp", 1)))


def local_experts(model: ModelSpec, ep: int) -> int:
    """Experts on the fullest of `ep` ranks; uneven splits are placed near-equally."""
    return ceil(model.experts / ep)


def holdings(layout: Layout, model: ModelSpec) -> tuple[Holding, ...]:
    """What one GPU of each worker holds, in parameters."""
    return _holdings(layout.placement, layout.ep, shard_of(layout).tp, model)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _holdings(placement: Placement, ep: int, tp: int, model: ModelSpec) -> tuple[Holding, ...]:
    holds = _held(placement, model)
    attention, shared, routed = _layer_params(ep, tp, model)
    out = []
    for index, worker in enumerate(placement.workers):
        dense = float(holds.attn[index] @ attention + holds.ffn[index] @ shared)
        dense += float(holds.embed[index]) * embedding_params(model) / tp
        dense += float(holds.head[index]) * head_params(model) / tp
        ranks = worker.gpus * placement.copies
        expert = float(holds.ffn[index] @ routed)
        out.append(Holding(dense, expert, max(1, ranks // tp), max(1, ranks // ep)))
    return tuple(out)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _layer_params(ep: int, tp: int, model: ModelSpec) -> tuple[NDArray[np.float64], ...]:
    """Parameters of one GPU per layer [layers]: attention side, shared FFN, routed experts."""
    layers = range(model.layers)
    experts = float(local_experts(model, ep) * expert_params(model))
    return (
        np.array([_attention_share(model, layer, tp) for layer in layers]),
        np.array([ffn_shared_params(model, layer) / tp for layer in layers]),
        np.array([experts if model.is_moe(layer) else 0.0 for layer in layers]),
    )


def _attention_share(model: ModelSpec, layer: int, tp: int) -> float:
    """Attention parameters of a layer on one tensor-parallel rank: projections are split, the rest is not.

    Norms, the router and latent attention's down projections are on every rank.
    """
    whole = 2 * model.hidden + (router_params(model) if model.is_moe(layer) else 0)
    if model.mla is not None:
        down = (model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank
        whole += model.hidden * (down + model.mla.qk_rope_head_dim) + down
    elif model.qk_norm:
        whole += 2 * model.head_dim
    return (attention_params(model, layer) - whole) / tp + whole


def static_memory(
    layout: Layout, model: ModelSpec, program: Program | None = None, recipe: Recipe = RECIPES["megatron"]
) -> tuple[StaticMemory, ...]:
    """Static memory of one GPU of each worker; workspaces and communicators only with a Program."""
    owned = holdings(layout, model)
    extra = [(0.0, 0.0)] * len(owned)
    if program is not None:
        workspace = workspace_bytes(layout, model)
        extra = list(zip(workspace, communicators_gib(layout, program, owned), strict=True))
    return tuple(
        StaticMemory(
            weights_gib=(h.dense + h.expert) * recipe.weight / GIB,
            gradients_gib=(h.dense + h.expert) * recipe.gradient / GIB,
            optimizer_gib=h.updated * recipe.optimizer / GIB,
            workspace_gib=more / GIB,
            communicators_gib=communicators,
        )
        for h, (more, communicators) in zip(owned, extra, strict=True)
    )


def static_gib(layout: Layout, model: ModelSpec, recipe: Recipe) -> NDArray[np.float64]:
    """What every plan of a Layout holds all the time, [workers]: static memory without workspaces and communicators."""
    return _static_gib(layout.placement, layout.ep, shard_of(layout).tp, model, recipe)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _static_gib(placement: Placement, ep: int, tp: int, model: ModelSpec, recipe: Recipe) -> NDArray[np.float64]:
    held_bytes = [
        (h.dense + h.expert) * (recipe.weight + recipe.gradient) + h.updated * recipe.optimizer
        for h in _holdings(placement, ep, tp, model)
    ]
    return np.array(held_bytes) / GIB


def held_layers(layout: Layout, model: ModelSpec) -> NDArray[np.int64]:
    """Layers of either side and kind that every worker holds: [(attention, FFN), (dense, MoE), workers]."""
    return _held_layers(layout.placement, model)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _held_layers(placement: Placement, model: ModelSpec) -> NDArray[np.int64]:
    holds = _held(placement, model)
    moe = np.array([model.is_moe(layer) for layer in range(model.layers)])
    return np.stack([[(side & ~moe).sum(axis=1), (side & moe).sum(axis=1)] for side in (holds.attn, holds.ffn)])


def peak_static_gib(layout: Layout, model: ModelSpec) -> float:
    """The fullest GPU's static memory; a bound that no plan can go below."""
    return max(m.total_gib for m in static_memory(layout, model))


def workspace_bytes(layout: Layout, model: ModelSpec) -> list[float]:
    """GEMM workspaces, the dummy weight gradients of one GPU of each worker, and the system's own static buffers.

    A system with buffers of its own (Comet's symmetric memory) names their size
    in the option `static_buffer_bytes`.
    """
    tp, holds = shard_of(layout).tp, held(layout, model)
    own = float(layout.options.get("static_buffer_bytes", 0))
    out = []
    for index in range(len(layout.placement.workers)):
        shapes = {s for side in ("attn", "ffn") for s in _weight_shapes(model, getattr(holds, side)[index], side, tp)}
        out.append(sum(a * b for a, b in sorted(shapes)) * float(BF16) + GEMM_WORKSPACE_BYTES + own)
    return out


def _weight_shapes(model: ModelSpec, layers: NDArray[np.bool_], side: str, tp: int) -> Iterator[tuple[float, float]]:
    """(rows, columns) of the weight matrices of one side of these layers, on one tensor-parallel rank."""
    kinds = {model.is_moe(int(layer)) for layer in np.flatnonzero(layers)}
    if not kinds:
        return
    if side == "ffn":
        widths = [(model.shared_width / tp, True), (model.dense_width / tp, False), (float(model.expert_width), True)]
        for width, moe in widths:
            if moe in kinds and width:
                yield 2 * width, model.hidden
                yield model.hidden, width
        return
    yield model.hidden, model.heads * model.v_dim / tp
    if model.mla is None:
        yield (model.heads + 2 * model.kv_heads) * model.head_dim / tp, model.hidden
        return
    mla, query = model.mla, model.heads * model.qk_dim / tp
    yield mla.kv_lora_rank + mla.qk_rope_head_dim, model.hidden
    yield model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) / tp, mla.kv_lora_rank
    if mla.q_lora_rank is None:
        yield query, model.hidden
    else:
        yield mla.q_lora_rank, model.hidden
        yield query, mla.q_lora_rank


def communicators_gib(layout: Layout, program: Program, owned: tuple[Holding, ...]) -> list[float]:
    """Memory of the communicators of one GPU of each worker.

    One per direction and peer of its transfers, one for collectives of the
    expert-parallel group, one each for the gradients of dense and of expert
    parameters that somebody else holds too, one each for tp and cp.
    """
    sample = program.sorts.sample
    moves = np.flatnonzero(among(sample.stream, SEND_STREAMS | RECV_STREAMS))
    lanes = np.zeros((program.n_workers, len(Stream), program.n_workers), dtype=np.bool_)
    lanes[sample.worker[moves], sample.stream[moves], sample.peer[moves]] = True
    collective = np.zeros(program.n_workers, dtype=np.bool_)
    collective[sample.worker[among(sample.stream, (Stream.COLL, Stream.NVLINK))]] = True
    shard = shard_of(layout)
    of_lane = GROUP_COMMUNICATOR_GIB if layout.placement.disaggregated else PAIR_COMMUNICATOR_GIB
    out = []
    for index, holding in enumerate(owned):
        groups = [
            bool(collective[index]) and layout.ep > 1,
            holding.dense > 0 and holding.dense_ranks > 1,
            holding.expert > 0 and holding.expert_ranks > 1,
            shard.tp > 1,
            shard.cp > 1,
        ]
        out.append(int(lanes[index].sum()) * of_lane + sum(groups) * GROUP_COMMUNICATOR_GIB)
    return out
