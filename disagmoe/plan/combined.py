"""Decides the order and the Program of combined 1F1B: Megatron-Core's expert-parallel overlap.

Interleaved 1F1B in which the forward and the backward of the steady state are
merged into pairs, so that one hides the all-to-all of the other
(https://github.com/NVIDIA/Megatron-LM, megatron/core/pipeline_parallel/combined_1f1b.py;
`overlap_moe_expert_parallel_comm`). Every rank warms up by one forward more than
without overlap: otherwise the last rank would pair the forward and the backward
of the same micro-batch. With one rank this is Megatron's path without
pipelining: F_0, then (F_{i+1} beside B_i), then the last B.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from disagmoe.ops import Kind, Phase
from disagmoe.plan.orders import IntArray, grouped_table, groups
from disagmoe.plan.pairs import PairedLayers
from disagmoe.plan.program import Program
from disagmoe.plan.units import Stages, UnitOrder, unit_program


def combined_warmup(p: int, v: int, r: int, group: int, total: int) -> int:
    """Forwards rank r runs before its first pair, at most `total` = m * v; `group` is the largest group."""
    return min(2 * (p - r - 1) + (v - 1) * group + 1, total)


def combined_orders(p: int, v: int, m: int, group: int | None = None) -> tuple[UnitOrder, ...]:
    """Combined 1F1B for p ranks, v chunks per rank, m micro-batches in groups of `group` (default p).

    Any m is planned, see `orders.groups`. Megatron itself asks for v > 1 where p > 1.
    """
    for name, value in (("pipeline ranks (p)", p), ("virtual stages (v)", v), ("micro-batches (m)", m)):
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    sizes = groups(m, p, p if group is None else group)
    chunk, microbatch = grouped_table(v, sizes)
    return tuple(merged(chunk, microbatch, v, combined_warmup(p, v, r, max(sizes), m * v)) for r in range(p))


def merged(chunk: IntArray, microbatch: IntArray, v: int, warm: int) -> UnitOrder:
    """`warm` forwards, then pairs, then the remaining `warm` backwards.

    `chunk` and `microbatch` are the virtual forward table of shape [m * v]; the
    backward table has chunk v - 1 - c.
    """
    none = np.full(warm, -1, dtype=np.int32)
    return UnitOrder(
        forward=np.concatenate([chunk, none]),
        forward_microbatch=np.concatenate([microbatch, none]),
        phase=np.concatenate([none, np.full_like(chunk, Phase.B)]),
        backward=np.concatenate([none, v - 1 - chunk]),
        backward_microbatch=np.concatenate([none, microbatch]),
    )


def ring_stages(p: int, v: int) -> Stages:
    """Chunk c of rank r is virtual stage c * p + r."""
    return Stages(tuple(tuple(c * p + r for c in range(v)) for r in range(p)))


def combined_stage_program(p: int, v: int, m: int, group: int | None = None) -> Program:
    """The stage-level Program, for closed forms: one STAGE row per forward and backward."""
    return unit_program(combined_orders(p, v, m, group), ring_stages(p, v), m)


def combined_program(
    *,
    p: int,
    v: int,
    m: int,
    group: int | None,
    stage_layers: Sequence[Sequence[int]],
    moe: Sequence[bool],
    recompute: Collection[Kind] = (),
    chunks: int = 1,
) -> Program:
    """The layer-level Program of one training step.

    `stage_layers[s]` are the layers of virtual stage s (contiguous, at least one),
    `moe[l]` says whether layer l has experts. Transfers between stages are as in
    `colocated_program`: forward on SEND and RECV, backward on SEND_B and RECV_B.
    A backward alone is split into I and W like that of a pair, as Megatron runs
    both through the same schedule: its dispatch hides behind the experts' W. Kinds
    in `recompute` run again before the backward of their layer, and exchange and experts
    are cut in `chunks` parts (see `pairs.py`).
    """
    layers = PairedLayers(
        ring_stages(p, v), tuple(tuple(s) for s in stage_layers), tuple(moe), recompute=recompute, chunks=chunks
    )
    return layers.program(combined_orders(p, v, m, group), m)
