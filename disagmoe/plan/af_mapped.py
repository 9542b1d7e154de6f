"""Decides the Program of a ring whose layers lie on groups in any way: balanced groups, unequal depths.

AF-Pipe's order (`af_pipe.py`) is made for layer l on group l mod p of either pool. With
other maps of layers to groups the same order still says *when* each piece of work is
due: the paper's ring of a similar depth is run in lock-step, and every worker runs its
actions, and every stream its transfers, by the slots they have there. All orders then
agree with one sequence in which whatever an operation needs comes before it, so they
cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from disagmoe.ops import Kind, Stream
from disagmoe.plan.af_pipe import af_orders, in_slot_order, transfer_slots, with_head
from disagmoe.plan.af_recompute import repeat_layers
from disagmoe.plan.af_ring import HEADS, Ring, Step, ring_steps
from disagmoe.plan.edges import LongArray
from disagmoe.plan.expand import TailRow, expand, step_tail
from disagmoe.plan.orders import StageOrder
from disagmoe.plan.program import Program


class Clock(NamedTuple):
    """The ring that says when: its depth, in-flight group size and order (as in `af_pipe.af_orders`)."""

    p: int
    group: int
    order: str


def balanced_groups(loads: Sequence[float], groups: int) -> tuple[int, ...]:
    """A group for every layer: one layer per group and round of `groups` layers, the loads of groups as even as can be.

    In every round the heaviest layer goes to the least loaded group. Layers of one kind
    stay where the paper has them, on group l mod p.
    """
    if groups < 1:
        raise ValueError(f"{groups} groups: must be at least 1")
    held, out = [0.0] * groups, [0] * len(loads)
    for first in range(0, len(loads), groups):
        round_ = range(first, min(first + groups, len(loads)))
        free = list(range(groups))
        for layer in sorted(round_, key=lambda layer: (-loads[layer], layer)):
            group = min(free, key=lambda g: (round(held[g], 9), (g - layer) % groups))
            free.remove(group)
            held[group] += loads[layer]
            out[layer] = group
    return tuple(out)


def mapped_program(
    *,
    attn: Sequence[int],
    ffn: Sequence[int],
    m: int,
    clock: Clock,
    head: str = "last_f",
    recompute: Collection[Kind] = (),
) -> Program:
    """The Program of one step of m micro-batches with layer l on A-worker attn[l] and F-worker ffn[l].

    Workers are numbered A first; every one of them holds a layer. The head is on the
    last layer's F-group or spread over all of them. Raises ValueError for other heads,
    maps with gaps, and recompute that sends tokens again.
    """
    ring = _checked(tuple(attn), tuple(ffn), head, clock)
    if Kind.DISPATCH in recompute:
        raise ValueError("a ring with its own map of layers sends no tokens again; keep them (recompute_tokens=keep)")
    steps, workers = ring_steps(ring), max(ffn) + 1
    due = _due(ring, clock, m)
    orders = [_by_time(steps, due, worker) for worker in range(workers)]
    tail: list[TailRow] = []
    for worker, own in enumerate(orders):
        side = ring.attn if worker < ring.first_f else ring.ffn
        layers = [layer for layer, there in enumerate(side) if there == worker]
        shared = worker == ring.attention(0) or worker in ring.head_workers
        tail += step_tail(worker, own, {chunk: [layer] for chunk, layer in enumerate(layers)}, shared=shared)
    templates, orders = repeat_layers(ring, steps, orders, due, recompute)
    return Program.from_table(
        in_slot_order(expand(orders, templates, tail), steps, due),
        n_workers=workers,
        n_layers=ring.layers,
        n_microbatches=m,
        n_chunks=len(ring.head_workers),
    )


def _checked(attn: tuple[int, ...], ffn: tuple[int, ...], head: str, clock: Clock) -> Ring:
    if head not in HEADS or head == "next_a":
        raise ValueError(f"a ring with its own map of layers has no head {head!r}; allowed are last_f, spread")
    if not attn or len(attn) != len(ffn):
        raise ValueError(f"maps of {len(attn)} and {len(ffn)} layers: both pools need every layer once")
    a_groups = len(set(attn))
    if sorted(set(attn)) != list(range(a_groups)) or sorted(set(ffn)) != list(
        range(a_groups, a_groups + len(set(ffn)))
    ):
        raise ValueError("workers of a map are numbered without gaps, those of attention first")
    return Ring(clock.p, len(attn), head, Stream.COMPUTE, attn, ffn)


def _due(ring: Ring, clock: Clock, m: int) -> LongArray:
    """When the product of each (step, micro-batch) is due, [steps, m], all different; steps as in `ring_steps`.

    Taken from the paper's ring with a whole head: a spread head has its chunks' steps
    right behind each other at the slot of the whole one.
    """
    plain = Ring(clock.p, ring.layers, "last_f", Stream.COMPUTE)
    orders = list(af_orders(clock.p, plain.chunks, m, clock.group, clock.order))
    orders[plain.last_f] = with_head(orders[plain.last_f], plain.slot(plain.last_f), plain.chunks)
    steps = ring_steps(plain)
    sent = transfer_slots(orders, steps, m)
    # What is not sent is due half a slot after what it came from; all times are doubled, to stay whole.
    times = np.where(sent >= 0, 2 * sent, -1)
    for step in range(times.shape[0]):
        before = times[step - 1] if step else np.full(m, -1)
        times[step] = np.where(times[step] >= 0, times[step], before + 1)
    chunks = len(ring_steps(ring)) - len(steps)
    whole = 2 * ring.layers
    spread = np.repeat(times[whole : whole + 1], chunks, axis=0)
    due = np.concatenate([times[: whole + 1], spread, times[whole + 1 :]]) * (chunks + 2)
    due[whole : whole + chunks + 1] += np.arange(chunks + 1)[:, None]
    # No two are due at once: what meets on one worker here met on two in the paper's ring.
    return due * due.size + np.arange(due.size).reshape(due.shape)


def _by_time(steps: Sequence[Step], due: LongArray, worker: int) -> StageOrder:
    """The actions of one worker by the slots in which their products are due."""
    mine = [i for i, step in enumerate(steps) if step.key[0] == worker]
    m = due.shape[1]
    step, microbatch = (grid.reshape(-1) for grid in np.meshgrid(mine, np.arange(m), indexing="ij"))
    order = np.lexsort((step, due[step, microbatch]))
    step, microbatch = step[order], microbatch[order]
    phase = np.array([s.key[1] for s in steps], dtype=np.int8)
    chunk = np.array([s.key[2] for s in steps], dtype=np.int32)
    return StageOrder(phase[step], chunk[step], microbatch.astype(np.int32))
