"""What the streams of a Program are called, after what they carry.

A second pair of send and receive streams serves different ends: backward
transfers beside forward ones (pipelines), re-sent tokens (recompute), or the way
to lower ranks beside the way to higher ones (bidirectional pipelines). Readers
of a picture or a trace should not have to know which.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import SEND_STREAMS, Kind, Phase, Stream
from disagmoe.plan.program import Program

WORDS = {
    Stream.COMPUTE: "compute",
    Stream.COMPUTE_B: "compute, second",
    Stream.COLL: "all-to-all",
    Stream.SEND: "send",
    Stream.RECV: "receive",
    Stream.SEND_B: "send, second",
    Stream.RECV_B: "receive, second",
    Stream.SYNC: "sync",
    Stream.NVLINK: "NVLink",
}
_PAIRS = ((Stream.COMPUTE, Stream.COMPUTE_B), (Stream.SEND, Stream.SEND_B), (Stream.RECV, Stream.RECV_B))


def stream_words(program: Program) -> dict[Stream, str]:
    """A name for every stream, the same on all workers."""
    words = dict(WORDS)
    for first, second in _PAIRS:
        for stream, extra in zip((first, second), _suffixes(program, first, second), strict=True):
            words[stream] = WORDS[first] + extra
    return words


def _suffixes(program: Program, first: Stream, second: Stream) -> tuple[str, str]:
    """What to add to the names of a pair of streams."""
    counted = program.kind != Kind.OPTIM
    phases = {
        stream: set(np.unique(program.phase[counted & (program.stream == stream)]).tolist())
        for stream in (first, second)
    }
    if not phases[second]:
        return "", ", second"
    if phases[second] <= {Phase.R}:
        return "", ", again"
    if phases[first] and phases[first] <= {Phase.F} and not phases[second] & {Phase.F}:
        return ", fwd", ", bwd"
    ways = {stream: np.unique(_upwards(program, stream)).tolist() for stream in (first, second)}
    # Pictures have the first worker on top: "down" leads to higher numbers.
    if len(ways[first]) <= 1 and len(ways[second]) <= 1 and ways[first] != ways[second]:
        higher = ways[first] == [True] or ways[second] == [False]
        return (", down", ", up") if higher else (", up", ", down")
    return ", first", ", second"


def _upwards(program: Program, stream: Stream) -> NDArray[np.bool_]:
    """Whether the transfers of a stream go to a higher worker number."""
    rows = program.stream == stream
    to_higher: NDArray[np.bool_] = program.peer[rows] > program.worker[rows]
    return to_higher if stream in SEND_STREAMS else ~to_higher
