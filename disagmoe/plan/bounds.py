"""What a Layout takes at least: seconds of its layers alone, and a bound on the step.

No time here counts more contention than there must be, so that a bound holds for
every schedule of the Layout. The tuner drops what a bound rules out; planners deal
layers to stages by the same times.
"""

from __future__ import annotations

from disagmoe.cost.model import CostModel
from disagmoe.ops import Kind, Phase
from disagmoe.plan.plan import Layout
from disagmoe.plan.pricing import LayoutCosts

_PHASES = (Phase.F, Phase.B)


def experts_s(prices: LayoutCosts, layer: int, phase: Phase) -> float:
    """Compute of all chunks of one layer's FFN, in phase F or B."""
    layout, moe = prices.layout, prices.model.is_moe(layer)
    if layout.tiles is None or not moe:
        return prices.op(Kind.FFN, phase, layer).seconds * (layout.chunks if moe else 1)
    if phase is Phase.F:
        return prices.tiles(Phase.F).compute_s
    return prices.tiles(Phase.I).compute_s + prices.op(Kind.FFN, Phase.W, layer, -1).seconds


def exposed_s(prices: LayoutCosts, layer: int, phase: Phase) -> float:
    """Exchange of one layer that its own experts leave uncovered, in phase F or B.

    Chunks: first exchanges, experts, second exchanges, as `colocated.py` orders
    them (closed form of Tutel's overlap; without chunks all of the exchange).
    Tiles: see `cost/comet.py`; weight gradients cover what they can of the rest.
    """
    moe, whole = prices.model.is_moe(layer), experts_s(prices, layer, phase)
    if prices.layout.tiles is not None and moe:
        tiles = prices.tiles(Phase.F if phase is Phase.F else Phase.I)
        exchange = sum(t.seconds for t in (*tiles.first, *tiles.second))
        computed = tiles.first_half_s + whole - sum(tiles.gemms[: len(tiles.first)])
        return max(tiles.seconds, computed, contended_s(prices, whole, exchange, compute=1.0)) - whole
    first, second = (prices.op(kind, phase, layer).seconds for kind in (Kind.DISPATCH, Kind.COMBINE))
    if phase is not Phase.F:
        first, second = second, first
    d = prices.layout.chunks if moe else 1
    ends = (
        d * (first + second),
        first + whole / d + d * second,
        first + whole + second,
        d * first + whole / d + second,
        contended_s(prices, whole, d * (first + second)),
    )
    return max(ends) - whole


def contended_s(prices: LayoutCosts, experts: float, exchange: float, compute: float | None = None) -> float:
    """Least time of both where each slows the other down while they run side by side.

    While they overlap for o seconds, o / c of the compute and o / x of the exchange
    are done, so experts + exchange - o (1 / c + 1 / x - 1) is the time of both; and o
    is at most what either takes in all, slowed down.
    """
    factors = prices.costs.contention(prices.layout.transport)
    c, x = factors.compute if compute is None else compute, factors.comm
    overlap = min(c * experts, x * exchange)
    return experts + exchange - overlap * (1.0 / c + 1.0 / x - 1.0)


def layer_s(prices: LayoutCosts, layer: int, phase: Phase) -> float:
    """Least time of one layer of one micro-batch with nothing beside it, in phase F or B.

    What is fully recomputed counts with B.
    """
    exposed = exposed_s(prices, layer, phase)
    compute = prices.op(Kind.ATTN, phase, layer).seconds + experts_s(prices, layer, phase)
    redone = _redone_s(prices, layer) if phase is Phase.B else 0.0
    return compute + exposed + redone


def layer_times_s(prices: LayoutCosts) -> dict[int, dict[Phase, float]]:
    """`layer_s` in F and B of one layer of every kind, by the first layer of that kind (CostModel.like)."""
    return {x: {phase: layer_s(prices, x, phase) for phase in _PHASES} for x in sorted(set(prices.costs.like))}


def _redone_s(prices: LayoutCosts, layer: int) -> float:
    """What of one layer runs again before its backward: compute, and the exchange its experts leave uncovered."""
    again, layout = prices.recompute.repeated(disaggregated=False), prices.layout
    attention = prices.op(Kind.ATTN, Phase.R, layer).seconds if Kind.ATTN in again else 0.0
    if Kind.FFN not in again:
        return attention
    if Kind.DISPATCH in again:
        return attention + experts_s(prices, layer, Phase.F) + exposed_s(prices, layer, Phase.F)
    parts = layout.chunks if layout.tiles is None and prices.model.is_moe(layer) else 1
    return attention + prices.op(Kind.FFN, Phase.R, layer, -1).seconds * parts


def lower_bound_s(layout: Layout, costs: CostModel) -> float:
    """A time no schedule of this Layout can beat: its busiest worker's work, and the end of the step.

    Where nothing but its own experts can run beside a layer's exchange
    (`serial_exchange`), what they leave of it adds up with the compute, and the
    worker waits for the first micro-batch to come through the stages before its
    own and for the last gradient to go back through them. A mirrored worker does
    half of the micro-batches of what it is listed with, and half of its mirror's.
    """
    prices = LayoutCosts(layout, costs)
    busy = _serial_s(prices) if layout.serial_exchange else _overlapped_s(prices)
    ends = [
        prices.worker_op(Kind.OPTIM, Phase.F, -1, worker).seconds
        + (0.0 if prices.early_gather else prices.worker_op(Kind.GRAD_SYNC, Phase.F, -1, worker).seconds)
        for worker in range(len(layout.placement.workers))
    ]
    return max(busy) + max(ends)


def _serial_s(prices: LayoutCosts) -> list[float]:
    """Per worker of a pipeline: all its micro-batches, and the stages they pass before and after."""
    layout, model = prices.layout, prices.model
    placement, workers = layout.placement, len(layout.placement.workers)
    work = [0.0] * workers
    passed = {phase: [0.0] * workers for phase in _PHASES}  # the first stage of every worker, one micro-batch
    stage, before = 0, placement.attn[0]
    of_kind = layer_times_s(prices)
    # What is repeated may be done while the gradient is still on its way: it counts as work, not as waiting.
    redone = {layer: _redone_s(prices, layer) for layer in of_kind}
    for layer in range(model.layers):
        worker, like = placement.attn[layer], prices.costs.like[layer]
        stage += worker != before
        before = worker
        for phase in _PHASES:
            seconds = of_kind[like][phase]
            work[worker] += seconds
            if stage < workers:
                passed[phase][worker] += seconds - (redone[like] if phase is Phase.B else 0.0)
    for phase in _PHASES:
        embed = prices.op(Kind.EMBED, phase, -1).seconds
        work[placement.embed] += embed
        passed[phase][placement.embed] += embed
        work[placement.head] += prices.op(Kind.HEAD, phase, -1).seconds
    waits, out = 0.0, []
    for worker in range(workers):
        out.append(waits + work[worker] * layout.batch.microbatches)
        waits += sum(passed[phase][worker] for phase in _PHASES)
    return out


def _overlapped_s(prices: LayoutCosts) -> list[float]:
    """Per worker: its compute and its exchange, with what is repeated of both, and the wait for the first micro-batch.

    An exchange inside a worker hides behind compute at the price of slowing it down; between pools the busier
    of the two is all there need be.
    """
    layout, placement = prices.layout, prices.layout.placement
    compute, exchange = ([0.0] * len(placement.workers) for _ in range(2))

    def add(busy: list[float], worker: int, seconds: float) -> None:
        holders = placement.holders(worker)
        for holder in holders:
            busy[holder] += seconds / len(holders)

    of_kind = {layer: _busy_s(prices, layer) for layer in sorted(set(prices.costs.like))}
    for layer, like in enumerate(prices.costs.like):
        attention, experts, moved = of_kind[like]
        add(compute, placement.attn[layer], attention)
        add(compute, placement.ffn[layer], experts)
        add(exchange, placement.ffn[layer], moved)
    for phase in _PHASES:
        add(compute, placement.embed, prices.op(Kind.EMBED, phase, -1).seconds)
        for head in placement.heads:
            add(compute, head, prices.op(Kind.HEAD, phase, -1).seconds)
    if placement.disaggregated:
        return [max(pair) * layout.batch.microbatches for pair in zip(compute, exchange, strict=True)]
    work = (_side_by_side_s(prices, c, x) * layout.batch.microbatches for c, x in zip(compute, exchange, strict=True))
    return [waits + busy for waits, busy in zip(_first_arrival_s(prices), work, strict=True)]


def _side_by_side_s(prices: LayoutCosts, compute: float, exchange: float) -> float:
    """Least time of both on one worker, overlapped as far as that pays; as in `contended_s`."""
    factors = prices.costs.contention(prices.layout.transport)
    gain = max(0.0, 1.0 / factors.compute + 1.0 / factors.comm - 1.0)
    return compute + exchange - gain * min(factors.compute * compute, factors.comm * exchange)


def _first_arrival_s(prices: LayoutCosts) -> list[float]:
    """Per worker: when the first micro-batch can be there; 0 where micro-batches come from both ends.

    Its operations wait for each other, but for the parts of an exchange, which may all be hidden.
    """
    layout, placement = prices.layout, prices.layout.placement
    arrival = [0.0] * len(placement.workers)
    if placement.mirror:
        return arrival
    whole, now = layout.chunks == 1, prices.op(Kind.EMBED, Phase.F, -1).seconds
    kinds = (Kind.ATTN, Kind.DISPATCH, Kind.COMBINE) if whole else (Kind.ATTN,)
    alone = {
        layer: sum(prices.op(kind, Phase.F, layer).seconds for kind in kinds) + experts_s(prices, layer, Phase.F)
        for layer in sorted(set(prices.costs.like))
    }
    seen = {placement.attn[0]}
    for layer, like in enumerate(prices.costs.like):
        worker = placement.attn[layer]
        if worker not in seen:
            seen.add(worker)
            arrival[worker] = now
        now += alone[like]
    return arrival


def _busy_s(prices: LayoutCosts, layer: int) -> tuple[float, float, float]:
    """Forward, backward and repeat of one layer: attention, experts, and the exchange of a colocated one."""
    apart = prices.layout.placement.disaggregated
    again = prices.recompute.repeated(disaggregated=apart)

    def moved(kind: Kind) -> float:
        phases = (*_PHASES, Phase.R) if kind in again else _PHASES
        parts = prices.layout.chunks if kind is not Kind.ATTN and prices.model.is_moe(layer) else 1
        return parts * sum(prices.op(kind, phase, layer).seconds for phase in phases)

    attention = moved(Kind.ATTN)
    experts = sum(experts_s(prices, layer, phase) for phase in _PHASES)
    if Kind.FFN in again:
        experts += experts_s(prices, layer, Phase.F)
    return attention, experts, 0.0 if apart else moved(Kind.DISPATCH) + moved(Kind.COMBINE)
