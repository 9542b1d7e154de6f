"""Turns a Layout with tiles into arguments of the tile-level cost model (`cost/comet.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disagmoe.cost.comet import TileCosts, exchange_of, tile_costs
from disagmoe.ops import Kind, Phase
from disagmoe.specs.devices import device

if TYPE_CHECKING:
    from disagmoe.plan.pricing import LayoutCosts


def layer_tiles(prices: LayoutCosts, phase: Phase) -> TileCosts:
    """All tile groups of one MoE layer of a Layout, in phase F or I.

    Bytes and times are those of the fullest rank.
    """
    layout, costs, split = prices.layout, prices.costs, prices.layout.tiles
    if split is None:
        raise ValueError(f"the layout of {layout.system} has no tiles")
    nic_gbs, nodes = layout.placement.workers[0].nic_gbs, prices.ep_nodes()
    home_s = costs.ffn(
        prices.moe_layer,
        phase,
        home_tokens=prices.tokens,
        rows=0.0,
        local_experts=0.0,
        returned=prices.copies.returned,
    )
    rows = prices.tokens * costs.model.top_k * prices.imbalance
    if split.gather:
        both = costs.gathered(tokens=prices.tokens, ep=layout.ep, nic_gbs=nic_gbs, volume_factor=max(1.0, prices.load))
    else:
        both = (prices.fullest_rank(Kind.DISPATCH, phase), prices.fullest_rank(Kind.COMBINE, phase))
    fan_out = layout.merge == "node" and nodes > 1 and not split.gather
    arriving, leaving = (exchange_of(t, costs.network, nic_gbs, fan_out=fan_out) for t in both)
    first, activation, second = costs.expert_halves(phase, rows, float(prices.local_experts))
    if phase is Phase.I:
        activation += costs.experts_redone(rows, prices.recompute)
    return tile_costs(
        split,
        (first, activation, second),
        home_s,
        arriving,
        leaving,
        sms=device(costs.cluster.device).sms,
        stretch=costs.contention(layout.transport).comm,
    )
