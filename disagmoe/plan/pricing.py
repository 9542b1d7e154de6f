"""What every row of a Program costs: seconds, bytes and contention factors.

`price` decides how a Layout turns into arguments of the cost model: how many
tokens and expert rows one GPU of a pool handles, over how many ranks a gradient
is reduced, which transport carries which exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.comet import TileCosts
from disagmoe.cost.model import CostModel
from disagmoe.cost.network import Transfer
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import COMM_KINDS, SEND_STREAMS, Kind, Phase, Stream
from disagmoe.plan.dependencies import is_wait
from disagmoe.plan.memory import GRADIENT_BYTES, WEIGHT_BYTES, Holding, holdings, local_experts
from disagmoe.plan.plan import Layout, Worker
from disagmoe.plan.price_table import price_table
from disagmoe.plan.program import Program, among
from disagmoe.plan.tile_pricing import layer_tiles
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


STATISTICS_BYTES = 12
"""Of one token, from one shard of the vocabulary: the softmax's maximum and sum, and the target's logit, fp32."""

_EXPERT_BLOCK = (Kind.DISPATCH, Kind.FFN, Kind.COMBINE)
_BACKWARD = (Phase.B, Phase.I)
"""Phases in which selective recompute repeats what it dropped; full recompute has rows of its own (phase R)."""

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
        self.load = costs.workload.skew if layout.load is None else layout.load
        """Load of the hottest rank over the mean: the routing's skew, or what a capacity makes of it."""
        # The fullest rank holds ceil(E/ep) experts.
        self.imbalance = experts * layout.ep / self.model.experts * self.load
        self.local_experts = experts
        in_place = layout.tiles is not None and layout.tiles.gather  # an all-gather and a reduce-scatter
        self.copies = costs.copy_work("node" if in_place else layout.merge, layout.ep)
        self.recompute = Recompute.of(layout.options)
        self.early_gather = layout.options.get("gather") == "early"
        """Updated parameters are gathered layer by layer before their first use, not as a whole at the end."""
        self.tiles: Callable[[Phase], TileCosts] = cache(lambda phase: layer_tiles(self, phase))
        # Layers of one kind share their prices: (MoE?, window) is all that differs between them.
        self._of_type = cache(self._price_type)

    def op(self, kind: Kind, phase: Phase, layer: int, chunk: int = 0) -> Transfer:
        """Cost of one operation (of one chunk, where the kind is chunked; they are alike but where there are tiles)."""
        if kind in (Kind.EMBED, Kind.HEAD):
            return _compute(self._ends(kind, phase))
        if self.layout.tiles is not None and kind in _EXPERT_BLOCK and self.model.is_moe(layer):
            return self._tile(kind, phase, chunk)
        if kind in (Kind.DISPATCH, Kind.COMBINE) and self.layout.placement.disaggregated:
            return self._m2n(kind, phase, layer)
        return self._of_type(kind, phase, self.model.is_moe(layer), self.model.window(layer))

    def worker_op(self, kind: Kind, phase: Phase, layer: int, worker: int) -> Transfer:
        """Cost of a gradient synchronisation or optimizer step on one worker."""
        holding = self.holdings[worker]
        if kind is Kind.OPTIM:
            return _compute(self.costs.optimizer(holding.updated))
        if phase is Phase.F and not self.early_gather:
            return self._sync(self.costs.all_gather, worker, WEIGHT_BYTES, holding.dense, holding.expert)
        dense, expert = self._layer_params(layer, worker)
        if phase is Phase.F:
            return self._sync(self.costs.all_gather, worker, WEIGHT_BYTES, dense, expert)
        return self._sync(self.costs.reduce_scatter, worker, GRADIENT_BYTES, dense, expert)

    def _ends(self, kind: Kind, phase: Phase) -> float:
        placement = self.layout.placement
        if kind is Kind.EMBED:
            return self.costs.embed(phase, self.tokens)
        heads = [placement.workers[w] for w in placement.heads]
        tokens = self.tokens * self._spread(heads[0])
        seconds = self.costs.head(phase, tokens, vocab_shards=len(heads))
        if phase is Phase.F or len(heads) == 1:
            return seconds
        # Backward first needs every token's maximum, sum and target logit over all shards.
        nodes = 1 if heads[0].shares_nodes(heads[1]) else len(heads)
        statistics = self.costs.all_reduce(
            nbytes=tokens * STATISTICS_BYTES, ranks=len(heads), nodes=nodes, nic_gbs=heads[0].nic_gbs
        )
        return seconds + statistics.seconds

    def _spread(self, worker: Worker) -> float:
        """Tokens on one GPU of `worker` per token on one attention rank."""
        return self._attention_gpus() / worker.gpus if worker.pool == "F" else 1.0

    def _attention_gpus(self) -> int:
        placement = self.layout.placement
        return placement.workers[placement.attn[0]].gpus

    def _price_type(self, kind: Kind, phase: Phase, moe: bool, window: int | None) -> Transfer:
        layer = self._representative(moe, window)
        placement = self.layout.placement
        if kind is Kind.ATTN:
            sequences = float(self.layout.batch.sequences)
            redone = self.costs.attention_redone(layer, sequences, self.recompute) if phase in _BACKWARD else 0.0
            return _compute(self.costs.attention(layer, phase, sequences, packed=self.copies.packed) + redone)
        if kind is Kind.FFN:
            return _compute(self._ffn(layer, phase, moe))
        if kind is Kind.P2P and placement.disaggregated:
            # The final rows, from one F-group of a spread head to the next.
            sender, taker = (placement.workers[w] for w in (*placement.heads, placement.head)[:2])
            tokens, near = self.tokens * self._spread(sender), sender.shares_nodes(taker)
            return self.costs.p2p(tokens=tokens, nic_gbs=sender.nic_gbs, inter_node=not near)
        if kind is Kind.P2P:
            # Neighbouring stages lie on different nodes as soon as one stage fills a node.
            worker = placement.workers[placement.attn[layer]]
            inter = worker.gpus >= self.costs.cluster.gpus_per_node
            return self.costs.p2p(tokens=self.tokens, nic_gbs=worker.nic_gbs, inter_node=inter)
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
        normed = 0.0  # where experts are apart, they norm what they receive: the router's norm stays with attention
        if self.layout.placement.disaggregated:
            normed = home * (self.copies.received(self.imbalance) if moe else 1.0)
        seconds = self.costs.ffn(
            layer,
            phase,
            home_tokens=home / chunks,
            rows=rows / chunks,
            local_experts=float(self.local_experts),
            returned=self.copies.returned,
            normed=normed / chunks,
        )
        return seconds + (self.costs.experts_redone(rows / chunks, self.recompute) if phase in _BACKWARD else 0.0)

    def _all_to_all(self, kind: Kind, phase: Phase, moe: bool) -> Transfer:
        if not moe:
            return NOTHING
        transfer = self.fullest_rank(kind, phase)
        if self.layout.capacity_padded:
            return transfer
        # The fullest rank sets the time for everyone, but only padding makes every rank send that much.
        return replace(transfer, nic_bytes=self._exchanged(kind, phase, 1.0).nic_bytes)

    def fullest_rank(self, kind: Kind, phase: Phase) -> Transfer:
        """One chunk of a colocated exchange as the rank with the most rows sees it."""
        return self._exchanged(kind, phase, max(1.0, self.load))

    def _exchanged(self, kind: Kind, phase: Phase, factor: float) -> Transfer:
        """The same with `factor` times the mean rows."""
        layout = self.layout
        worker = layout.placement.workers[0]
        # A capacity below the mean load thins the tokens out; the fullest rank is then like all others.
        tokens = self.tokens / layout.chunks * min(1.0, self.load)
        exchange = self.costs.two_level_all_to_all if layout.two_level else self.costs.all_to_all
        return exchange(
            tokens=tokens,
            ep=layout.ep,
            nodes=self.ep_nodes(),
            transport=layout.transport,
            merge=layout.merge,
            nic_gbs=worker.nic_gbs,
            phase=phase,
            combine=kind is Kind.COMBINE,
            volume_factor=factor,
        )

    def ep_nodes(self) -> int:
        """Nodes an expert-parallel group of a colocated system lies on."""
        worker = self.layout.placement.workers[0]
        return max(1, -(-self.layout.ep * worker.nodes // worker.gpus))

    def _tile(self, kind: Kind, phase: Phase, chunk: int) -> Transfer:
        """One tile group; where no exchange runs beside them, the experts whole (chunk -1) or an equal part of them."""
        tiles = self.layout.tiles
        if kind is Kind.FFN and tiles is not None and (chunk < 0 or (phase is Phase.R and not self.recompute.resends)):
            parts = 1 if chunk < 0 else tiles.groups + tiles.columns
            return _compute(self._ffn(self.moe_layer, phase, moe=True) / parts)
        backward = phase in _BACKWARD
        costs = self.tiles(Phase.I if backward else Phase.F)
        if kind is Kind.FFN:
            return _compute(costs.gemms[chunk])
        arriving = (kind is Kind.DISPATCH) != backward
        part = (costs.first if arriving else costs.second)[chunk]
        if tiles is None or tiles.gather or not part.nic_bytes:
            return part
        whole, mean = self._exchanged(kind, phase, max(1.0, self.load)), self._exchanged(kind, phase, 1.0)
        return replace(part, nic_bytes=part.nic_bytes * mean.nic_bytes / whole.nic_bytes)

    @cached_property
    def moe_layer(self) -> int:
        """Some layer with experts; they are all alike."""
        return next(layer for layer in range(self.model.layers) if self.model.is_moe(layer))

    def _m2n(self, kind: Kind, phase: Phase, layer: int) -> Transfer:
        layout, placement = self.layout, self.layout.placement
        experts = placement.workers[placement.ffn[layer]]
        if kind is Kind.COMBINE and layer < self.model.layers - 1:
            attention = placement.workers[placement.attn[layer + 1]]
        else:
            attention = placement.workers[placement.attn[layer] if kind is Kind.DISPATCH else placement.head]
        if attention.pool == "F":
            return self._inside(experts, phase) if self.model.is_moe(layer) else NOTHING
        moe, near = self.model.is_moe(layer), attention.shares_nodes(experts)
        # Experts lie evenly on the nodes; the home ranks of a dense layer are where the tokens come from.
        share = (1.0 / experts.nodes if moe else 1.0) if near else 0.0
        return self.costs.m2n(
            tokens=self.tokens,
            senders=attention,
            receivers=experts,
            copies="experts" if moe else "one",
            transport=layout.transport,
            merge=layout.merge,
            phase=phase,
            combine=kind is Kind.COMBINE,
            local=share,
        )

    def _inside(self, experts: Worker, phase: Phase) -> Transfer:
        """The head follows on the F-group itself: partial rows meet on the token's home rank (a dense MLP's are there).

        As elsewhere the fullest rank sets the time, and all together send what the mean load makes them.
        """
        fullest, mean = (
            self.costs.all_to_all(
                tokens=self.tokens * self._spread(experts),
                ep=experts.gpus,
                nodes=experts.nodes,
                transport=self.layout.transport,
                merge=self.layout.merge,
                nic_gbs=experts.nic_gbs,
                phase=phase,
                combine=True,
                volume_factor=factor,
            )
            for factor in (self.load, 1.0)
        )
        return replace(fullest, nic_bytes=mean.nic_bytes)

    def _layer_params(self, layer: int, worker: int) -> tuple[float, float]:
        """Dense and expert parameters whose gradients one sync of `layer` reduces."""
        placement = self.layout.placement
        if layer < 0:
            whole = self.holdings[worker]
            owned = [self._layer_params(x, worker) for x in range(self.model.layers)]
            return whole.dense - sum(d for d, _ in owned), 0.0
        dense = attention_params(self.model, layer) if worker in placement.holders(placement.attn[layer]) else 0
        expert = 0
        if worker in placement.holders(placement.ffn[layer]):
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
            nodes = min(ranks, w.nodes * self.layout.placement.copies, self.costs.cluster.nodes)
            parts.append(collective(nbytes=params * item_bytes, ranks=ranks, nodes=nodes, nic_gbs=w.nic_gbs))
        return Transfer(
            seconds=parts[0].seconds + parts[1].seconds,
            nic_bytes=parts[0].nic_bytes + parts[1].nic_bytes,
            nvlink_bytes=parts[0].nvlink_bytes + parts[1].nvlink_bytes,
            link=min(part.link for part in parts),
        )


def price(layout: Layout, program: Program, costs: CostModel) -> Pricing:
    """Price every row of a Program of this Layout; rows of one sort cost the same."""
    of, sample = program.sorts
    prices = _price(layout, sample, costs)
    return Pricing(**{column.name: getattr(prices, column.name)[of] for column in fields(prices)})


def _price(layout: Layout, program: Program, costs: CostModel) -> Pricing:
    code, seconds, link, nic_bytes = price_table(LayoutCosts(layout, costs), program)
    duration_s = np.where(is_wait(program), 0.0, seconds[code])
    comm = among(program.kind, COMM_KINDS)
    duration_s = duration_s * np.where(comm, 1.0, _straggle(layout, program, costs))
    sends = among(program.stream, (*SEND_STREAMS, Stream.COLL, Stream.SYNC, Stream.NVLINK))
    compute, slowed = _contention(layout, program, costs, comm)
    return Pricing(
        duration_s=duration_s,
        link=link[code],
        slows_compute=compute,
        slowed_by_compute=slowed,
        wire_bytes=np.where(sends, nic_bytes[code], 0.0),
    )


def _straggle(layout: Layout, program: Program, costs: CostModel) -> FloatArray:
    """Slowdown of the compute of each row's worker."""
    placement = layout.placement
    factor = costs.workload.slowdowns([worker.gpus for worker in placement.workers], placement.replicas)
    return np.array(factor)[program.worker]


def _contention(
    layout: Layout, program: Program, costs: CostModel, comm: NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """Per row: how much it stretches compute, and how much compute stretches it."""
    exchange = costs.contention(layout.transport)
    other = costs.contention(GRAD_TRANSPORT)
    carried = among(program.kind, (Kind.DISPATCH, Kind.COMBINE))
    if layout.placement.disaggregated:  # the final rows of a spread head go the way of the tokens
        carried |= program.kind == int(Kind.P2P)
    # The SMs of a tiled exchange are taken out of its GEMMs already.
    taken = 1.0 if layout.tiles is not None else exchange.compute
    compute = np.where(comm, np.where(carried, taken, other.compute), 1.0)
    slowed = np.where(comm, np.where(carried, exchange.comm, other.comm), 1.0)
    return compute, slowed
