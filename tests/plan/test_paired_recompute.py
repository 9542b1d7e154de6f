"""Recompute beside overlapped pairs: where repeats stand, what they hide behind, what they save and cost."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.registry import get_system
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.combined import combined_program
from disagmoe.plan.dualpipe import dualpipe_program, dualpipev_program
from disagmoe.plan.memory_report import peak_gib
from disagmoe.plan.pricing import Pricing, price
from disagmoe.plan.program import Program
from disagmoe.plan.text import op_token
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.system import Candidate, recompute_levels
from tests.problems import problem, small_cluster

WHOLE = Recompute("full", "full").repeated(disaggregated=False)
NO_COMBINE = Recompute("full", "full", combine="never").repeated(disaggregated=False)
KEPT = Recompute("full", "full", tokens="keep").repeated(disaggregated=False)
POLICIES = (WHOLE, NO_COMBINE, KEPT, frozenset({Kind.FFN}), frozenset({Kind.ATTN}))


def stages(layers: int, count: int) -> list[list[int]]:
    cuts = [layers * i // count for i in range(count + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(cuts)]


def check(program: Program, plain: Program, moe: list[bool], kinds: frozenset[Kind]) -> None:
    """Sound; the work of the plain Program and each repeat once; a repeat before its backward on its stream."""
    verify(program, recompute=kinds)
    layers, m = program.n_layers, program.n_microbatches

    def work(of: Program, phases: tuple[Phase, ...]) -> Counter[tuple[int, ...]]:
        rows = np.flatnonzero(
            np.isin(of.phase, phases) & np.isin(of.kind, (Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE))
        )
        return Counter(zip(*(getattr(of, c)[rows].tolist() for c in ("kind", "layer", "microbatch")), strict=True))

    assert work(program, (Phase.R,)) == Counter(
        (int(kind), layer, mb)
        for kind in kinds
        for layer in range(layers)
        for mb in range(m)
        if moe[layer] or kind in (Kind.ATTN, Kind.FFN)
    )
    assert work(program, (Phase.F,)) == work(plain, (Phase.F,))
    assert work(program, (Phase.B, Phase.I)) == work(plain, (Phase.B, Phase.I))
    place = {}
    for row in range(len(program)):
        op = program.op(row)
        place[op.kind, op.phase, op.layer, op.microbatch] = (int(program.worker[row]), int(program.stream[row]), row)
    for (kind, phase, layer, mb), (worker, stream, row) in place.items():
        if phase == Phase.R:
            back = place.get((kind, Phase.B, layer, mb)) or place[kind, Phase.I, layer, mb]
            assert back[:2] == (worker, stream) and row < back[2]
            assert place[kind, Phase.F, layer, mb][2] < row


@settings(max_examples=25, deadline=None)
@given(
    p=st.integers(1, 4),
    v=st.integers(1, 3),
    m=st.integers(1, 9),
    surplus=st.integers(0, 5),
    dense=st.integers(-1, 3),
    kinds=st.sampled_from(POLICIES),
)
def test_combined_1f1b_repeats_every_layer_before_its_backward(
    p: int, v: int, m: int, surplus: int, dense: int, kinds: frozenset[Kind]
) -> None:
    layers = p * v + surplus
    moe = [layer != dense for layer in range(layers)]

    def make(recompute: frozenset[Kind]) -> Program:
        cut = stages(layers, p * v)
        return combined_program(p=p, v=v, m=m, group=None, stage_layers=cut, moe=moe, recompute=recompute)

    check(make(kinds), make(frozenset()), moe, kinds)


@settings(max_examples=25, deadline=None)
@given(
    half=st.integers(1, 3),
    more=st.integers(0, 2),
    surplus=st.integers(0, 5),
    dense=st.integers(-1, 3),
    exposed=st.booleans(),
    folded=st.booleans(),
    kinds=st.sampled_from(POLICIES),
)
def test_dualpipe_repeats_every_layer_before_its_backward(
    half: int, more: int, surplus: int, dense: int, exposed: bool, folded: bool, kinds: frozenset[Kind]
) -> None:
    ranks = half if folded else 2 * half
    count = 2 * ranks if folded else ranks
    layers = count + surplus
    moe = [layer != dense for layer in range(layers)]

    def make(recompute: frozenset[Kind]) -> Program:
        generate = dualpipev_program if folded else dualpipe_program
        return generate(
            ranks=ranks,
            microbatches=2 * ranks + 2 * more,
            stage_layers=stages(layers, count),
            moe=moe,
            p2p_exposed=exposed,
            recompute=recompute,
        )

    again = make(kinds)
    check(again, make(frozenset()), moe, kinds)
    # What is put off keeps what recompute drops: outside pairs there is no input gradient without its weights.
    assert not ((again.pair < 0) & np.isin(again.phase, (Phase.I, Phase.W))).any()


def names(program: Program, stream: Stream, *, paired: bool) -> str:
    rows = [r for r in program.stream_rows(0, stream) if (program.pair[r] >= 0) == paired]
    return " ".join(op_token(program.op(int(r))) for r in rows)


def one_rank(kinds: frozenset[Kind], layers: int = 2) -> Program:
    """F_0, (F_1 beside B_0), B_1 on one worker."""
    return combined_program(
        p=1, v=1, m=2, group=None, stage_layers=[list(range(layers))], moe=[True] * layers, recompute=kinds
    )


def test_a_repeat_with_its_combine_comes_as_a_whole() -> None:
    """Megatron-Core's RecomputeSegment of one layer, then the ten operations in their own order."""
    program = one_rank(WHOLE)
    assert names(program, Stream.COMPUTE, paired=True) == (
        "E-F1 H-B0 A1R0 M1R0 A0F1 M1I0 M1W0 M0F1 A1I0 A1W0 A0R0 M0R0 A1F1 M0I0 M0W0 M1F1 A0I0 A0W0 H-F1 E-B0"
    )
    assert names(program, Stream.COLL, paired=True) == ("D1R0 C1R0 C1B0 D0F1 D1B0 C0F1 D0R0 C0R0 C0B0 D1F1 D0B0 C1F1")
    assert names(program, Stream.COMPUTE, paired=False) == (
        "E-F0 A0F0 M0F0 A1F0 M1F0 H-F0 H-B1 A1R1 M1R1 M1I1 M1W1 A1I1 A1W1 A0R1 M0R1 M0I1 M0W1 A0I1 A0W1 E-B1 O-F-"
    )


def test_a_repeat_without_its_combine_is_among_the_ten() -> None:
    program = one_rank(NO_COMBINE)
    assert names(program, Stream.COMPUTE, paired=True) == (
        "E-F1 H-B0 A1R0 A0F1 M1R0 M1I0 M1W0 M0F1 A1I0 A1W0 A0R0 A1F1 M0R0 M0I0 M0W0 M1F1 A0I0 A0W0 H-F1 E-B0"
    )
    assert names(program, Stream.COLL, paired=True) == "C1B0 D1R0 D0F1 D1B0 C0F1 C0B0 D0R0 D1F1 D0B0 C1F1"


@pytest.mark.parametrize(("kinds", "layer_s"), [(frozenset[Kind](), 6.0), (WHOLE, 10.0), (NO_COMBINE, 8.0)])
def test_what_a_repeat_adds_to_a_pair(kinds: frozenset[Kind], layer_s: float) -> None:
    """Every operation takes 1 s: a pair of layers is 6 of compute, with the repeat 8.

    As a whole, D_r has nothing beside it, C_r has A_f, and C_b then delays M_i.
    """
    steps = []
    for layers in (3, 4):
        program = one_rank(kinds, layers)
        inside = np.isin(program.kind, (Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE))
        timeline = simulate(program, Pricing.ideal(np.where(inside, 1.0, 0.0)))
        pair = inside & (program.pair >= 0)
        steps.append(timeline.end_s[pair].max() - timeline.start_s[pair].min())
    assert steps[1] - steps[0] == layer_s


CANDIDATES: dict[str, Candidate] = {
    "megatron_1f1b_overlap": {"ep": 8, "pp": 2, "virtual": 2, "micro_batch": 1, "group": 2},
    "dualpipe": {"ep": 8, "pp": 2, "micro_batch": 1},
    "dualpipe_v": {"ep": 8, "pp": 2, "micro_batch": 1},
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_full_recompute_takes_longer_and_holds_less(name: str) -> None:
    """At least the repeated compute longer; of a layer only its input is kept."""
    pr = problem("deepseek_moe_16b", small_cluster(nodes=4), ep=8, seq=16384, global_batch=96)
    system = get_system(name)
    assert [dict(level) for level in recompute_levels(system)][-1] == {"recompute": "full"}
    steps, peaks, redone = [], [], 0.0
    for level in recompute_levels(system):
        layout = system.layout(pr, {**CANDIDATES[name], **level})
        assert layout.details.get("recompute", "none") == level.get("recompute", "none")
        program = system.program(pr, layout)
        verify(program, recompute=Recompute.of(layout.options).repeated(disaggregated=False))
        pricing = price(layout, program, pr.costs)
        steps.append(simulate(program, pricing).step_s)
        peaks.append(peak_gib(layout, program, pr.model, pr.workload))
        again = (program.phase == int(Phase.R)) & (program.stream == int(Stream.COMPUTE))
        redone = float(np.bincount(program.worker[again], pricing.duration_s[again], minlength=2).max())
    assert steps[0] <= steps[1] <= steps[2]
    assert steps[2] - steps[0] > 0.5 * redone > 0.0
    assert peaks[0] > peaks[1] > peaks[2]
    assert peaks[2] < 0.6 * peaks[0]


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_hidden_replay_is_faster_than_an_exposed_one(name: str) -> None:
    """The same compute; the exchange of the repeat, and C_b behind it, no longer stand alone."""
    pr = problem("deepseek_moe_16b", small_cluster(nodes=4), ep=16, seq=8192, global_batch=192)
    steps, worked = [], []
    for replay in ("exposed", "hidden"):
        system = get_system(name, replay=replay)
        layout = system.layout(pr, {**CANDIDATES[name], "ep": 16, **recompute_levels(system)[-1]})
        program = system.program(pr, layout)
        verify(program, recompute=Recompute.of(layout.options).repeated(disaggregated=False))
        peak_gib(layout, program, pr.model, pr.workload)  # the policy and the Program agree
        pricing = price(layout, program, pr.costs)
        steps.append(simulate(program, pricing).step_s)
        worked.append(pricing.duration_s[program.stream == int(Stream.COMPUTE)].sum())
    assert worked[0] == pytest.approx(worked[1], rel=1e-12)
    assert steps[1] < 0.97 * steps[0]


@pytest.mark.parametrize("name", CANDIDATES)
def test_an_unknown_replay_is_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} replay='late': allowed are exposed, hidden"):
        get_system(name, replay="late")


def test_an_unknown_combine_is_one_line() -> None:
    with pytest.raises(ValueError, match="combine of recomputed experts='late': allowed are again, never"):
        Recompute.of({"recompute": "full", "recompute_combine": "late"})
