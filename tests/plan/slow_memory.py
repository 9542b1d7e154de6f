"""Memory over time the slow way: a list of buffers with the instants of their life, one worker at a time.

Written from the meaning of the operations, without the tables and shifts of the
vectorised integrator; whole operations only (no chunks).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.memory import OpBytes
from disagmoe.ops import COMPUTE_STREAMS, RECV_STREAMS, SEND_STREAMS, Kind, Phase
from disagmoe.plan.memory_tables import WorkerBytes
from disagmoe.plan.program import Program

Buffer = tuple[float, float, float]  # born, gone, bytes
Key = tuple[int, Kind, Phase, int, int]


def slow_peaks(
    program: Program,
    workers: Sequence[WorkerBytes],
    moe: Sequence[bool],
    start_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    *,
    frames: bool,
) -> list[float]:
    """Highest sum of living buffers of every worker; a buffer does not live at the instant it goes."""
    sides: dict[tuple[str, Key], int] = {}
    for i, row in enumerate(program.rows()):
        if row.op.microbatch < 0:
            continue
        key = (row.worker, row.op.kind, row.op.phase, row.op.layer, row.op.microbatch)
        if row.stream in COMPUTE_STREAMS:
            sides["do", key] = i
        elif row.stream in SEND_STREAMS:
            sides["out", key] = i
        elif row.stream in RECV_STREAMS:
            sides["in", key] = i
        else:
            sides["out", key] = sides["in", key] = i

    peaks = []
    for w, of in enumerate(workers):
        buffers: list[Buffer] = []

        def at(side: str, kind: Kind, phase: Phase, layer: int, mb: int, w: int = w) -> int | None:
            return sides.get((side, (w, kind, phase, layer, mb)))

        def back(kind: Kind, layer: int, mb: int, w: int = w) -> int:
            row = sides.get(("do", (w, kind, Phase.B, layer, mb)))
            return row if row is not None else sides["do", (w, kind, Phase.I, layer, mb)]

        for (side, (worker, kind, phase, layer, mb)), i in sides.items():
            if worker != w:
                continue
            born, gone = float(start_s[i]), float(end_s[i])
            if side == "do" and kind in (Kind.ATTN, Kind.FFN, Kind.HEAD, Kind.EMBED):
                op = _bytes(of, kind, layer, moe)
                work = op.forward if phase in (Phase.F, Phase.R) else op.backward
                if phase == Phase.W:
                    work = op.backward if kind == Kind.EMBED else 0.0
                elif phase == Phase.I and kind == Kind.EMBED:
                    work = 0.0
                buffers.append((born, gone, work))
                if phase == Phase.F:
                    buffers += _kept(op, kind, layer, mb, i, at, back, start_s, end_s)
            if kind in (Kind.DISPATCH, Kind.COMBINE) and side in ("out", "in"):
                buffers += _exchanged(
                    of, side, kind, phase, layer, mb, i, moe, at, back, start_s, end_s, frames, w, program
                )
            if kind == Kind.P2P and side in ("out", "in"):
                until = gone
                if side == "in" and phase == Phase.F and (j := at("do", Kind.ATTN, Phase.F, layer + 1, mb)) is not None:
                    until = float(start_s[j])
                if side == "in" and phase == Phase.B and at("do", Kind.FFN, Phase.F, layer, mb) is not None:
                    until = float(end_s[back(Kind.FFN, layer, mb)])
                buffers.append((born, until, of.layers[0].stream))
        instants = sorted({b for b, _, _ in buffers})
        peaks.append(max((sum(n for b, g, n in buffers if b <= t < g) for t in instants), default=0.0))
    return peaks


def _bytes(of: WorkerBytes, kind: Kind, layer: int, moe: Sequence[bool]) -> OpBytes:
    if kind == Kind.HEAD:
        return of.head
    if kind == Kind.EMBED:
        return of.embed
    kinds = of.layers[int(moe[layer])]
    return kinds.attention if kind == Kind.ATTN else kinds.ffn


def _kept(op, kind, layer, mb, i, at, back, start_s, end_s) -> list[Buffer]:  # type: ignore[no-untyped-def]
    """What a forward leaves: until it is over, until its repeat, until the backward, until the weights."""
    last = back(kind, layer, mb)
    repeat = at("do", kind, Phase.R, layer, mb)
    out: list[Buffer] = []
    if repeat is None:
        out.append((start_s[i], end_s[last], op.saved))
    else:
        out.append((start_s[i], end_s[last], op.kept))
        out.append((start_s[i], end_s[i], op.saved - op.kept))
        out.append((start_s[repeat], end_s[last], op.saved - op.kept))
    weights = at("do", kind, Phase.W, layer, mb)
    if weights is not None:
        out.append((end_s[last], end_s[weights], op.weight_inputs + op.weight_grads))
    return out


def _exchanged(  # type: ignore[no-untyped-def]
    of, side, kind, phase, layer, mb, i, moe, at, back, start_s, end_s, frames, w, program
) -> list[Buffer]:
    """The buffer at one end of a dispatch or combine."""
    sizes = of.layers[int(moe[layer])]
    forward = phase in (Phase.F, Phase.R)
    to_experts = (kind == Kind.DISPATCH) == forward  # or back from them
    inside = program.peer[i] < 0
    if frames and inside and forward and kind == Kind.COMBINE:
        return []  # part of the experts' temporaries
    if side == "out":
        if to_experts and kind == Kind.DISPATCH:
            made = at("do", Kind.ATTN, phase, layer, mb)
            gone = end_s[at("do", Kind.FFN, phase, layer, mb)] if frames and inside else end_s[i]
            return [(end_s[made], gone, sizes.sent)]
        if to_experts:  # gradients of a combine are copied when it starts
            return [(start_s[i], end_s[i], sizes.sent)]
        made = at("do", Kind.FFN, phase, layer, mb) if forward else back(Kind.FFN, layer, mb)
        return [(end_s[made], end_s[i], sizes.received)]
    if to_experts:
        used = at("do", Kind.FFN, phase, layer, mb) if forward else back(Kind.FFN, layer, mb)
        return [(start_s[i], end_s[used], sizes.received)]
    if kind == Kind.DISPATCH:
        return [(start_s[i], end_s[back(Kind.ATTN, layer, mb)], sizes.sent)]
    out = [(start_s[i], end_s[i], sizes.sent)]
    following = at("do", Kind.ATTN, Phase.F, layer + 1, mb)
    if not inside and following is not None:
        out.append((end_s[i], start_s[following], sizes.stream))
    return out
