"""What the hardware alone makes a training step take: compute, NICs and NVLink, whatever the schedule.

Decides what counts. Every plan must do the model's arithmetic, move the model's
tokens to their experts and back in every MoE layer, and update every parameter.
Nothing else is charged: no pipeline fill, latency, launch, recompute, imbalance or
synchronisation of gradients. Kernels are priced as if the whole batch went through
them at once, which is where they are fastest.

Two forms are bounded and the smaller bound holds for any plan of one expert-parallel
size: attention and experts *together* on every GPU, and *apart* on pools of their
own, at the best split of GPUs whose experts fit in memory. Together, what a token
has on its own node stays on NVLink; apart, every copy crosses a NIC of either pool,
or, where the pools share k nodes, all but 1/k.

Compute and exchange of one GPU run side by side but slow each other: with factors c
and x, overlapping for o seconds does o / c of the one and o / x of the other, so

    step >= C + X - o (1 / c + 1 / x - 1),   o = min(c C, x X)

(o = 0 where overlap does not pay). This is convex in (C, X), so it holds for the
mean over GPUs too. An exchange fused with the experts' GEMMs (Comet) has no c: its
SMs are taken out of those GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from disagmoe.cost.compute import BF16
from disagmoe.cost.model import CostModel
from disagmoe.cost.network import colocated_copies
from disagmoe.ops import Phase
from disagmoe.plan.memory import GIB, RECIPES
from disagmoe.specs.params import parameters

_PHASES = (Phase.F, Phase.B)
_EXCHANGES = 4
"""Dispatch and combine, forward and backward, of one MoE layer."""


@dataclass(frozen=True)
class Resources:
    """Seconds each resource of the busiest kind of GPU is needed for, and the least step that follows.

    `form` is "together" or "apart", with `expert_gpus` of the GPUs for experts where
    apart. `step_s` counts contention; without it the largest of the three would do.
    """

    form: str
    step_s: float
    compute_s: float
    nic_s: float
    nvlink_s: float
    expert_gpus: int = 0

    @property
    def binds(self) -> str:
        """The resource that is needed longest."""
        named = (("compute", self.compute_s), ("NIC", self.nic_s), ("NVLink", self.nvlink_s))
        return max(named, key=lambda pair: pair[1])[0]


@dataclass(frozen=True)
class Work:
    """Compute of some layers in GPU-seconds, the tokens of one exchange, and how many layers exchange."""

    attention: float
    experts: float
    rest: float
    tokens: float
    moe_layers: int

    @property
    def compute(self) -> float:
        return self.attention + self.experts + self.rest


def resource_bound(costs: CostModel, transport: str, merge: str, ep: int, *, fused: bool = False) -> Resources:
    """The least step of `costs.workload` with experts over `ep` ranks, on this transport.

    `fused`: the exchange is part of the experts' kernels. Never above the step of
    any plan that does all its tokens (a capacity that drops some does less).
    """
    work = work_of(costs, merge, ep, fused=fused)
    forms = [together(costs, work, transport, merge, ep, fused=fused), *apart(costs, work, transport, merge, ep)]
    return min(forms, key=lambda form: form.step_s)


def work_of(
    costs: CostModel,
    merge: str,
    ep: int,
    *,
    layers: Sequence[int] | None = None,
    ends: bool = True,
    fused: bool = False,
) -> Work:
    """What a step computes in these layers (None: all), with embedding, head and optimizer where `ends`."""
    model, load = costs.model, costs.workload
    chosen = range(model.layers) if layers is None else layers
    sequences, tokens = float(load.global_batch), float(load.global_batch * load.seq)
    copies = costs.copy_work("node" if fused else merge, ep)  # fused kernels read and sum copies where they are
    attention = experts = 0.0
    for first in (costs.like[layer] for layer in chosen):
        for phase in _PHASES:
            attention += costs.attention(first, phase, sequences, packed=copies.packed)
            experts += _ffn(costs, first, phase, tokens, copies.returned, fused and model.is_moe(first))
    rest = sum(costs.embed(phase, tokens) + costs.head(phase, tokens) for phase in _PHASES)
    rest = rest + costs.optimizer(float(parameters(model).total)) if ends else 0.0
    return Work(attention, experts, rest, tokens, sum(model.is_moe(layer) for layer in chosen))


def _ffn(costs: CostModel, layer: int, phase: Phase, tokens: float, returned: float, fused: bool) -> float:
    """All experts of a layer and what home ranks do; fused kernels sort and weight rows on their way."""
    moe, local = costs.model.is_moe(layer), float(costs.model.experts)

    def whole(part: Phase, rows: float) -> float:
        experts = local if rows else 0.0
        return costs.ffn(layer, part, home_tokens=tokens, rows=rows, local_experts=experts, returned=returned)

    rows = tokens * costs.model.top_k if moe else 0.0
    if not fused:
        return whole(phase, rows)
    part = Phase.F if phase is Phase.F else Phase.I
    halves = sum(costs.expert_halves(part, rows, local)) + whole(part, 0.0)
    return halves if phase is Phase.F else halves + whole(Phase.W, rows)


def together(costs: CostModel, work: Work, transport: str, merge: str, ep: int, *, fused: bool = False) -> Resources:
    """Every GPU has its share of everything."""
    model, cluster = costs.model, costs.cluster
    nodes = ceil(ep / cluster.gpus_per_node)
    copies = colocated_copies(merge, ep, nodes, model.top_k, costs.distinct(ep), costs.distinct(nodes))
    nvlink_rows = copies.nvlink
    if fused and nodes == 1:  # an all-gather, and a reduce-scatter of one row per rank that holds an expert
        nvlink_rows = min(nvlink_rows, costs.distinct(ep) * (ep - 1.0) / ep)
    moved = work.tokens * model.hidden * BF16 * work.moe_layers * _EXCHANGES / cluster.gpus
    nic_s = copies.nic * moved / costs.network.nic(cluster.nic_gbs_per_gpu()) if copies.nic > 0.0 else 0.0
    nvlink_s = nvlink_rows * moved / costs.network.nvlink
    compute_s = work.compute / cluster.gpus
    factors = costs.contention(transport)
    step_s = side_by_side(compute_s, max(nic_s, nvlink_s), 1.0 if fused else factors.compute, factors.comm)
    return Resources("together", step_s, compute_s, nic_s, nvlink_s)


def apart(costs: CostModel, work: Work, transport: str, merge: str, ep: int) -> Iterator[Resources]:
    """Every split of the GPUs in multiples of `ep` for the experts that fit there, under either NIC rule."""
    cluster, factors = costs.cluster, costs.contention(transport)
    recipe = RECIPES[costs.workload.optimizer]
    experts_bytes = parameters(costs.model).routed_experts * (recipe.weight + recipe.gradient + recipe.optimizer)
    least = experts_bytes / (cluster.limit_gib * GIB)
    crossing = [rows for rows in (_rows_apart(costs, merge, ep), _rows_shared(costs, merge, ep)) if rows is not None]
    # Every layer is sent there and back twice; the last combine may stay inside the experts' own group.
    moved = work.tokens * costs.model.hidden * BF16 * (2 * work.moe_layers - 1)
    pool_nic = cluster.nodes * cluster.gpus_per_node * cluster.nic_gbs_per_gpu() / 2.0
    nic_s = min(crossing) * moved / costs.network.nic(pool_nic) if crossing and min(crossing) > 0.0 else 0.0
    fan_out = costs.distinct(ep) if merge == "node" else 0.0
    for expert_gpus in range(ep, cluster.gpus, ep):
        if not crossing or expert_gpus < least:
            continue
        nvlink_s = fan_out * moved / expert_gpus / costs.network.nvlink
        exchange_s = max(nic_s, nvlink_s)
        loads = (
            work.attention / (cluster.gpus - expert_gpus),
            work.experts / expert_gpus,
            work.compute / cluster.gpus,
        )
        step_s = max(side_by_side(load, exchange_s, factors.compute, factors.comm) for load in loads)
        yield Resources("apart", step_s, max(loads), nic_s, nvlink_s, expert_gpus)


def _rows_apart(costs: CostModel, merge: str, ep: int) -> float:
    """Rows per token over NICs where the pools have nodes of their own."""
    nodes = ceil(ep / costs.cluster.gpus_per_node)
    units = {"none": float(costs.model.top_k), "rank": costs.distinct(ep), "node": costs.distinct(nodes)}
    return units[merge]


def _rows_shared(costs: CostModel, merge: str, ep: int) -> float | None:
    """The same where both pools of a stage share k nodes, for the fewest nodes; None where they cannot."""
    size = costs.cluster.gpus_per_node
    k = next((k for k in range(1, ep + 1) if ep % k == 0 and ep // k < size and k <= costs.cluster.nodes), None)
    if k is None:
        return None
    units = {"none": float(costs.model.top_k), "rank": costs.distinct(ep), "node": costs.distinct(k)}
    return units[merge] * (1.0 - 1.0 / k)


def side_by_side(compute: float, exchange: float, slows: float, slowed: float) -> float:
    """Least time of both on one GPU; see the module's docstring."""
    gain = max(0.0, 1.0 / slows + 1.0 / slowed - 1.0)
    return compute + exchange - gain * min(slows * compute, slowed * exchange)
