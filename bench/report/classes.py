"""Decides which colour an operation has in a Gantt and what the legend calls it.

An operation belongs to one class, found from its kind and phase. Classes are
listed in legend order; attention and experts share a hue, experts are lighter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.report.style import COMM_COLOURS, HEAD_COLOURS, OPTIM_COLOUR, PHASE_COLOURS
from disagmoe.ops import COMM_KINDS, Kind, Phase
from disagmoe.plan.program import Program

PHASE_WORDS = {
    Phase.F: "forward",
    Phase.B: "backward",
    Phase.I: "backward",
    Phase.W: "weight gradient",
    Phase.R: "recompute",
}
COMM_WORDS = {
    Kind.DISPATCH: "dispatch",
    Kind.COMBINE: "combine",
    Kind.P2P: "P2P between stages",
    Kind.GRAD_SYNC: "gradient and parameter sync",
}


@dataclass(frozen=True)
class OpClass:
    """Operations drawn alike."""

    label: str
    colour: str


def _compute_classes() -> dict[tuple[Kind, Phase], OpClass]:
    table: dict[tuple[Kind, Phase], OpClass] = {}
    for phase, (dark, light) in PHASE_COLOURS.items():
        word = PHASE_WORDS[phase]
        table[Kind.STAGE, phase] = OpClass(word, dark)
        table[Kind.ATTN, phase] = OpClass(f"{word}: attention", dark)
        table[Kind.FFN, phase] = OpClass(f"{word}: FFN", light)
    for phase, colour in HEAD_COLOURS.items():
        for kind in (Kind.EMBED, Kind.HEAD):
            table[kind, phase] = OpClass(f"{PHASE_WORDS[phase]}: embedding, head", colour)
    for phase in Phase:
        table[Kind.OPTIM, phase] = OpClass("optimizer", OPTIM_COLOUR)
    return table


def _comm_classes() -> dict[tuple[Kind, Phase], OpClass]:
    return {(kind, phase): OpClass(COMM_WORDS[kind], COMM_COLOURS[kind]) for kind in COMM_COLOURS for phase in Phase}


_TABLE = {**_compute_classes(), **_comm_classes()}
CLASSES: tuple[OpClass, ...] = tuple(dict.fromkeys(_TABLE.values()))
"""Every class, in legend order."""

_CODE = np.zeros((len(Kind), len(Phase)), dtype=np.int64)
for (_kind, _phase), _class in _TABLE.items():
    _CODE[_kind, _phase] = CLASSES.index(_class)

IS_COMM = np.isin(np.arange(len(Kind)), [int(kind) for kind in COMM_KINDS])


def class_codes(program: Program) -> NDArray[np.int64]:
    """Index into CLASSES of every row. Shape [rows]."""
    codes: NDArray[np.int64] = _CODE[program.kind, program.phase]
    return codes


def communicates(program: Program) -> NDArray[np.bool_]:
    """Which rows move bytes. Shape [rows]."""
    mask: NDArray[np.bool_] = IS_COMM[program.kind]
    return mask
