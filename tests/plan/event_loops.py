"""Independent references: what orders and AF-Pipe Programs do in time, in plain Python.

They share no code with the package (neither its dependencies nor its compiled
loop), so agreement with it means something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.orders import StageOrder
from disagmoe.plan.program import Program

Action = tuple[str, int, int]  # ("F" or "B", chunk, micro-batch)
AfOp = tuple[Kind, Phase, int, int, int]  # kind, phase, layer, micro-batch, chunk


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
    """Everything one micro-batch goes through in AF-Pipe with the head on one worker, in order."""
    there = [(Kind.EMBED, -1)]
    for layer in range(layers):
        there += [(k, layer) for k in (Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE)]
    there.append((Kind.HEAD, -1))
    return [(k, Phase.F, n, b, 0) for k, n in there] + [(k, Phase.B, n, b, 0) for k, n in reversed(there)]


def af_needs(p: int, layers: int, head: str, m: int) -> dict[AfOp, list[AfOp]]:
    """What every operation waits for, written out."""
    needs: dict[AfOp, list[AfOp]] = {}
    for b in range(m):
        chain = af_chain(layers, b)
        needs.update({op: [before] for before, op in pairwise(chain)})
        needs[chain[0]] = []
        if head == "spread" and p > 1:
            needs.update(_spread_needs(p, layers, b))
    return needs


def _spread_needs(p: int, layers: int, b: int) -> dict[AfOp, list[AfOp]]:
    """The last layer's group `last` starts the rows on their way over last + 1, ..., and sums the gradients up."""
    last = (layers - 1) % p
    path = [(last + i) % p for i in range(1, p)]

    def head(phase: Phase, g: int) -> AfOp:
        return Kind.HEAD, phase, -1, b, g

    def hop(phase: Phase, g: int) -> AfOp:
        return Kind.P2P, phase, layers - 1, b, g

    rows, gradients = (Kind.COMBINE, Phase.F, layers - 1, b, 0), (Kind.COMBINE, Phase.B, layers - 1, b, 0)
    needs = {head(Phase.B, g): [head(Phase.F, other) for other in range(p)] for g in range(p)}
    needs[head(Phase.F, last)] = [rows]
    for i, g in enumerate(path):
        needs[hop(Phase.F, g)] = [hop(Phase.F, path[i - 1]) if i else rows]
        needs[head(Phase.F, g)] = [hop(Phase.F, g)]
        needs[hop(Phase.B, g)] = [head(Phase.B, g), *(hop(Phase.B, h) for h in path[i + 1 : i + 2])]
    needs[gradients] = [head(Phase.B, last), hop(Phase.B, path[0])]
    return needs


def af_streams(program: Program) -> dict[tuple[int, Stream], list[AfOp]]:
    """Operations of the micro-batches, per worker and stream, in order."""
    streams: dict[tuple[int, Stream], list[AfOp]] = {}
    for row in program.rows():
        if row.op.microbatch >= 0:
            op = (row.op.kind, row.op.phase, row.op.layer, row.op.microbatch, row.op.chunk)
            streams.setdefault((row.worker, row.stream), []).append(op)
    return streams


def af_run(
    streams: dict[tuple[int, Stream], list[AfOp]],
    needs: dict[AfOp, list[AfOp]],
    seconds: Callable[[AfOp], float],
    limits: Sequence[int] = (),
) -> dict[AfOp, float] | None:
    """End of every operation with rendezvous on in-order streams; None where it deadlocks.

    Streams do not slow each other here. `limits`: layers a worker may hold at once.
    """
    ends_needed: dict[AfOp, int] = {}
    for ops in streams.values():
        for op in ops:
            ends_needed[op] = ends_needed.get(op, 0) + 1
    keys = sorted(streams)
    end: dict[AfOp, float] = {}
    at, clock = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0.0)
    arrived: dict[AfOp, list[tuple[int, Stream]]] = {}
    freed: dict[int, list[float]] = {w: [] for w, _ in keys}  # when each backward ended
    begun = dict.fromkeys(freed, 0)
    moved = True
    while moved:
        moved = False
        for key in keys:
            while at[key] < len(streams[key]):
                op = streams[key][at[key]]
                kind, phase, layer, _, _ = op
                here = arrived.setdefault(op, [])
                if key not in here:
                    here.append(key)
                wanted = needs[op]
                if len(here) < ends_needed[op] or any(n not in end for n in wanted):
                    break
                start = max([0.0, *(end[n] for n in wanted), *(clock[k] for k in here)])
                w = key[0]
                opens = phase == Phase.F and (kind in (Kind.EMBED, Kind.FFN) or (kind == Kind.ATTN and layer > 0))
                if limits and opens:
                    if begun[w] >= limits[w] + len(freed[w]):
                        break
                    if begun[w] >= limits[w]:
                        start = max(start, freed[w][begun[w] - limits[w]])
                    begun[w] += 1
                end[op] = start + seconds(op)
                closes = kind in (Kind.EMBED, Kind.FFN) or (kind == Kind.ATTN and layer > 0)
                if phase == Phase.B and closes:
                    freed[w].append(end[op])
                for k in here:
                    clock[k] = end[op]
                    at[k] += 1
                moved = True
    return end if all(at[k] == len(streams[k]) for k in keys) else None
