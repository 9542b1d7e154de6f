"""The bound on what is in flight: its waits by hand, its makespan by hand, and that verify proves it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.admission import admission_rows
from disagmoe.plan.af_pipe import ORDERS, af_pipe_program
from disagmoe.plan.af_ring import HEADS
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.text import from_text, row_token, to_text
from disagmoe.plan.verify import PlanError, verify
from disagmoe.simulator import simulate

STAGES = """
program workers=1 layers=1 microbatches=3 chunks=1{bound}
w0 COMPUTE: S0F0 S0F1 S0F2
w0 COMPUTE_B: S0B0 S0B1 S0B2
"""


def stages(bound: str = "") -> Program:
    return from_text(STAGES.format(bound=bound))


def step_s(program: Program) -> float:
    """Forward 1 s, backward 2 s, nothing slows anything but two computes on one GPU."""
    return simulate(program, Pricing.ideal(np.where(program.phase == Phase.F, 1.0, 2.0))).step_s


def names(program: Program) -> list[tuple[str, str]]:
    return [
        (row_token(program, int(a)), row_token(program, int(b))) for a, b in zip(*admission_rows(program), strict=True)
    ]


def test_waits_by_hand() -> None:
    assert names(stages()) == []
    assert names(stages(" in_flight=1")) == [("S0B0@w0", "S0F1@w0"), ("S0B1@w0", "S0F2@w0")]
    assert names(stages(" in_flight=2")) == [("S0B0@w0", "S0F2@w0")]
    assert names(stages(" in_flight=3")) == []


def test_the_embedding_belongs_to_layer_0_and_the_head_to_none() -> None:
    text = """
program workers=2 layers=2 microbatches=2 chunks=1 in_flight=2,9
w0 COMPUTE: E-F0 A0F0 M0F0 A1F0 M1F0 H-F0 E-F1 A0F1 M0F1 A1F1 M1F1 H-F1
w0 COMPUTE_B: H-B0 M1B0 A1B0 M0B0 A0B0 E-B0 H-B1 M1B1 A1B1 M0B1 A0B1 E-B1
"""
    # Attention and experts of a layer are one action here: two layers are held.
    assert names(from_text(text)) == [("A1B0@w0", "E-F1@w0"), ("E-B0@w0", "A1F1@w0")]


def test_two_streams_share_the_gpu() -> None:
    """S0F0 alone until 1; S0F1 and S0B0 at half rate until S0F1 ends at 3, and S0F2 with it until ..., 9 s of work."""
    program = stages()
    timeline = simulate(program, Pricing.ideal(np.where(program.phase == Phase.F, 1.0, 2.0)))
    ends = {row_token(program, i): float(t) for i, t in enumerate(timeline.end_s)}
    # 0-1 F0; 1-3 F1 with half of B0; 3-5 F2 with the other half of B0; then B1, B2 alone.
    assert ends == {"S0F0@w0": 1, "S0F1@w0": 3, "S0F2@w0": 5, "S0B0@w0": 5, "S0B1@w0": 7, "S0B2@w0": 9}


def test_bound_of_one_runs_one_after_the_other() -> None:
    program = stages(" in_flight=1")
    timeline = simulate(program, Pricing.ideal(np.where(program.phase == Phase.F, 1.0, 2.0)))
    ends = {row_token(program, i): float(t) for i, t in enumerate(timeline.end_s)}
    assert ends == {"S0F0@w0": 1, "S0B0@w0": 3, "S0F1@w0": 4, "S0B1@w0": 6, "S0F2@w0": 7, "S0B2@w0": 9}


def test_text_keeps_the_bounds() -> None:
    program = stages(" in_flight=2")
    assert program.in_flight == (2,)
    assert to_text(program).splitlines()[0] == "program workers=1 layers=1 microbatches=3 chunks=1 in_flight=2"
    assert from_text(to_text(program)).in_flight == (2,)
    assert "in_flight" not in to_text(stages())


@pytest.mark.parametrize("bounds", [(1, 1), (0,)])
def test_bounds_that_mean_nothing_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"in_flight .*: needs one bound of at least 1 for each worker"):
        verify(replace(stages(), in_flight=bounds))


def test_a_bound_too_small_for_the_order_is_a_named_deadlock() -> None:
    """Both layers of A_0 must go forward before the first comes back."""
    program = af_pipe_program(p=1, layers=2, m=2, group=2, order="megatron", compute_streams=2)
    verify(program)
    with pytest.raises(PlanError, match=r"deadlock: .*A1B0@w0 -> E-F1@w0"):
        verify(replace(program, in_flight=(1, *program.in_flight[1:])))


def held(program: Program, start: np.ndarray, end: np.ndarray, worker: int) -> int:
    """Most layers whose forward has begun and whose backward has not ended, by the clock."""
    side = Kind.ATTN if worker < program.n_workers // 2 else Kind.FFN
    mine = (program.worker == worker) & (program.kind == side)
    begins = start[mine & (program.phase == Phase.F)]
    ends = end[mine & (program.phase == Phase.B)]
    return max((int((begins <= t).sum() - (ends <= t).sum()) for t in begins), default=0)


@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 12), st.sampled_from(ORDERS), st.sampled_from(HEADS),
    st.integers(0, 2), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_no_worker_ever_holds_more_than_its_bound(
    p: int, layers: int, m: int, order: str, head: str, more: int, seed: int
) -> None:
    """With any durations, and bounds from what the one-stream order holds upwards."""
    program = af_pipe_program(p=p, layers=layers, m=m, group=3 * p, order=order, head=head, compute_streams=2)
    program = replace(program, in_flight=tuple(limit + more for limit in program.in_flight))
    verify(program)
    rng = np.random.default_rng(seed)
    of_op = rng.uniform(0.1, 3.0, size=(10, 5, layers + 1))
    duration = of_op[program.kind, program.phase, program.layer]
    timeline = simulate(program, Pricing.ideal(duration))
    for worker in range(2 * p):
        assert held(program, timeline.start_s, timeline.end_s, worker) <= program.in_flight[worker]


def test_backward_compute_is_on_its_own_stream() -> None:
    program = af_pipe_program(p=2, layers=4, m=4, group=4, order="megatron", compute_streams=2)
    compute = np.isin(program.stream, (Stream.COMPUTE, Stream.COMPUTE_B)) & (program.microbatch >= 0)
    assert ((program.stream == Stream.COMPUTE_B) == (program.phase == Phase.B))[compute].all()
