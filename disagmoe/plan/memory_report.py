"""Decides what a plan's GPUs hold, by component: the report, its peak, and a bound before there is a Program.

A Layout says what one GPU handles (tokens, expert rows, copies on the wire);
`cost.memory` says what that costs in bytes; `memory_timeline` integrates it over
the Program. Communicators count towards the peak and stay apart from
`allocated_gib`, which is what an allocator would report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.copies import distinct_units
from disagmoe.cost.memory import LOSS_CHUNK_TOKENS, LayerBytes, Load, embed_bytes, head_bytes, layer_bytes
from disagmoe.cost.recompute import Recompute
from disagmoe.plan.memory import (
    GIB,
    RECIPES,
    Recipe,
    StaticMemory,
    held,
    holdings,
    local_experts,
    shard_of,
    static_memory,
)
from disagmoe.plan.memory_events import DYNAMIC, WorkerBytes
from disagmoe.plan.memory_timeline import Levels, levels
from disagmoe.plan.plan import Layout, Worker
from disagmoe.plan.program import Program
from disagmoe.specs import ModelSpec, Workload

FloatArray = NDArray[np.float64]

STATIC = ("weights", "gradients", "optimizer", "workspace", "communicators")
COMPONENTS = (*STATIC, *DYNAMIC)
"""Components of a worker's memory, in the order of tables and pictures; they add up to its peak."""


@dataclass(frozen=True)
class WorkerMemory:
    """One GPU of one worker: GiB by component (COMPONENTS) at its peak."""

    name: str
    pool: str
    gpus: int
    at_peak: Mapping[str, float]

    @property
    def peak_gib(self) -> float:
        """All components together."""
        return sum(self.at_peak.values())

    @property
    def allocated_gib(self) -> float:
        """What torch.cuda.max_memory_allocated would say: all but communicators."""
        return self.peak_gib - self.at_peak["communicators"]


@dataclass(frozen=True, eq=False)
class MemoryReport:
    """Memory of one GPU of every worker, at its peak and over the step.

    `unit` says what `curve` is over: "operations" (the worker's compute order) or
    "seconds". `static[w]` [GiB] is what a worker holds all the time.
    """

    workers: tuple[WorkerMemory, ...]
    static: tuple[StaticMemory, ...]
    levels: Levels
    unit: str

    @cached_property
    def peaks_gib(self) -> tuple[float, ...]:
        """Peak of every worker; what `plan.verify` compares with the limit."""
        return tuple(w.peak_gib for w in self.workers)

    @property
    def peak_gib(self) -> float:
        """Peak of the fullest GPU."""
        return max(self.peaks_gib)

    @property
    def fullest(self) -> WorkerMemory:
        """The worker with the highest peak, the first of equals."""
        return max(self.workers, key=lambda w: w.peak_gib)

    def curve(self, worker: int) -> tuple[FloatArray, FloatArray]:
        """(place of every event, GiB held after it by component [len(COMPONENTS), events]) of one worker."""
        low, high = int(self.levels.first[worker]), int(self.levels.first[worker + 1])
        fixed = np.array(list(self.static[worker].parts.values()))
        held_gib = np.empty((len(COMPONENTS), high - low))
        held_gib[: len(STATIC)] = fixed[:, None]
        held_gib[len(STATIC) :] = self.levels.nbytes[:, low:high] / GIB
        return self.levels.where[low:high], held_gib

    def table(self) -> list[dict[str, str | int | float]]:
        """One row per worker: name, pool, gpus, peak_gib and every component, for tables and JSON."""
        return [
            {"worker": w.name, "pool": w.pool, "gpus": w.gpus, "peak_gib": w.peak_gib, **w.at_peak}
            for w in self.workers
        ]


def memory_report(
    layout: Layout,
    program: Program,
    model: ModelSpec,
    workload: Workload,
    *,
    recompute: Recompute | None = None,
    optimizer: str | Recipe = "megatron",
    loss_chunk: int | None = LOSS_CHUNK_TOKENS,
    start_s: FloatArray | None = None,
    end_s: FloatArray | None = None,
) -> MemoryReport:
    """What one GPU of every worker holds while this Program runs.

    `recompute` defaults to the Layout's options. `optimizer` names a recipe of
    RECIPES. `loss_chunk` are the tokens whose logits exist at once (None: all).
    `start_s` and `end_s` [rows] place every buffer in time (a Timeline's); without
    them the order of the compute streams does.
    """
    policy = Recompute.of(layout.options) if recompute is None else recompute
    recipe = _recipe(optimizer)
    fixed = static_memory(layout, model, program, recipe)
    moe = [model.is_moe(layer) for layer in range(model.layers)]
    frames = in_frames(layout, program)
    dynamic = levels(
        program,
        worker_bytes(layout, model, workload, policy, frames=frames, loss_chunk=loss_chunk, step=recipe.step),
        moe,
        policy,
        frames=frames,
        start_s=start_s,
        end_s=end_s,
    )
    workers = []
    for index, worker in enumerate(layout.placement.workers):
        event = dynamic.peak_event(index)
        moving = dynamic.nbytes[:, event] / GIB if event >= 0 else np.zeros(len(DYNAMIC))
        at_peak = {**fixed[index].parts, **dict(zip(DYNAMIC, moving.tolist(), strict=True))}
        workers.append(WorkerMemory(worker.name, worker.pool, worker.gpus, at_peak))
    return MemoryReport(tuple(workers), fixed, dynamic, "operations" if start_s is None else "seconds")


def peak_gib(
    layout: Layout,
    program: Program,
    model: ModelSpec,
    workload: Workload,
    *,
    optimizer: str | Recipe = "megatron",
) -> float:
    """Peak of the fullest GPU, by the order of the Program. Linear in rows, a few milliseconds."""
    return memory_report(layout, program, model, workload, optimizer=optimizer).peak_gib


def lower_bound_gib(
    layout: Layout, model: ModelSpec, workload: Workload, *, optimizer: str | Recipe = "megatron"
) -> float:
    """What no Program of this Layout can go below: static memory and one micro-batch in flight.

    Every schedule passes through a moment at which a micro-batch has run all its
    forwards and none of its backwards, so every worker holds what its layers keep.
    """
    policy = Recompute.of(layout.options)
    static = static_memory(layout, model, recipe=_recipe(optimizer))
    nbytes = worker_bytes(layout, model, workload, policy, frames=False)
    holds = held(layout, model)
    again = {side: policy_side == "full" for side, policy_side in (("attn", policy.attention), ("ffn", policy.ffn))}
    most = 0.0
    for index, (fixed, of) in enumerate(zip(static, nbytes, strict=True)):
        kept = 0.0
        for layer in range(model.layers):
            kind = of.layers[int(model.is_moe(layer))]
            for flag, op, redone in (
                (holds.attn[index, layer], kind.attention, again["attn"]),
                (holds.ffn[index, layer], kind.ffn, again["ffn"]),
            ):
                kept += (op.kept if redone else op.saved) if flag else 0.0
        most = max(most, fixed.total_gib + kept / GIB)
    return most


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


def _recipe(optimizer: str | Recipe) -> Recipe:
    if isinstance(optimizer, Recipe):
        return optimizer
    if optimizer not in RECIPES:
        raise ValueError(f"optimizer={optimizer!r}: allowed are {', '.join(RECIPES)}")
    return RECIPES[optimizer]
