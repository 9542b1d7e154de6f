"""Decides what one GPU of a Layout handles (tokens, expert rows, copies on the wire) and what that holds in bytes."""

from __future__ import annotations

from disagmoe.cost.copies import distinct_units
from disagmoe.cost.memory import LOSS_CHUNK_TOKENS, LayerBytes, Load, embed_bytes, head_bytes, layer_bytes
from disagmoe.cost.recompute import Recompute
from disagmoe.plan.memory import holdings, local_experts, shard_of
from disagmoe.plan.memory_tables import WorkerBytes
from disagmoe.plan.plan import Layout, Worker
from disagmoe.plan.program import Program
from disagmoe.specs import ModelSpec, Workload


def in_frames(layout: Layout, program: Program) -> bool:
    """Whether layers run as one function each: colocated, without overlapped pairs of micro-batches."""
    return not layout.placement.disaggregated and not bool((program.pair >= 0).any())


def worker_bytes(
    layout: Layout,
    model: ModelSpec,
    workload: Workload,
    recompute: Recompute,
    *,
    frames: bool,
    loss_chunk: int | None = LOSS_CHUNK_TOKENS,
    step: int = 0,
) -> tuple[WorkerBytes, ...]:
    """Bytes of the operations of one GPU of every worker; equal workers share one object.

    `step` are the temporary bytes per parameter that the optimizer updates.
    """
    shard = shard_of(layout)
    made: dict[tuple[str, int, int, float], WorkerBytes] = {}
    out = []
    updated = [h.updated if step else 0.0 for h in holdings(layout, model)]
    for worker, params in zip(layout.placement.workers, updated, strict=True):
        key = (worker.pool, worker.gpus, worker.nodes, params)
        if key not in made:
            dense, moe = (
                _layer(layout, model, workload, recompute, worker, moe=moe, frames=frames) for moe in (False, True)
            )
            tokens, parts = _home_tokens(layout, workload, worker), len(layout.placement.heads)
            made[key] = WorkerBytes(
                (dense, moe),
                # The shards of a spread head wait for each other's softmax statistics, so their logits are kept.
                head_bytes(model, tokens, parts=parts, chunk=loss_chunk if parts == 1 else None, shard=shard),
                embed_bytes(model, tokens, shard=shard),
                params * step,
            )
        out.append(made[key])
    return tuple(out)


def _layer(
    layout: Layout,
    model: ModelSpec,
    workload: Workload,
    recompute: Recompute,
    worker: Worker,
    *,
    moe: bool,
    frames: bool,
) -> LayerBytes:
    load = gpu_load(layout, model, workload, worker, moe=moe)
    # Tutel applies the gates after the combine, for which the returned rows are kept.
    retained = load.sent if layout.capacity_padded and moe else 0.0
    return layer_bytes(
        model,
        load,
        moe=moe,
        disaggregated=layout.placement.disaggregated,
        frames=frames,
        dense_exchange=layout.placement.disaggregated,
        retained=retained,
        recompute=recompute,
        shard=shard_of(layout),
    )


def _micro_batch_tokens(layout: Layout, workload: Workload) -> float:
    """Tokens of one micro-batch on one attention rank (of one context-parallel rank)."""
    return layout.batch.sequences * workload.seq / shard_of(layout).cp


def _home_tokens(layout: Layout, workload: Workload, worker: Worker) -> float:
    """Tokens of one micro-batch whose residual one GPU of `worker` has."""
    tokens = _micro_batch_tokens(layout, workload)
    if worker.pool != "F":
        return tokens
    placement = layout.placement
    return tokens * placement.workers[placement.attn[0]].gpus / worker.gpus


def gpu_load(layout: Layout, model: ModelSpec, workload: Workload, worker: Worker, *, moe: bool) -> Load:
    """What one GPU of `worker` handles of one micro-batch in one layer; the fullest GPU where experts are uneven.

    Rows on a GPU do not depend on the expert-parallel size: every rank brings
    tokens of its own. Between pools they do depend on the ratio of GPUs.
    """
    tokens, home = _micro_batch_tokens(layout, workload), _home_tokens(layout, workload, worker)
    tp = shard_of(layout).tp
    experts = local_experts(model, layout.ep)
    skew = workload.skew if layout.load is None else layout.load
    if not moe:
        return Load(tokens, 0.0, home, tokens if worker.pool == "A" else home, home)
    fullest = experts * layout.ep / model.experts * skew
    rows = home / tp * model.top_k * fullest
    nodes = _expert_nodes(layout, worker)
    on_ranks, on_nodes = (
        distinct_units(model.experts, model.top_k, units, model.n_group, model.topk_group)
        for units in (layout.ep, nodes)
    )
    copies = {"none": float(model.top_k), "rank": on_ranks, "node": on_nodes}[layout.merge]
    # Merged, a rank gets a token once however many of its experts it goes to, and never more than every token.
    merged = home / tp * on_ranks * min(fullest, layout.ep / on_ranks)
    received = rows if layout.merge == "none" else min(rows, merged)
    sent = tokens / tp * copies
    if not layout.placement.disaggregated:
        # Kernels that merge copies read the tokens where they are, and return their sum.
        sent = tokens / tp * (copies if layout.transport == "nccl" else 1.0)
        sent *= skew if layout.capacity_padded else 1.0
    elif worker.pool == "F":
        sent = home
    return Load(tokens, rows, home, sent, received, experts)


def _expert_nodes(layout: Layout, worker: Worker) -> int:
    """Nodes over which the experts of a layer lie, seen from either pool."""
    placement = layout.placement
    if placement.disaggregated:
        return placement.workers[placement.ffn[0]].nodes
    return max(1, -(-layout.ep * worker.nodes // worker.gpus))
