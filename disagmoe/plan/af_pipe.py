"""Decides the Program of AF-Pipe: attention and experts on workers of their own.

p attention workers A_g (worker g) and p expert workers F_g (worker p + g); layer
l lives on A_{l mod p} and F_{l mod p}, so a micro-batch walks the ring A_0, F_0,
A_1, ..., F_{p-1} v = ceil(L / p) times, an interleaved pipeline whose chunk is
one layer. Dispatch (A to F of one layer) and combine (F straight to the *next*
layer's A, so there is no P2P) are transfers on one send and one receive stream
per worker.
"""

from __future__ import annotations

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.expand import Cell, TailRow, Template, TemplateKey, expand, step_tail
from disagmoe.plan.orders import StageOrder, alternate, grouped_table, groups, peak_in_flight, warmup
from disagmoe.plan.program import Program

ORDERS = ("megatron", "comm_stage")
"""Ring stages per group: A and F only, or A, dispatch, F, combine."""


def af_orders(p: int, v: int, m: int, group: int, order: str) -> tuple[StageOrder, ...]:
    """Stage orders of the 2p workers (A_0..A_{p-1}, F_0..F_{p-1}), layers padded to p * v."""
    if order not in ORDERS:
        raise ValueError(f"AF-Pipe order {order!r} is unknown; one of {', '.join(ORDERS)}")
    if not 2 * p <= group <= 4 * p:
        raise ValueError(f"AF-Pipe group size {group} is outside [2p, 4p] = [{2 * p}, {4 * p}]")
    if v < 1:
        raise ValueError(f"virtual stages (v) = {v}: must be at least 1")
    sizes = groups(m, 2 * p, group)
    chunk, microbatch = grouped_table(v, sizes)
    per_worker = 2 if order == "comm_stage" else 1
    ring = 2 * p * per_worker
    positions = [per_worker * 2 * g for g in range(p)] + [per_worker * (2 * g + 1) for g in range(p)]
    return tuple(alternate(chunk, microbatch, v, warmup(ring, v, at, max(sizes), m * v)) for at in positions)


def in_flight(p: int, v: int, m: int, group: int, order: str) -> tuple[int, ...]:
    """Most layers' activations each of the 2p workers holds at once (padded layers counted)."""
    return tuple(peak_in_flight(o) for o in af_orders(p, v, m, group, order))


def af_pipe_program(*, p: int, layers: int, m: int, group: int, order: str) -> Program:
    """The Program of one training step of `layers` layers on 2p workers."""
    if min(p, layers, m) < 1:
        raise ValueError(f"AF-Pipe needs p, layers and micro-batches of at least 1; got {p}, {layers}, {m}")
    v = -(-layers // p)
    orders = af_orders(p, v, m, group, order)
    templates: dict[TemplateKey, Template] = {}
    for layer in range(layers):
        c, g = divmod(layer, p)
        templates[g, Phase.F, c], templates[g, Phase.B, c] = _attention(layer, p)
        templates[p + g, Phase.F, c], templates[p + g, Phase.B, c] = _experts(layer, p, last=layer == layers - 1)
    tail: list[TailRow] = []
    for w in range(2 * p):
        held = {c: [c * p + w % p] for c in range(v) if c * p + w % p < layers}
        tail += step_tail(w, orders[w], held, shared=w in (0, p + (layers - 1) % p))
    table = expand(orders, templates, tail)
    return Program.from_table(table, n_workers=2 * p, n_layers=layers, n_microbatches=m)


def _attention(layer: int, p: int) -> tuple[list[Cell], list[Cell]]:
    """Forward and backward of attention of one layer, on A_{layer mod p}."""
    experts, before = p + layer % p, p + (layer - 1) % p
    forward = [
        Cell(Stream.RECV, Kind.COMBINE, Phase.F, layer - 1, peer=before)
        if layer
        else Cell(Stream.COMPUTE, Kind.EMBED, Phase.F, -1),
        Cell(Stream.COMPUTE, Kind.ATTN, Phase.F, layer),
        Cell(Stream.SEND, Kind.DISPATCH, Phase.F, layer, peer=experts),
    ]
    backward = [
        Cell(Stream.RECV, Kind.DISPATCH, Phase.B, layer, peer=experts),
        Cell(Stream.COMPUTE, Kind.ATTN, Phase.B, layer),
        Cell(Stream.SEND, Kind.COMBINE, Phase.B, layer - 1, peer=before)
        if layer
        else Cell(Stream.COMPUTE, Kind.EMBED, Phase.B, -1),
    ]
    return forward, backward


def _experts(layer: int, p: int, *, last: bool) -> tuple[list[Cell], list[Cell]]:
    """Forward and backward of the experts of one layer, on F_{layer mod p}.

    After the last layer the F-ranks hold partial rows of every token: they are
    reduced inside the group (a collective) before the output head.
    """
    attention, after = layer % p, (layer + 1) % p
    forward = [
        Cell(Stream.RECV, Kind.DISPATCH, Phase.F, layer, peer=attention),
        Cell(Stream.COMPUTE, Kind.FFN, Phase.F, layer),
    ]
    backward = [
        Cell(Stream.COMPUTE, Kind.FFN, Phase.B, layer),
        Cell(Stream.SEND, Kind.DISPATCH, Phase.B, layer, peer=attention),
    ]
    if not last:
        forward.append(Cell(Stream.SEND, Kind.COMBINE, Phase.F, layer, peer=after))
        return forward, [Cell(Stream.RECV, Kind.COMBINE, Phase.B, layer, peer=after), *backward]
    forward += [Cell(Stream.COLL, Kind.COMBINE, Phase.F, layer), Cell(Stream.COMPUTE, Kind.HEAD, Phase.F, -1)]
    head = [Cell(Stream.COMPUTE, Kind.HEAD, Phase.B, -1), Cell(Stream.COLL, Kind.COMBINE, Phase.B, layer)]
    return forward, head + backward
