"""Independent references: what orders and AF-Pipe Programs do in time, in plain Python.

They share no code with the package (neither its dependencies nor its compiled
loop), so agreement with it means something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.orders import StageOrder
from disagmoe.plan.program import Program

Action = tuple[str, int, int]  # ("F" or "B", chunk, micro-batch)
AfOp = tuple[Kind, Phase, int, int]  # kind, phase, layer, micro-batch


def actions(order: StageOrder) -> list[Action]:
    """One worker's order as plain values."""
    name = {Phase.F: "F", Phase.B: "B"}
    columns = (order.phase.tolist(), order.chunk.tolist(), order.microbatch.tolist())
    return [(name[Phase(f)], c, b) for f, c, b in zip(*columns, strict=True)]


def stage_makespan(orders: Sequence[Sequence[Action]], v: int, forward: float, backward: float) -> float | None:
    """Makespan of a pipeline without communication; None where the orders deadlock.

    `forward` and `backward` are the times of one chunk.
    """
    p = len(orders)
    stages = p * v
    end: dict[tuple[str, int, int], float] = {}
    at, clock = [0] * p, [0.0] * p
    moved = True
    while moved:
        moved = False
        for r, order in enumerate(orders):
            while at[r] < len(order):
                phase, c, b = order[at[r]]
                s = c * p + r
                if phase == "F":
                    needs = ("F", s - 1, b) if s else None
                else:
                    needs = ("B", s + 1, b) if s + 1 < stages else ("F", s, b)
                if needs is not None and needs not in end:
                    break
                start = max(clock[r], end[needs] if needs else 0.0)
                clock[r] = end[phase, s, b] = start + (forward if phase == "F" else backward)
                at[r] += 1
                moved = True
    return max(clock) if all(at[r] == len(o) for r, o in enumerate(orders)) else None


def af_chain(layers: int, b: int) -> list[AfOp]:
    """Everything one micro-batch goes through in AF-Pipe, in order."""
    there = [(Kind.EMBED, -1)]
    for layer in range(layers):
        there += [(k, layer) for k in (Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE)]
    there.append((Kind.HEAD, -1))
    return [(k, Phase.F, n, b) for k, n in there] + [(k, Phase.B, n, b) for k, n in reversed(there)]


def af_streams(program: Program) -> dict[tuple[int, Stream], list[AfOp]]:
    """Operations of the micro-batches, per worker and stream, in order."""
    streams: dict[tuple[int, Stream], list[AfOp]] = {}
    for row in program.rows():
        if row.op.microbatch >= 0:
            op = (row.op.kind, row.op.phase, row.op.layer, row.op.microbatch)
            streams.setdefault((row.worker, row.stream), []).append(op)
    return streams


def af_run(
    streams: dict[tuple[int, Stream], list[AfOp]], layers: int, m: int, seconds: Callable[[AfOp], float]
) -> dict[AfOp, float] | None:
    """End of every operation with rendezvous on in-order streams; None where it deadlocks."""
    before: dict[AfOp, AfOp | None] = {}
    for b in range(m):
        chain = af_chain(layers, b)
        before.update(zip(chain, [None, *chain[:-1]], strict=True))
    ends_needed: dict[AfOp, int] = {}
    for ops in streams.values():
        for op in ops:
            ends_needed[op] = ends_needed.get(op, 0) + 1
    keys = sorted(streams)
    end: dict[AfOp, float] = {}
    at, clock = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0.0)
    arrived: dict[AfOp, list[tuple[int, Stream]]] = {}
    moved = True
    while moved:
        moved = False
        for key in keys:
            while at[key] < len(streams[key]):
                op = streams[key][at[key]]
                here = arrived.setdefault(op, [])
                if key not in here:
                    here.append(key)
                needs = before[op]
                if len(here) < ends_needed[op] or (needs is not None and needs not in end):
                    break
                start = max([end[needs] if needs else 0.0, *(clock[k] for k in here)])
                end[op] = start + seconds(op)
                for k in here:
                    clock[k] = end[op]
                    at[k] += 1
                moved = True
    return end if all(at[k] == len(streams[k]) for k in keys) else None
