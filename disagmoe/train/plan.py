"""The Plan of a training run from the sizes of its ring.

Decides nothing about speed: the user (or the tuner, through `bench`) says how many
ranks an attention and an expert group have, how deep the ring is and how often it
exists; this module lays it out and asks AF-Pipe for the order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from disagmoe.ops import Kind, Phase
from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.af_ring import head_workers
from disagmoe.plan.plan import Batch, Layout, Placement, Plan, Worker
from disagmoe.plan.program import COLUMNS, Program
from disagmoe.specs import ModelSpec

MERGES = ("none", "rank", "node")


@dataclass(frozen=True)
class RingShape:
    """`p` stages of `m` attention and `n` expert ranks, `dp` copies of the whole ring."""

    p: int = 1
    m: int = 1
    n: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for label, value in (("p", self.p), ("m", self.m), ("n", self.n), ("dp", self.dp)):
            if value < 1:
                raise ValueError(f"{label}={value}: must be at least 1")

    @property
    def ranks(self) -> int:
        """Processes that the ring needs."""
        return self.dp * self.p * (self.m + self.n)


def ring_plan(
    model: ModelSpec,
    shape: RingShape,
    *,
    microbatches: int,
    sequences: int,
    order: str = "comm_stage",
    group: int | None = None,
    head: str = "last_f",
    compute_streams: int = 1,
    merge: str = "rank",
    recompute: frozenset[Kind] = frozenset(),
) -> Plan:
    """AF-Pipe for `model` on `shape`; `sequences` of the global batch, `group` the in-flight group size (None: 4p).

    `recompute`: operations that are done again right before their backward.
    """
    p = shape.p
    if shape.n > model.experts:
        raise ValueError(
            f"n={shape.n} expert ranks for the {model.experts} experts of {model.name}: each rank needs at least one"
        )
    if merge not in MERGES:
        raise ValueError(f"unknown merge {merge!r}; known: {', '.join(MERGES)}")
    if model.tied and head == "spread" and p > 1:
        raise ValueError("an output matrix tied to the embedding cannot be spread over several workers (head=spread)")
    program = af_pipe_program(
        p=p,
        layers=model.layers,
        m=microbatches,
        group=4 * p if group is None else group,
        order=order,
        head=head,
        compute_streams=compute_streams,
    )
    workers = tuple(
        Worker(f"{pool}{stage}", pool, gpus, 1, 1.0, (0,))
        for pool, gpus in (("A", shape.m), ("F", shape.n))
        for stage in range(p)
    )
    heads = head_workers(p, model.layers, head)
    placement = Placement(
        workers=workers,
        attn=tuple(layer % p for layer in range(model.layers)),
        ffn=tuple(p + layer % p for layer in range(model.layers)),
        embed=0,
        head=heads[0],
        replicas=shape.dp,
        head_shards=heads if len(heads) > 1 else (),
    )
    data_ranks = shape.dp * shape.m
    layout = Layout(
        system="disagmoe",
        variant="",
        placement=placement,
        batch=Batch(microbatches, -(-sequences // (microbatches * data_ranks)), data_ranks),
        ep=shape.n,
        transport="nccl",
        merge=merge,
        options={"p": p, "order": order, "compute_streams": compute_streams},
    )
    return Plan(layout, with_recompute(program, recompute))


def with_recompute(program: Program, kinds: frozenset[Kind]) -> Program:
    """The Program with every operation of these compute kinds repeated (phase R) right before its backward."""
    if unknown := kinds - {Kind.ATTN, Kind.FFN}:
        names = ", ".join(sorted(kind.name for kind in unknown))
        raise ValueError(f"{names} cannot be recomputed; allowed: ATTN, FFN")
    table = np.stack([getattr(program, name) for name in COLUMNS], axis=1)
    back = np.flatnonzero(np.isin(program.kind, sorted(kinds)) & np.isin(program.phase, (Phase.B, Phase.I)))
    again = table[back].copy()
    again[:, COLUMNS.index("phase")] = int(Phase.R)
    again[:, COLUMNS.index("pair")] = -1
    whole = np.insert(table, back, again, axis=0)
    made = Program.from_table(
        whole,
        n_workers=program.n_workers,
        n_layers=program.n_layers,
        n_microbatches=program.n_microbatches,
        n_chunks=program.n_chunks,
    )
    return replace(made, in_flight=program.in_flight)
