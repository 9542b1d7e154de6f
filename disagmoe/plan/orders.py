"""Decides in which order one pipeline worker runs its forwards and backwards.

An order is stage-level: one action is the forward or the backward of one
micro-batch through one model chunk (virtual stage) of one worker. How an action
becomes layer-level operations is decided by the generators (`colocated.py`,
`af_pipe.py`) that share these orders.

The interleaved order is Megatron-Core's
(https://github.com/NVIDIA/Megatron-LM, megatron/core/pipeline_parallel/schedules.py,
`get_schedule_table` and `get_pp_rank_microbatches`): micro-batches are cut into
groups; inside a group every chunk runs all micro-batches of the group before the
next chunk starts; a worker runs `warmup` forwards and then alternates one
forward with one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.program import COLUMNS, Program

IntArray = NDArray[np.int32]


class StageOrder(NamedTuple):
    """The actions of one worker in execution order; all arrays have shape [actions].

    `phase` (int8) is Phase.F or Phase.B, `chunk` and `microbatch` (int32) count
    from 0. An action of chunk c on rank r of p is virtual stage c * p + r.
    """

    phase: NDArray[np.int8]
    chunk: IntArray
    microbatch: IntArray


def groups(m: int, p: int, group: int) -> tuple[int, ...]:
    """Sizes of the micro-batch groups of an interleaved order.

    Megatron's own rule (groups of `group`, trailing group empty or of at least p)
    is used wherever it holds. Elsewhere a short trailing group would ask for its
    micro-batches in the next chunk before they have come round the ring, which
    costs time and can deadlock (p = 4, v = 3, groups of 4 and 1): the groups are then
    near-equal.
    """
    _positive(m=m, p=p)
    if group < p:
        raise ValueError(f"group size {group} is smaller than the {p} stages of the ring; it must be at least {p}")
    rest = m % group
    if rest == 0 or rest >= p:
        return (group,) * (m // group) + ((rest,) if rest else ())
    return near_equal_groups(m, p, group)


def near_equal_groups(m: int, p: int, group: int) -> tuple[int, ...]:
    """Group sizes that differ by at most one, all at least p, none above `group` where both can be had.

    With m < p there is one group of m.
    """
    count = max(1, min(-(-m // group), m // p))
    small, extra = divmod(m, count)
    return (small + 1,) * extra + (small,) * (count - extra)


def warmup(p: int, v: int, r: int, group: int, total: int) -> int:
    """Forwards rank r runs before its first backward, at most `total` = m * v.

    `group` is the largest micro-batch group. One chunk gives classic 1F1B.
    """
    wanted = p - r - 1 if v == 1 else 2 * (p - r - 1) + (v - 1) * group
    return min(wanted, total)


def grouped_table(v: int, sizes: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Chunk and micro-batch of every virtual forward, each of shape [m * v].

    The backward table has the same micro-batches and chunk v - 1 - c.
    """
    first = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    chunk = np.concatenate([np.repeat(np.arange(v), s) for s in sizes])
    microbatch = np.concatenate([np.tile(np.arange(a, a + s), v) for a, s in zip(first, sizes, strict=True)])
    return chunk.astype(np.int32), microbatch.astype(np.int32)


def alternate(chunk: IntArray, microbatch: IntArray, v: int, warm: int) -> StageOrder:
    """`warm` forwards, then forward and backward in turn, then the remaining backwards.

    `chunk` and `microbatch` are the virtual forward table of shape [m * v].
    """
    total = chunk.shape[0]
    turn = 2 * np.arange(total - warm)
    forward = np.concatenate((np.arange(warm), warm + turn))
    backward = np.concatenate((warm + turn + 1, np.arange(2 * total - warm, 2 * total)))
    order = StageOrder(np.empty(2 * total, np.int8), np.empty(2 * total, np.int32), np.empty(2 * total, np.int32))
    for slots, phase, chunks in ((forward, Phase.F, chunk), (backward, Phase.B, v - 1 - chunk)):
        order.phase[slots] = phase
        order.chunk[slots] = chunks
        order.microbatch[slots] = microbatch
    return order


def interleaved(p: int, v: int, m: int, group: int | None = None) -> tuple[StageOrder, ...]:
    """Megatron's interleaved 1F1B for p ranks, v chunks per rank, m micro-batches.

    `group` is Megatron's microbatch_group_size_per_vp_stage (default p). Any m is
    planned; see `groups`. v = 1 is classic 1F1B.
    """
    _positive(p=p, v=v, m=m)
    sizes = groups(m, p, p if group is None else group)
    chunk, microbatch = grouped_table(v, sizes)
    return tuple(alternate(chunk, microbatch, v, warmup(p, v, r, max(sizes), m * v)) for r in range(p))


def one_f_one_b(p: int, m: int) -> tuple[StageOrder, ...]:
    """Classic 1F1B (PipeDream-Flush) for p ranks and m micro-batches; m < p works."""
    return interleaved(p, 1, m)


def peak_in_flight(order: StageOrder) -> int:
    """Most chunk activations the worker holds at once (forward done, backward not)."""
    if order.phase.shape[0] == 0:
        return 0
    return int(np.cumsum(np.where(order.phase == Phase.F, 1, -1)).max())


def stage_program(orders: Sequence[StageOrder], p: int, v: int, m: int) -> Program:
    """A stage-level Program: one STAGE row per action, layer = chunk * p + rank."""
    sizes = [o.phase.shape[0] for o in orders]
    rank = np.repeat(np.arange(len(orders), dtype=np.int32), sizes)
    table = np.zeros((rank.shape[0], len(COLUMNS)), dtype=np.int32)
    column = {name: i for i, name in enumerate(COLUMNS)}
    table[:, column["worker"]] = rank
    table[:, column["stream"]] = Stream.COMPUTE
    table[:, column["kind"]] = Kind.STAGE
    table[:, column["phase"]] = np.concatenate([o.phase for o in orders])
    table[:, column["layer"]] = np.concatenate([o.chunk for o in orders]) * p + rank
    table[:, column["microbatch"]] = np.concatenate([o.microbatch for o in orders])
    table[:, column["peer"]] = -1
    table[:, column["pair"]] = -1
    return Program.from_table(table, n_workers=len(orders), n_layers=p * v, n_microbatches=m)


def _positive(**values: int) -> None:
    names = {"p": "pipeline ranks", "v": "virtual stages", "m": "micro-batches"}
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{names.get(name, name)} ({name}) = {value}: must be at least 1")
