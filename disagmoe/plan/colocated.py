"""Decides the layer-level Program of a colocated pipeline (attention and experts on one worker).

Worker r is pipeline rank r; virtual stage s = chunk * p + r holds a contiguous
run of layers. Nothing of the expert-parallel exchange is hidden behind another
micro-batch or layer: an exchange starts after the compute before it, and what runs
after a layer starts after the layer's exchange, as the host issues layer after layer
and waits for each collective. Data says so inside a stage; at its ends, and around
recompute, waits on the compute stream do. This is Megatron-LM's interleaved 1F1B
without EP overlap, and, with `chunks` > 1, Tutel's overlap of the exchange with the
experts of the same layer (https://github.com/microsoft/Tutel, tutel/impls/overlap.py:
all scatters are enqueued before the first gather; the backward is the mirror, last
chunk first).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.dependencies import is_wait
from disagmoe.plan.expand import Cell, TailRow, Template, TemplateKey, expand, step_tail
from disagmoe.plan.orders import interleaved
from disagmoe.plan.program import Program

Block = Callable[[int, Phase], list[Cell]]
"""Rows of the exchange and the experts of one MoE layer, in phase F or B."""


def colocated_program(
    *,
    p: int,
    v: int,
    m: int,
    group: int | None,
    stage_layers: Sequence[Sequence[int]],
    moe: Sequence[bool],
    chunks: int = 1,
    recompute: Collection[Kind] = (),
) -> Program:
    """The Program of one training step, with `chunks` splits of dispatch, experts and combine.

    The other arguments are those of `pipelined_program`.
    """
    if chunks < 1:
        raise ValueError(f"chunks = {chunks}: the overlap degree must be at least 1")

    def block(layer: int, phase: Phase) -> list[Cell]:
        return _chunked(layer, phase, range(chunks) if phase == Phase.F else range(chunks - 1, -1, -1))

    return pipelined_program(
        p=p,
        v=v,
        m=m,
        group=group,
        stage_layers=stage_layers,
        moe=moe,
        block=block,
        n_chunks=chunks,
        recompute=recompute,
    )


def pipelined_program(
    *,
    p: int,
    v: int,
    m: int,
    group: int | None,
    stage_layers: Sequence[Sequence[int]],
    moe: Sequence[bool],
    block: Block,
    n_chunks: int,
    recompute: Collection[Kind] = (),
) -> Program:
    """Interleaved 1F1B whose MoE layers are made of the rows of `block`.

    `stage_layers[s]` are the layers of virtual stage s (contiguous, at least one),
    `moe[l]` says whether layer l has experts; a dense layer has no exchange and
    one FFN. `group` is the interleaved order's micro-batch group (None: p). Kinds in
    `recompute` run again (phase R) right before the backward of their layer.

    Transfers between stages: P2P F of layer l carries the output of layer l on
    SEND/RECV, P2P B of layer l its gradient back on SEND_B/RECV_B (a process
    group per direction). The receive is posted in consumption order.
    """
    _check(p, v, stage_layers, moe)
    orders = interleaved(p, v, m, group)
    templates: dict[TemplateKey, Template] = {}
    for s, layers in enumerate(stage_layers):
        c, r = divmod(s, p)
        templates[r, Phase.F, c] = _forward(s, p, len(stage_layers), layers, moe, block)
        templates[r, Phase.B, c] = _backward(s, p, len(stage_layers), layers, moe, block, recompute)
    tail: list[TailRow] = []
    for r in range(p):
        held = {c: stage_layers[c * p + r] for c in range(v)}
        tail += step_tail(r, orders[r], held, shared=r in (0, p - 1))
    table = expand(orders, templates, tail)
    return Program.from_table(table, n_workers=p, n_layers=len(moe), n_microbatches=m, n_chunks=n_chunks)


def _forward(s: int, p: int, stages: int, layers: Sequence[int], moe: Sequence[bool], block: Block) -> list[Cell]:
    cells: list[Cell] = []
    if s == 0:
        cells.append(Cell(Stream.COMPUTE, Kind.EMBED, Phase.F, -1))
    elif p > 1:
        cells.append(Cell(Stream.RECV, Kind.P2P, Phase.F, layers[0] - 1, peer=(s - 1) % p))
    for layer in layers:
        cells.append(Cell(Stream.COMPUTE, Kind.ATTN, Phase.F, layer))
        cells += block(layer, Phase.F) if moe[layer] else [Cell(Stream.COMPUTE, Kind.FFN, Phase.F, layer)]
    if s == stages - 1:
        cells.append(Cell(Stream.COMPUTE, Kind.HEAD, Phase.F, -1))
        return cells
    if moe[layers[-1]]:  # what runs next on this worker needs nothing of this micro-batch
        cells.append(_wait([c for c in cells if c.stream == Stream.COLL][-1]))
    if p > 1:
        cells.append(Cell(Stream.SEND, Kind.P2P, Phase.F, layers[-1], peer=(s + 1) % p))
    return cells


def _backward(
    s: int,
    p: int,
    stages: int,
    layers: Sequence[int],
    moe: Sequence[bool],
    block: Block,
    recompute: Collection[Kind],
) -> list[Cell]:
    cells: list[Cell] = []
    if s == stages - 1:
        cells.append(Cell(Stream.COMPUTE, Kind.HEAD, Phase.B, -1))
    elif p > 1:
        cells.append(Cell(Stream.RECV_B, Kind.P2P, Phase.B, layers[-1], peer=(s + 1) % p))
    for layer in reversed(layers):
        again = _again(layer, block(layer, Phase.F) if moe[layer] else [], recompute)
        experts = block(layer, Phase.B) if moe[layer] else [Cell(Stream.COMPUTE, Kind.FFN, Phase.B, layer)]
        # A repeat, what follows it, and the gradient that comes into the stage are bound by no data to the compute
        # before them; all other gradients come from the layer behind or from the head.
        bound = not again and bool(cells) and cells[-1].stream == Stream.COMPUTE
        cells += again if Kind.ATTN in recompute else _after_compute(again)
        cells += experts if bound else _after_compute(experts)
        cells.append(Cell(Stream.COMPUTE, Kind.ATTN, Phase.B, layer))
    if s == 0:
        cells.append(Cell(Stream.COMPUTE, Kind.EMBED, Phase.B, -1))
    elif p > 1:
        cells.append(Cell(Stream.SEND_B, Kind.P2P, Phase.B, layers[0] - 1, peer=(s - 1) % p))
    return cells


def _again(layer: int, experts: list[Cell], recompute: Collection[Kind]) -> list[Cell]:
    """The repeated operations of one layer; `experts` are the forward rows of its exchange and experts, if any."""
    forward = [Cell(Stream.COMPUTE, Kind.ATTN, Phase.F, layer)]
    forward += experts or [Cell(Stream.COMPUTE, Kind.FFN, Phase.F, layer)]
    return [cell._replace(phase=Phase.R) for cell in forward if cell.kind in recompute]


def _wait(exchange: Cell) -> Cell:
    """The compute stream waits for this exchange, and the exchange for the compute before the wait."""
    return exchange._replace(stream=Stream.COMPUTE)


def _after_compute(cells: list[Cell]) -> list[Cell]:
    """The rows of one layer, its first exchange no earlier than the end of the compute before them."""
    first = next((c for c in cells if c.stream == Stream.COLL), None)
    return cells if first is None else [_wait(first), *cells]


def _chunked(layer: int, phase: Phase, order: range) -> list[Cell]:
    """Exchange, experts, exchange of one layer: all first exchanges are queued before any second."""
    first, second = (Kind.DISPATCH, Kind.COMBINE) if phase == Phase.F else (Kind.COMBINE, Kind.DISPATCH)
    return (
        [Cell(Stream.COLL, first, phase, layer, c) for c in order]
        + [Cell(Stream.COMPUTE, Kind.FFN, phase, layer, c) for c in order]
        + [Cell(Stream.COLL, second, phase, layer, c) for c in order]
    )


def without_waits(program: Program) -> Program:
    """The same rows without those at which compute waits for an exchange: only data holds it back then."""
    table = program.table()
    return Program.from_table(
        table[~is_wait(program)],
        n_workers=program.n_workers,
        n_layers=program.n_layers,
        n_microbatches=program.n_microbatches,
        n_chunks=program.n_chunks,
        in_flight=program.in_flight,
        early_gather=program.early_gather,
    )


def _check(p: int, v: int, stage_layers: Sequence[Sequence[int]], moe: Sequence[bool]) -> None:
    if len(stage_layers) != p * v:
        raise ValueError(f"stage_layers has {len(stage_layers)} stages; p*v = {p}*{v} = {p * v} are needed")
    if any(len(s) == 0 for s in stage_layers):
        raise ValueError(
            f"{len(moe)} layers leave a stage empty; each of the p*v = {p}*{v} = {p * v} stages needs at least one"
        )
    if [layer for s in stage_layers for layer in s] != list(range(len(moe))):
        raise ValueError(
            f"stage_layers must list layers 0..{len(moe) - 1} once each, in order, over the p*v = {p * v} stages"
        )
