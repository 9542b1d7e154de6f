"""Overlapped pairs whose exchange and experts are cut in parts."""

from __future__ import annotations

import numpy as np
import pytest

from disagmoe.ops import Kind, Phase
from disagmoe.plan.combined import combined_program
from disagmoe.plan.dualpipe import dualpipev_program
from disagmoe.plan.program import Program
from disagmoe.plan.verify import verify

STAGES, MOE = ((0,), (1, 2), (3,), (4,)), [False, True, True, True, True]
AGAIN = (Kind.ATTN, Kind.DISPATCH, Kind.FFN)


def combined(chunks: int, recompute: tuple[Kind, ...] = ()) -> Program:
    return combined_program(p=2, v=2, m=5, group=2, stage_layers=STAGES, moe=MOE, recompute=recompute, chunks=chunks)


def folded(chunks: int, recompute: tuple[Kind, ...] = ()) -> Program:
    return dualpipev_program(ranks=2, microbatches=5, stage_layers=STAGES, moe=MOE, recompute=recompute, chunks=chunks)


@pytest.mark.parametrize("make", [combined, folded])
@pytest.mark.parametrize("recompute", [(), AGAIN])
@pytest.mark.parametrize("chunks", [2, 3])
def test_parts_make_sound_programs(make: object, recompute: tuple[Kind, ...], chunks: int) -> None:
    whole, parts = (make(count, recompute) for count in (1, chunks))  # type: ignore[operator]
    verify(parts, recompute=recompute)
    for kind in (Kind.DISPATCH, Kind.FFN, Kind.COMBINE):
        counts = [np.bincount(program.layer[(program.kind == int(kind))], minlength=5) for program in (whole, parts)]
        assert (counts[1][1:] == chunks * counts[0][1:]).all()
    # The dense layer has no exchange and one MLP, however many parts others have.
    dense = (parts.kind == int(Kind.FFN)) & (parts.layer == 0)
    assert (parts.chunk[dense] == 0).all()


def test_backwards_begin_with_the_last_part() -> None:
    program = combined(2)
    rows = np.flatnonzero((program.kind == int(Kind.FFN)) & (program.layer == 2) & (program.microbatch == 3))
    order = {phase: program.chunk[rows[program.phase[rows] == int(phase)]].tolist() for phase in (Phase.F, Phase.I)}
    assert order == {Phase.F: [0, 1], Phase.I: [1, 0]}


def test_no_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="chunks = 0"):
        combined(0)
