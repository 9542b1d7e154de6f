"""Streams are named after what they carry."""

from __future__ import annotations

import pytest

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.program import Program, Row
from disagmoe.timeline.streams import stream_words


def program(*rows: tuple[int, Stream, Kind, Phase, int]) -> Program:
    """Rows of (worker, stream, kind, phase, peer)."""
    ordered = sorted(rows, key=lambda row: (row[0], row[1]))
    made = [Row(w, stream, Op(kind, phase, 0, i), peer) for i, (w, stream, kind, phase, peer) in enumerate(ordered)]
    return Program.from_rows(made, n_workers=2, n_layers=1, n_microbatches=len(made))


def transfer(phase: Phase, start: int, *, second: bool = False) -> list[tuple[int, Stream, Kind, Phase, int]]:
    """Both rows of a P2P from worker `start` to the other one."""
    send, receive = (Stream.SEND_B, Stream.RECV_B) if second else (Stream.SEND, Stream.RECV)
    return [(start, send, Kind.P2P, phase, 1 - start), (1 - start, receive, Kind.P2P, phase, start)]


@pytest.mark.parametrize(
    ("rows", "first", "second"),
    [
        (transfer(Phase.F, 0), "send", None),
        ([*transfer(Phase.F, 0), *transfer(Phase.B, 1, second=True)], "send, fwd", "send, bwd"),
        ([*transfer(Phase.F, 0), *transfer(Phase.R, 0, second=True)], "send", "send, again"),
        # A bidirectional pipeline: activations and gradients both ways.
        (
            [
                *(*transfer(Phase.F, 0), *transfer(Phase.B, 0)),
                *(*transfer(Phase.F, 1, second=True), *transfer(Phase.B, 1, second=True)),
            ],
            "send, down",
            "send, up",
        ),
        (
            [
                *(*transfer(Phase.F, 1), *transfer(Phase.B, 1)),
                *(*transfer(Phase.F, 0, second=True), *transfer(Phase.B, 0, second=True)),
            ],
            "send, up",
            "send, down",
        ),
        ([*transfer(Phase.F, 0), *transfer(Phase.F, 0, second=True)], "send, first", "send, second"),
    ],
)
def test_pairs_of_send_and_receive_streams(
    rows: list[tuple[int, Stream, Kind, Phase, int]], first: str, second: str | None
) -> None:
    words = stream_words(program(*rows))
    assert words[Stream.SEND] == first
    assert words[Stream.RECV] == first.replace("send", "receive")
    if second is not None:
        assert words[Stream.SEND_B] == second
        assert words[Stream.RECV_B] == second.replace("send", "receive")


def test_two_compute_streams_and_the_optimizer_on_one_of_them() -> None:
    alone = (0, Stream.COMPUTE, Kind.OPTIM, Phase.B, -1)
    forward, backward = (0, Stream.COMPUTE, Kind.ATTN, Phase.F, -1), (0, Stream.COMPUTE_B, Kind.ATTN, Phase.B, -1)
    words = stream_words(program(forward, alone, backward))
    assert (words[Stream.COMPUTE], words[Stream.COMPUTE_B]) == ("compute, fwd", "compute, bwd")
    assert stream_words(program(forward, alone))[Stream.COMPUTE] == "compute"
