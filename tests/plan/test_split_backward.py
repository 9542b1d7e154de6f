"""Backwards in two parts: what becomes of every B, where its W goes, and that the Program stays sound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.af_pipe import ORDERS, af_pipe_program
from disagmoe.plan.af_ring import HEADS
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.combined import combined_program
from disagmoe.plan.program import Program
from disagmoe.plan.split_backward import split_backward
from disagmoe.plan.text import from_text
from disagmoe.plan.verify import verify

LAYERS = ((0, 1), (2, 3))


def ring(**changes: object) -> Program:
    shape: dict[str, object] = {"p": 2, "layers": 5, "m": 6, "group": 6, "order": "comm_stage", **changes}
    return af_pipe_program(**shape)  # type: ignore[arg-type]


def test_every_whole_backward_becomes_two() -> None:
    before, after = ring(), split_backward(ring(), 2)
    split = np.isin(before.kind, (Kind.ATTN, Kind.FFN)) & (before.phase == int(Phase.B))
    assert len(after) == len(before) + split.sum()
    for phase in (Phase.I, Phase.W):
        assert ((after.phase == int(phase)) & np.isin(after.kind, (Kind.ATTN, Kind.FFN))).sum() == split.sum()
    assert not (np.isin(after.kind, (Kind.ATTN, Kind.FFN)) & (after.phase == int(Phase.B))).any()


@pytest.mark.parametrize(
    ("pending", "expected"),
    [
        (0, "A0I0 A0W0 A0I1 A0W1 A0I2 A0W2 O-F-"),
        (1, "A0I0 A0I1 A0W0 A0I2 A0W1 A0W2 O-F-"),
        (2, "A0I0 A0I1 A0I2 A0W0 A0W1 A0W2 O-F-"),
        (9, "A0I0 A0I1 A0I2 A0W0 A0W1 A0W2 O-F-"),
    ],
)
def test_where_the_weight_gradients_go(pending: int, expected: str) -> None:
    header = "program workers=1 layers=1 microbatches=3 chunks=1"
    after = split_backward(from_text(f"{header}\nw0 COMPUTE: A0B0 A0B1 A0B2 O-F-\n"), pending)
    wanted = from_text(f"{header}\nw0 COMPUTE: {expected}\n")
    assert [after.op(i) for i in range(len(after))] == [wanted.op(i) for i in range(len(wanted))]


@settings(max_examples=40, deadline=None)
@given(
    p=st.integers(1, 3),
    layers=st.integers(1, 7),
    m=st.integers(1, 9),
    order=st.sampled_from(ORDERS),
    head=st.sampled_from(HEADS),
    streams=st.sampled_from([1, 2]),
    pending=st.integers(0, 6),
    again=st.sampled_from([(), (Kind.ATTN,), (Kind.ATTN, Kind.DISPATCH, Kind.FFN)]),
)
def test_rings_stay_sound(
    p: int, layers: int, m: int, order: str, head: str, streams: int, pending: int, again: tuple[Kind, ...]
) -> None:
    before = ring(
        p=p, layers=layers, m=m, group=2 * p, order=order, head=head, compute_streams=streams, recompute=again
    )
    if before.in_flight and pending:
        with pytest.raises(ValueError, match="only 0 is allowed"):
            split_backward(before, pending)
        return
    after = split_backward(before, pending)
    verify(after, recompute=again)
    for worker in range(2 * p):
        for stream in (Stream.COMPUTE, Stream.COMPUTE_B):
            rows = after.stream_rows(worker, stream)
            put_off = np.cumsum(np.where(after.phase[rows] == int(Phase.I), 1, 0) - (after.phase[rows] == int(Phase.W)))
            assert put_off.max(initial=0) <= pending + 1


@pytest.mark.parametrize("chunks", [1, 2])
def test_pipelines_stay_sound(chunks: int) -> None:
    program = colocated_program(
        p=2, v=1, m=4, group=2, stage_layers=LAYERS, moe=[False, True, True, True], chunks=chunks
    )
    verify(split_backward(program, 1))


def test_what_is_split_already_stays() -> None:
    program = combined_program(p=1, v=1, m=3, group=1, stage_layers=((0, 1),), moe=[True, True])
    assert split_backward(program) is program


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="pending=-1"):
        split_backward(ring(), -1)
