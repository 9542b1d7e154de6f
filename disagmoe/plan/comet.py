"""Decides the Program of a colocated pipeline whose exchange is fused with the experts tile by tile (Comet).

The experts' row FFN is cut in `groups + columns` chunks. Forward, of one layer:

    all-to-all   D_0 D_1 ... D_(a-1)                | C_0 C_1 ... C_(b-1)
    compute      M_0 M_1 ... M_(a-1) M_a M_(a+1) ... M_(a+b-1)

with a = groups (sources in order of arrival, the rank's own rows first) and b =
columns (blocks of the hidden dimension). M_i of the first half waits for D_i, the
second half for the whole first, and C_i for M_(a+i): `dependencies.py` derives
this from the counts. Backward, the gradient of the combine arrives in a groups
before the input gradients M_0 .. of the first half, that of the dispatch leaves in
b blocks, and the weight gradients come last, beside what is still leaving.
Hosted in interleaved 1F1B, since Comet has no pipeline of its own.
Source: arXiv 2502.19811; https://github.com/bytedance/flux.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.colocated import pipelined_program
from disagmoe.plan.expand import Cell
from disagmoe.plan.program import Program


def comet_program(
    *,
    p: int,
    v: int,
    m: int,
    group: int | None,
    stage_layers: Sequence[Sequence[int]],
    moe: Sequence[bool],
    groups: int,
    columns: int,
    recompute: Collection[Kind] = (),
) -> Program:
    """The Program of one training step with `groups` arrival groups and `columns` column blocks.

    The other arguments are those of `colocated.pipelined_program`.
    """
    if groups < 1 or columns < 1:
        raise ValueError(f"{groups} arrival groups and {columns} column blocks: at least one each is needed")

    def block(layer: int, phase: Phase) -> list[Cell]:
        return _tiles(layer, phase, groups, columns)

    return pipelined_program(
        p=p,
        v=v,
        m=m,
        group=group,
        stage_layers=stage_layers,
        moe=moe,
        block=block,
        n_chunks=groups + columns,
        recompute=recompute,
    )


def _tiles(layer: int, phase: Phase, groups: int, columns: int) -> list[Cell]:
    """Arrivals, tiles and departures of one layer; backward also its weight gradients."""
    forward = phase == Phase.F
    arriving, leaving = (Kind.DISPATCH, Kind.COMBINE) if forward else (Kind.COMBINE, Kind.DISPATCH)
    experts = Phase.F if forward else Phase.I
    cells = [Cell(Stream.COLL, arriving, phase, layer, c) for c in range(groups)]
    cells += [Cell(Stream.COMPUTE, Kind.FFN, experts, layer, c) for c in range(groups + columns)]
    cells += [Cell(Stream.COLL, leaving, phase, layer, c) for c in range(columns)]
    if not forward:
        cells.append(Cell(Stream.COMPUTE, Kind.FFN, Phase.W, layer, -1))
    return cells
