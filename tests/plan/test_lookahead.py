"""The look-ahead window: a static order that was one run, with the given operations, within its limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.combined import combined_program
from disagmoe.plan.dualpipe import dualpipev_program
from disagmoe.plan.lookahead import Window, look_ahead
from disagmoe.plan.memory_timeline import in_flight
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import COLUMNS, Program
from disagmoe.plan.split_backward import split_backward
from disagmoe.plan.text import from_text
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from tests.plan.window_loops import slow_window


def operations(program: Program) -> list[tuple[int, ...]]:
    return sorted(map(tuple, np.stack([getattr(program, name) for name in COLUMNS], axis=1).tolist()))


def priced(program: Program, seed: int) -> Pricing:
    """Random durations, equal on both ends of a transfer."""
    rng = np.random.default_rng(seed)
    columns = ("kind", "phase", "layer", "microbatch", "chunk", "replica")
    keys = np.stack([getattr(program, name) for name in columns], axis=1)
    _, inverse = np.unique(keys, axis=0, return_inverse=True)
    seconds = rng.uniform(0.0, 2.0, int(inverse.max()) + 1)
    return Pricing.ideal(seconds[inverse.reshape(-1)])


def programs(kind: str, m: int) -> Program:
    stages, moe = ((0, 1), (2,), (3,), (4, 5)), [False, *[True] * 5]
    if kind == "ring":
        return split_backward(af_pipe_program(p=2, layers=5, m=m, group=5, order="comm_stage"), 1)
    if kind == "spread":
        return split_backward(af_pipe_program(p=2, layers=4, m=m, group=4, order="megatron", head="spread"))
    if kind == "folded":
        return dualpipev_program(ranks=2, microbatches=m, stage_layers=stages, moe=moe)
    again = (Kind.ATTN, Kind.DISPATCH, Kind.FFN) if kind == "recomputed" else ()
    return combined_program(p=2, v=2, m=m, group=2, stage_layers=stages, moe=moe, recompute=again)


KINDS = ("ring", "spread", "folded", "combined", "recomputed")


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    m=st.integers(4, 8),
    rows=st.integers(1, 40),
    spare=st.integers(-3, 6),
    pending=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_window_gives_a_sound_program(kind: str, m: int, rows: int, spare: int, pending: int, seed: int) -> None:
    before = programs(kind, m)
    pricing = priced(before, seed)
    after = look_ahead(before, pricing, Window(rows, spare, pending))
    verify(after)
    assert operations(after) == operations(before)
    # The order is that of one run, so the same durations play it through without a deadlock.
    simulate(after, priced(after, seed))
    more = np.array(in_flight(after)) - np.array(in_flight(before))
    assert more.max() <= max(spare, 0) + 2  # the next of the given order may always go


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 12),
    spare=st.integers(-3, 6),
    pending=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_only_streams_that_can_have_changed_need_asking(
    kind: str, rows: int, spare: int, pending: int, seed: int
) -> None:
    before = programs(kind, 5)
    pricing, window = priced(before, seed), Window(rows, spare, pending)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("disagmoe.plan.lookahead.record_window", slow_window)
        slow = look_ahead(before, pricing, window)
    fast = look_ahead(before, pricing, window)
    assert all((getattr(fast, name) == getattr(slow, name)).all() for name in COLUMNS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_one_without_put_off_gradients_changes_no_compute_order(kind: str) -> None:
    before = programs(kind, 6)
    after = look_ahead(before, priced(before, 1), Window(1, 0, 1))
    for worker in range(before.n_workers):
        mine = [
            [
                (program.op(r).kind, program.op(r).layer, program.op(r).microbatch, program.op(r).phase)
                for r in program.stream_rows(worker, Stream.COMPUTE)
                if program.phase[r] != int(Phase.W)
            ]
            for program in (before, after)
        ]
        assert mine[0] == mine[1]


def test_an_idle_stream_takes_the_next_that_can_start() -> None:
    """The second micro-batch's attention fills the time of the first one's exchange."""
    text = (
        "program workers=1 layers=1 microbatches=2 chunks=1\n"
        "w0 COMPUTE: A0F0 M0F0 A0F1 M0F1 M0B0 A0B0 M0B1 A0B1 O-F-\n"
        "w0 COLL: D0F0 C0F0 D0F1 C0F1 C0B0 D0B0 C0B1 D0B1\n"
    )
    before = from_text(text)
    # Micro-batch 1 may be in flight beside micro-batch 0 in the given order, so no more memory is asked for.
    after = look_ahead(before, Pricing.ideal(np.ones(len(before))), Window(4))
    compute = after.stream_rows(0, Stream.COMPUTE)
    names = [(after.op(r).kind.name, after.op(r).microbatch) for r in compute[:4]]
    assert names == [("ATTN", 0), ("ATTN", 1), ("FFN", 0), ("FFN", 1)]
    assert (
        simulate(after, Pricing.ideal(np.ones(len(after)))).step_s
        < simulate(before, Pricing.ideal(np.ones(len(before)))).step_s
    )


def test_weight_gradients_fill_and_are_bounded() -> None:
    before = programs("combined", 8)
    for pending in (1, 2, 5):
        after = look_ahead(before, priced(before, 3), Window(6, 0, pending))
        for worker in range(after.n_workers):
            rows = after.stream_rows(worker, Stream.COMPUTE)
            phase = after.phase[rows]
            put_off = np.cumsum((phase == int(Phase.I)).astype(int) - (phase == int(Phase.W)))
            assert put_off.max() <= pending + 1


def test_programs_with_waits_or_two_compute_streams_are_refused() -> None:
    waits = colocated_program(p=2, v=1, m=2, group=2, stage_layers=((0,), (1,)), moe=[True, True])
    two = af_pipe_program(p=1, layers=2, m=2, group=2, order="megatron", compute_streams=2)
    for program in (waits, two):
        with pytest.raises(ValueError, match="one compute stream and no waits"):
            look_ahead(program, Pricing.ideal(np.ones(len(program))), Window(2))


@pytest.mark.parametrize(("name", "value"), [("rows", 0), ("pending", 0)])
def test_limits_are_checked(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Window(**{"rows": 2, name: value})
