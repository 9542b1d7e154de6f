"""Recompute as rows of Programs: where they stand, what they wait for, what they cost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.colocated import stages_of
from baselines.megatron import Megatron1F1B
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.plan import Layout
from disagmoe.plan.pricing import LayoutCosts, price
from disagmoe.plan.program import Program
from disagmoe.plan.verify import PlanError, verify
from disagmoe.simulator import simulate
from disagmoe.system import Problem
from disagmoe.systems import DisagMoE
from tests.problems import problem

COLOCATED = Recompute("full", "full").repeated(disaggregated=False)
SENT_AGAIN = Recompute("full", "full").repeated(disaggregated=True)
KEPT = Recompute("full", "full", tokens="keep").repeated(disaggregated=True)


def stages(layers: int, count: int) -> list[range]:
    cuts = [layers * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def tokens(program: Program, worker: int, stream: Stream) -> list[tuple[Kind, Phase, int, int]]:
    rows = program.stream_rows(worker, stream)
    return [(op.kind, op.phase, op.layer, op.microbatch) for op in map(program.op, map(int, rows))]


@settings(max_examples=25, deadline=None)
@given(
    p=st.integers(1, 4),
    v=st.integers(1, 3),
    m=st.integers(1, 9),
    chunks=st.sampled_from((1, 2, 4)),
    kinds=st.sampled_from((COLOCATED, KEPT, frozenset({Kind.FFN}), frozenset({Kind.ATTN}))),
)
def test_colocated_layers_are_repeated_right_before_their_backward(
    p: int, v: int, m: int, chunks: int, kinds: frozenset[Kind]
) -> None:
    layers = p * v + 2
    moe = [layer != 1 for layer in range(layers)]
    v = 1 if p == 1 else v
    program = colocated_program(
        p=p, v=v, m=m, group=None, stage_layers=stages(layers, p * v), moe=moe, chunks=chunks, recompute=kinds
    )
    verify(program, recompute=kinds)
    for w in range(p):
        compute = tokens(program, w, Stream.COMPUTE)
        for i, (kind, phase, layer, mb) in enumerate(compute):
            if phase == Phase.R:
                later = [x for x in compute[i:] if x[1] != Phase.R]
                assert later[0][2:] == (layer, mb) and later[0][1] == Phase.B
                assert (kind, Phase.F, layer, mb) in compute[:i]


def test_the_combine_of_a_repeated_layer_keeps_its_exchange_serial() -> None:
    """One stage, one layer: everything runs one after the other, repeats included."""
    pr = problem("tiny", ep=4, global_batch=32)
    layout = replace(_one_stage(pr), options={**_one_stage(pr).options, "recompute": "full"})
    plain, again = (_program(pr, layout, kinds) for kinds in (frozenset[Kind](), COLOCATED))
    steps = [simulate(x, price(layout, x, pr.costs)).step_s for x in (plain, again)]
    rows = price(layout, again, pr.costs).duration_s[again.phase == int(Phase.R)]
    # The reduction of the last gradients stretches what runs beside it a little longer.
    assert steps[1] - steps[0] == pytest.approx(rows.sum(), rel=0.01)
    assert steps[1] - steps[0] >= rows.sum() * (1 - 1e-9)


def _one_stage(pr: Problem) -> Layout:
    return Megatron1F1B().layout(pr, {"pp": 1, "virtual": 1, "micro_batch": 1, "group": 1, "ep": 4})


def _program(pr: Problem, layout: Layout, kinds: frozenset[Kind]) -> Program:
    return colocated_program(
        p=1,
        v=1,
        m=layout.batch.microbatches,
        group=None,
        stage_layers=stages_of(layout),
        moe=[pr.model.is_moe(layer) for layer in range(pr.model.layers)],
        recompute=kinds,
    )


def test_a_repeat_costs_as_much_as_its_forward() -> None:
    pr = problem("deepseek_v2_lite", ep=8)
    prices = LayoutCosts(_one_stage_of(pr), pr.costs)
    for kind in (Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE):
        assert prices.op(kind, Phase.R, 3).seconds == prices.op(kind, Phase.F, 3).seconds


def _one_stage_of(pr: Problem) -> Layout:
    return Megatron1F1B().layout(pr, {"pp": 1, "virtual": 1, "micro_batch": 1, "group": 1, "ep": 8})


def test_selective_recompute_is_paid_inside_the_backward() -> None:
    pr = problem("deepseek_v2_lite", ep=8)
    layout = _one_stage_of(pr)
    plain = LayoutCosts(layout, pr.costs)
    selective = LayoutCosts(replace(layout, options={**layout.options, "recompute": "selective"}), pr.costs)
    for kind in (Kind.ATTN, Kind.FFN):
        for phase in (Phase.F, Phase.W):
            assert selective.op(kind, phase, 3) == plain.op(kind, phase, 3)
        extra = [selective.op(kind, x, 3).seconds - plain.op(kind, x, 3).seconds for x in (Phase.I, Phase.B)]
        assert extra[0] == pytest.approx(extra[1])
        assert 0.0 < extra[0] < plain.op(kind, Phase.F, 3).seconds
    # The experts' activation alone: two halves read, one written, by HBM.
    rates, rows = pr.costs.calibration.rates, 4096 * 6
    expected = rows * 3 * 1408 * 2 / (3350e9 * rates.hbm_efficiency) + rates.launch_us * 1e-6
    found = selective.op(Kind.FFN, Phase.I, 3).seconds - plain.op(Kind.FFN, Phase.I, 3).seconds
    assert found == pytest.approx(expected, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(
    p=st.integers(1, 4),
    layers=st.integers(1, 10),
    m=st.integers(1, 16),
    data=st.data(),
    order=st.sampled_from(("megatron", "comm_stage")),
    head=st.sampled_from(("last_f", "next_a", "spread")),
    streams=st.sampled_from((1, 2)),
    kinds=st.sampled_from((SENT_AGAIN, KEPT)),
)
def test_repeated_rings_never_wait_in_a_circle(
    p: int,
    layers: int,
    m: int,
    data: st.DataObject,
    order: str,
    head: str,
    streams: int,
    kinds: frozenset[Kind],
) -> None:
    group = data.draw(st.integers(2 * p, 4 * p))
    program = af_pipe_program(
        p=p, layers=layers, m=m, group=group, order=order, head=head, compute_streams=streams, recompute=kinds
    )
    verify(program, recompute=kinds)
    sent_again = (program.kind == int(Kind.DISPATCH)) & (program.phase == int(Phase.R))
    assert set(program.stream[sent_again]) == (
        {int(Stream.SEND_B), int(Stream.RECV_B)} if kinds == SENT_AGAIN else set()
    )


def test_tokens_are_sent_again_before_the_experts_wait_for_them() -> None:
    """With equal times the repeats are early: the step grows by the work, not by waiting for tokens."""
    pr = problem("gpt_oss", "h800_128", seq=32768, global_batch=256, merge="node", transport="m2n_rdma")
    candidate = {"nics": "halves", "p": 4, "dp": 1, "m": 16, "n": 16, "micro_batch": 1, "order": "megatron", "group": 8}
    layout = DisagMoE(compute_streams=1).layout(pr, candidate)
    steps = {}
    for name, kinds in (("none", frozenset[Kind]()), ("keep", KEPT), ("again", SENT_AGAIN)):
        program = af_pipe_program(
            p=4, layers=36, m=layout.batch.microbatches, group=8, order="megatron", recompute=kinds
        )
        steps[name] = simulate(program, price(layout, program, pr.costs)).step_s
    assert steps["none"] < steps["again"] <= 1.02 * steps["keep"]


def test_tokens_without_attention_are_not_sent_again() -> None:
    with pytest.raises(ValueError, match="only where attention and experts are both recomputed"):
        af_pipe_program(p=1, layers=2, m=2, group=2, order="megatron", recompute={Kind.FFN, Kind.DISPATCH})


def test_verify_holds_a_program_against_its_policy() -> None:
    program = af_pipe_program(p=1, layers=2, m=2, group=2, order="megatron", recompute=KEPT)
    verify(program, recompute=KEPT)
    with pytest.raises(PlanError, match=r"missing operation: D0R0"):
        verify(program, recompute=SENT_AGAIN)
    with pytest.raises(PlanError, match=r"repeated operation: A0R0"):
        verify(program, recompute={Kind.FFN})
    late = program.from_table(
        np.stack(
            [
                getattr(program, c)
                for c in (
                    "worker",
                    "stream",
                    "kind",
                    "phase",
                    "layer",
                    "microbatch",
                    "chunk",
                    "replica",
                    "peer",
                    "pair",
                )
            ],
            axis=1,
        )[_after_its_backward(program)],
        n_workers=program.n_workers,
        n_layers=program.n_layers,
        n_microbatches=program.n_microbatches,
    )
    with pytest.raises(PlanError, match="deadlock"):
        verify(late)


def _after_its_backward(program: Program) -> list[int]:
    """Rows with the first repeat moved behind the backward that needs it."""
    rows = list(range(len(program)))
    repeat = next(i for i in rows if program.phase[i] == Phase.R)
    rows[repeat], rows[repeat + 1] = rows[repeat + 1], rows[repeat]
    return rows
