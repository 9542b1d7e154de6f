"""What every row of a Program costs: seconds, bytes and contention factors.

`price` decides how a Layout turns into arguments of the cost model: how many
tokens and expert rows one GPU of a pool handles, over how many ranks a gradient
is reduced, which transport carries which exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.model import CostModel
from disagmoe.cost.network import Transfer
from disagmoe.ops import COMM_KINDS, SEND_STREAMS, Kind, Phase, Stream
from disagmoe.plan.memory import GRADIENT_BYTES, WEIGHT_BYTES, Holding, holdings, local_experts
from disagmoe.plan.plan import Layout, Worker
from disagmoe.plan.program import Program
from disagmoe.specs.params import attention_params, expert_params, ffn_shared_params

FloatArray = NDArray[np.float64]

GRAD_TRANSPORT = "nccl"
"""Pipeline P2P and gradient synchronisation run on NCCL in every view."""


@dataclass(frozen=True, eq=False)
class Pricing:
    """Costs of the rows of one Program; all arrays have shape [rows].

    `duration_s` is the time of the row when nothing disturbs it (both rows of a
    transfer carry the same value). `link` is 0 where the row's bytes cross NICs
    and 1 where they stay on NVLink: transfers that use one link of one worker in
    one direction at the same time share it. `slows_compute` >= 1 is the factor
    by which a communication row stretches compute running beside it on the same
    worker, `slowed_by_compute` >= 1 the factor by which it is stretched itself.
    `wire_bytes` are the bytes one GPU of the worker sends over its NIC.
    """

    duration_s: FloatArray
    link: NDArray[np.int8]
    slows_compute: FloatArray
    slowed_by_compute: FloatArray
    wire_bytes: FloatArray

    @classmethod
    def ideal(cls, duration_s: FloatArray) -> Pricing:
        """Given durations, no contention, no wire bytes: for closed forms and tests."""
        n = duration_s.shape[0]
        return cls(
            duration_s=duration_s.astype(np.float64),
            link=np.zeros(n, dtype=np.int8),
            slows_compute=np.ones(n),
            slowed_by_compute=np.ones(n),
            wire_bytes=np.zeros(n),
        )


NOTHING = Transfer(seconds=0.0, nic_bytes=0.0, nvlink_bytes=0.0, link=1)


def _compute(seconds: float) -> Transfer:
    return Transfer(seconds=seconds, nic_bytes=0.0, nvlink_bytes=0.0, link=0)


class LayoutCosts:
    """The cost of one operation of a Layout, by kind, phase and layer.

    A worker is a symmetric group, so an operation costs the same on each of its
    GPUs; the busiest GPU (uneven experts, routing skew) sets the time.
    """

    def __init__(self, layout: Layout, costs: CostModel) -> None:
        self.layout = layout
        self.costs = costs
        self.model = costs.model
        self.tokens = float(layout.batch.sequences * costs.workload.seq)
        """Tokens of one micro-batch on one attention rank."""
        self.holdings: tuple[Holding, ...] = holdings(layout, costs.model)
        experts = local_experts(self.model, layout.ep)
        # The fullest rank holds ceil(E/ep) experts; skew is the load of the hottest rank over the mean.
        self.imbalance = experts * layout.ep / self.model.experts * costs.workload.skew
        self.local_experts = experts
        # Layers of one kind share their prices: (MoE?, window) is all that differs between them.
        self._of_type = cache(self._price_type)

    def op(self, kind: Kind, phase: Phase, layer: int) -> Transfer:
        """Cost of one operation (of one chunk, where the kind is chunked)."""
        if kind in (Kind.EMBED, Kind.HEAD):
            return _compute(self._ends(kind, phase))
        last = layer == self.model.layers - 1
        return self._of_type(kind, phase, self.model.is_moe(layer), self.model.window(layer), layer if last else -1)

    def worker_op(self, kind: Kind, phase: Phase, layer: int, worker: int) -> Transfer:
        """Cost of a gradient synchronisation or optimizer step on one worker."""
        holding = self.holdings[worker]
        if kind is Kind.OPTIM:
            return _compute(self.costs.optimizer(holding.updated))
        if phase is Phase.F:
            return self._sync(self.costs.all_gather, worker, WEIGHT_BYTES, holding.dense, holding.expert)
        dense, expert = self._layer_params(layer, worker)
        return self._sync(self.costs.reduce_scatter, worker, GRADIENT_BYTES, dense, expert)

    def _ends(self, kind: Kind, phase: Phase) -> float:
        placement = self.layout.placement
        if kind is Kind.EMBED:
            return self.costs.embed(phase, self.tokens)
        return self.costs.head(phase, self.tokens * self._spread(placement.workers[placement.head]))

    def _spread(self, worker: Worker) -> float:
        """Tokens on one GPU of `worker` per token on one attention rank."""
        return self._attention_gpus() / worker.gpus if worker.pool == "F" else 1.0

    def _attention_gpus(self) -> int:
        placement = self.layout.placement
        return placement.workers[placement.attn[0]].gpus

    def _price_type(self, kind: Kind, phase: Phase, moe: bool, window: int | None, last: int) -> Transfer:
        layer = last if last >= 0 else self._representative(moe, window)
        placement = self.layout.placement
        if kind is Kind.ATTN:
            return _compute(self.costs.attention(layer, phase, float(self.layout.batch.sequences)))
        if kind is Kind.FFN:
            return _compute(self._ffn(layer, phase, moe))
        if kind is Kind.P2P:
            # Neighbouring stages lie on different nodes as soon as one stage fills a node.
            worker = placement.workers[placement.attn[layer]]
            inter = worker.gpus >= self.costs.cluster.gpus_per_node
            return self.costs.p2p(tokens=self.tokens, nic_gbs=worker.nic_gbs, inter_node=inter)
        if placement.disaggregated:
            return self._m2n(kind, phase, layer, moe)
        return self._all_to_all(kind, phase, moe)

    def _representative(self, moe: bool, window: int | None) -> int:
        return next(
            x for x in range(self.model.layers) if (self.model.is_moe(x), self.model.window(x)) == (moe, window)
        )

    def _ffn(self, layer: int, phase: Phase, moe: bool) -> float:
        worker = self.layout.placement.workers[self.layout.placement.ffn[layer]]
        chunks = self.layout.chunks if moe else 1
        home = self.tokens * self._spread(worker)
        rows = home * self.model.top_k * self.imbalance if moe else 0.0
        return self.costs.ffn(
            layer, phase, home_tokens=home / chunks, rows=rows / chunks, local_experts=float(self.local_experts)
        )

    def _all_to_all(self, kind: Kind, phase: Phase, moe: bool) -> Transfer:
        if not moe:
            return NOTHING
        layout = self.layout
        worker = layout.placement.workers[0]
        skew = self.costs.workload.skew
        transfer = self.costs.all_to_all(
            tokens=self.tokens / layout.chunks,
            ep=layout.ep,
            nodes=max(1, -(-layout.ep * worker.nodes // worker.gpus)),
            transport=layout.transport,
            merge=layout.merge,
            nic_gbs=worker.nic_gbs,
            phase=phase,
            combine=kind is Kind.COMBINE,
            volume_factor=skew,
        )
        # The fullest rank sets the time for everyone, but only padding makes every rank send that much.
        return transfer if layout.capacity_padded else replace(transfer, nic_bytes=transfer.nic_bytes / skew)

    def _m2n(self, kind: Kind, phase: Phase, layer: int, moe: bool) -> Transfer:
        layout, placement = self.layout, self.layout.placement
        senders = placement.workers[placement.attn[layer]]
        receivers = placement.workers[placement.ffn[layer]]
        if kind is Kind.COMBINE and layer == self.model.layers - 1:
            # The head follows on the F-group itself: partial rows meet on the token's home rank.
            return self.costs.all_to_all(
                tokens=self.tokens * self._spread(receivers),
                ep=receivers.gpus,
                nodes=receivers.nodes,
                transport=layout.transport,
                merge=layout.merge,
                nic_gbs=receivers.nic_gbs,
                phase=phase,
                combine=True,
            )
        return self.costs.m2n(
            tokens=self.tokens,
            senders=senders,
            receivers=receivers,
            copies="experts" if moe else "one",
            transport=layout.transport,
            merge=layout.merge,
            phase=phase,
            combine=kind is Kind.COMBINE,
        )

    def _layer_params(self, layer: int, worker: int) -> tuple[float, float]:
        """Dense and expert parameters whose gradients one sync of `layer` reduces."""
        placement = self.layout.placement
        if layer < 0:
            whole = self.holdings[worker]
            owned = [self._layer_params(x, worker) for x in range(self.model.layers)]
            return whole.dense - sum(d for d, _ in owned), 0.0
        dense = attention_params(self.model, layer) if placement.attn[layer] == worker else 0
        expert = 0
        if placement.ffn[layer] == worker:
            dense += ffn_shared_params(self.model, layer)
            expert = self.local_experts * expert_params(self.model) if self.model.is_moe(layer) else 0
        return float(dense), float(expert)

    def _sync(
        self, collective: Callable[..., Transfer], worker: int, item_bytes: int, dense: float, expert: float
    ) -> Transfer:
        """Dense and expert parameters are synchronised one after the other, on their own groups."""
        w = self.layout.placement.workers[worker]
        holding = self.holdings[worker]
        parts = []
        for params, ranks in ((dense, holding.dense_ranks), (expert, holding.expert_ranks)):
            # Ranks that replicate an expert sit on different nodes wherever a group fills its nodes.
            nodes = min(ranks, w.nodes * self.layout.placement.replicas)
            parts.append(collective(nbytes=params * item_bytes, ranks=ranks, nodes=nodes, nic_gbs=w.nic_gbs))
        return Transfer(
            seconds=parts[0].seconds + parts[1].seconds,
            nic_bytes=parts[0].nic_bytes + parts[1].nic_bytes,
            nvlink_bytes=parts[0].nvlink_bytes + parts[1].nvlink_bytes,
            link=min(part.link for part in parts),
        )


def price(layout: Layout, program: Program, costs: CostModel) -> Pricing:
    """Price every row of a Program of this Layout."""
    prices = LayoutCosts(layout, costs)
    depth = program.n_layers + 1
    code = (program.kind.astype(np.int64) * len(Phase) + program.phase) * depth + program.layer + 1
    per_worker = (program.kind == Kind.GRAD_SYNC) | (program.kind == Kind.OPTIM)
    code = np.where(per_worker, -1 - (code * program.n_workers + program.worker), code)
    unique, inverse = np.unique(code, return_inverse=True)

    table = []
    for value in unique.tolist():
        key, worker = divmod(-1 - value, program.n_workers) if value < 0 else (value, -1)
        kind_phase, layer = divmod(key, depth)
        kind, phase = Kind(kind_phase // len(Phase)), Phase(kind_phase % len(Phase))
        table.append(
            prices.op(kind, phase, layer - 1) if worker < 0 else prices.worker_op(kind, phase, layer - 1, worker)
        )

    def column(values: list[float]) -> FloatArray:
        return np.asarray(values, dtype=np.float64)[inverse]

    duration_s = column([t.seconds for t in table])
    comm = np.isin(program.kind, [int(k) for k in COMM_KINDS])
    duration_s = duration_s * np.where(comm, 1.0, _straggle(program, costs))
    sends = np.isin(program.stream, [int(s) for s in (*SEND_STREAMS, Stream.COLL, Stream.SYNC, Stream.NVLINK)])
    compute, slowed = _contention(layout, program, costs, comm)
    return Pricing(
        duration_s=duration_s,
        link=np.asarray([t.link for t in table], dtype=np.int8)[inverse],
        slows_compute=compute,
        slowed_by_compute=slowed,
        wire_bytes=np.where(sends, column([t.nic_bytes for t in table]), 0.0),
    )


def _straggle(program: Program, costs: CostModel) -> FloatArray:
    """Slowdown of the compute of each row's worker."""
    factor = np.ones(program.n_workers)
    for worker, slowdown in costs.workload.stragglers:
        if worker >= program.n_workers:
            raise ValueError(f"straggler on worker {worker}: this plan has workers 0 to {program.n_workers - 1}")
        factor[worker] = slowdown
    return factor[program.worker]


def _contention(
    layout: Layout, program: Program, costs: CostModel, comm: NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """Per row: how much it stretches compute, and how much compute stretches it."""
    exchange = costs.contention(layout.transport)
    other = costs.contention(GRAD_TRANSPORT)
    carried = np.isin(program.kind, (int(Kind.DISPATCH), int(Kind.COMBINE)))
    compute = np.where(comm, np.where(carried, exchange.compute, other.compute), 1.0)
    slowed = np.where(comm, np.where(carried, exchange.comm, other.comm), 1.0)
    return compute, slowed


def lower_bound_s(layout: Layout, costs: CostModel) -> float:
    """A time no schedule of this Layout can beat: its busiest worker's own work.

    Where nothing can run beside dispatch and combine (`serial_exchange`, no
    overlap by design), they count as work of the worker too.
    """
    prices = LayoutCosts(layout, costs)
    placement = layout.placement
    busy = [0.0] * len(placement.workers)
    for layer in range(costs.model.layers):
        moe = costs.model.is_moe(layer)
        chunks = layout.chunks if moe else 1
        for phase in (Phase.F, Phase.B):
            busy[placement.attn[layer]] += prices.op(Kind.ATTN, phase, layer).seconds
            busy[placement.ffn[layer]] += prices.op(Kind.FFN, phase, layer).seconds * chunks
            if layout.serial_exchange:
                for kind in (Kind.DISPATCH, Kind.COMBINE):
                    busy[placement.ffn[layer]] += prices.op(kind, phase, layer).seconds * chunks
    for phase in (Phase.F, Phase.B):
        busy[placement.embed] += prices.op(Kind.EMBED, phase, -1).seconds
        busy[placement.head] += prices.op(Kind.HEAD, phase, -1).seconds
    return max(busy) * layout.batch.microbatches
