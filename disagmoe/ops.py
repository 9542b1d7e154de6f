"""The vocabulary of a plan: kinds, phases and streams of operations.

This leaf module is shared by the cost model (which prices an operation) and the
plan (which orders operations), so neither needs the other to name one.
Terms follow Megatron-Core (dispatch, combine), zero-bubble (I, W) and DualPipe.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What an operation does.

    STAGE is one whole virtual stage: it appears only in stage-level Programs,
    where schedules are compared with closed forms.
    """

    EMBED = 0
    ATTN = 1
    DISPATCH = 2
    FFN = 3
    COMBINE = 4
    P2P = 5
    HEAD = 6
    GRAD_SYNC = 7
    OPTIM = 8
    STAGE = 9


class Phase(IntEnum):
    """Which part of training an operation belongs to.

    F forward, I backward with respect to the input, W backward with respect to
    the weights, B the full backward (I and W in one), R recompute of a forward.
    A GRAD_SYNC is B where it reduces gradients (before the optimizer) and F
    where it gathers updated parameters (after it, or before the next step's forwards).
    """

    F = 0
    I = 1
    W = 2
    B = 3
    R = 4


class Stream(IntEnum):
    """In-order queues of one worker.

    COMPUTE_B is a second compute stream (forward and backward side by side).
    COLL carries collectives inside the worker's own ranks (expert-parallel
    all-to-all), SYNC those of the data-parallel groups. SEND and RECV carry
    transfers between workers; a system that keeps one process group per
    direction puts the backward ones on SEND_B and RECV_B.
    """

    COMPUTE = 0
    COMPUTE_B = 1
    COLL = 2
    SEND = 3
    RECV = 4
    SEND_B = 5
    RECV_B = 6
    SYNC = 7
    NVLINK = 8


COMPUTE_KINDS = frozenset({Kind.EMBED, Kind.ATTN, Kind.FFN, Kind.HEAD, Kind.OPTIM, Kind.STAGE})
COMM_KINDS = frozenset({Kind.DISPATCH, Kind.COMBINE, Kind.P2P, Kind.GRAD_SYNC})
SEND_STREAMS = frozenset({Stream.SEND, Stream.SEND_B})
RECV_STREAMS = frozenset({Stream.RECV, Stream.RECV_B})
COMPUTE_STREAMS = frozenset({Stream.COMPUTE, Stream.COMPUTE_B})

KIND_LETTER = {
    Kind.EMBED: "E",
    Kind.ATTN: "A",
    Kind.DISPATCH: "D",
    Kind.FFN: "M",
    Kind.COMBINE: "C",
    Kind.P2P: "P",
    Kind.HEAD: "H",
    Kind.GRAD_SYNC: "G",
    Kind.OPTIM: "O",
    Kind.STAGE: "S",
}
"""One letter per kind in the lossless text form (M as in "mlp", as F is a phase)."""


class Op(NamedTuple):
    """One operation; -1 where a field does not apply.

    `chunk` numbers a sub-operator split (Tutel, Comet); chunk -1 means "all
    chunks at once". `replica` is the direction in a bidirectional schedule.
    """

    kind: Kind
    phase: Phase
    layer: int = -1
    microbatch: int = -1
    chunk: int = 0
    replica: int = 0
