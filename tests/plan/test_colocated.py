"""Layer-level Programs of colocated pipelines: order of the exchange, transfers, tail, closed forms."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.dependencies import is_wait
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate


def split(counts: list[int]) -> list[list[int]]:
    """Contiguous layers per stage."""
    bounds = np.cumsum([0, *counts])
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def program(
    p: int, v: int, m: int, counts: list[int], *, group: int | None = None, chunks: int = 1, dense: int = 0
) -> Program:
    moe = [layer >= dense for layer in range(sum(counts))]
    built = colocated_program(p=p, v=v, m=m, group=group, stage_layers=split(counts), moe=moe, chunks=chunks)
    verify(built)
    return built


def names(built: Program, worker: int, stream: Stream) -> list[str]:
    ops = [built.op(int(i)) for i in built.stream_rows(worker, stream)]
    return [f"{o.kind.name}{o.phase.name} {o.layer}.{o.chunk} mb{o.microbatch}" for o in ops]


def step_s(built: Program, seconds: dict[tuple[Kind, Phase], float]) -> float:
    """Simulated step with the given seconds per operation, 0 for what is not named."""
    price = np.zeros((len(Kind), len(Phase)))
    for (kind, phase), value in seconds.items():
        price[kind, phase] = value
    seconds_of = np.where(is_wait(built), 0.0, price[built.kind, built.phase])
    return simulate(built, Pricing.ideal(seconds_of)).step_s


def test_streams_of_one_layer() -> None:
    built = program(1, 1, 1, [1], chunks=2)
    assert names(built, 0, Stream.COLL) == [
        "DISPATCHF 0.0 mb0", "DISPATCHF 0.1 mb0", "COMBINEF 0.0 mb0", "COMBINEF 0.1 mb0",
        "COMBINEB 0.1 mb0", "COMBINEB 0.0 mb0", "DISPATCHB 0.1 mb0", "DISPATCHB 0.0 mb0",
    ]  # fmt: skip
    assert names(built, 0, Stream.COMPUTE) == [
        "EMBEDF -1.0 mb0", "ATTNF 0.0 mb0", "FFNF 0.0 mb0", "FFNF 0.1 mb0", "HEADF -1.0 mb0",
        "HEADB -1.0 mb0", "FFNB 0.1 mb0", "FFNB 0.0 mb0", "ATTNB 0.0 mb0", "EMBEDB -1.0 mb0", "OPTIMF -1.0 mb-1",
    ]  # fmt: skip
    assert names(built, 0, Stream.SYNC) == ["GRAD_SYNCB 0.0 mb-1", "GRAD_SYNCB -1.0 mb-1", "GRAD_SYNCF -1.0 mb-1"]


@given(st.integers(1, 8), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_tutel_closed_form(d: int, dispatch: int, experts: int, combine: int) -> None:
    """Equal chunks (arXiv 2206.03382): T = max(d(D+C), D+E+dC, D+dE+C, dD+E+C), forward and mirrored."""
    forms = [
        max(d * (x + z), x + y + d * z, x + d * y + z, d * x + y + z)
        for x, y, z in ((dispatch, experts, combine), (combine, experts, dispatch))
    ]
    built = program(1, 1, 1, [1], chunks=d)
    prices = {(Kind.DISPATCH, Phase.F): dispatch, (Kind.FFN, Phase.F): experts, (Kind.COMBINE, Phase.F): combine}
    assert step_s(built, prices) == forms[0]
    prices = {(Kind.DISPATCH, Phase.B): dispatch, (Kind.FFN, Phase.B): experts, (Kind.COMBINE, Phase.B): combine}
    assert step_s(built, prices) == forms[1]


def test_tutel_degree_two_leaves_half_of_the_exchange() -> None:
    """t_D = t_C = c and t_E = c in two chunks: T = 2c, of which c is exposed."""
    c = 6.0
    built = program(1, 1, 1, [1], chunks=2)
    assert step_s(built, {(k, Phase.F): c / 2 for k in (Kind.DISPATCH, Kind.FFN, Kind.COMBINE)}) == 2 * c


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_exposed_exchange_lengthens_every_stage(p: int, v: int, rounds: int, per_stage: int, exchange: int) -> None:
    """Without overlap a stage takes all its parts in a row: m(F+B) + (p-1)(F+B)/v with D and C inside F and B."""
    m = rounds * p
    built = program(p, v, m, [per_stage] * (p * v))
    seconds = {(k, f): float(exchange) for k in (Kind.DISPATCH, Kind.COMBINE) for f in (Phase.F, Phase.B)}
    seconds |= {(Kind.ATTN, Phase.F): 1, (Kind.ATTN, Phase.B): 2, (Kind.FFN, Phase.F): 3, (Kind.FFN, Phase.B): 5}
    chunk = per_stage * (4 * exchange + 11)
    assert step_s(built, seconds) == m * v * chunk + (p - 1) * chunk


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 3),
    st.lists(st.integers(1, 3), min_size=12, max_size=12),
    st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_every_operation_once_and_where_its_layer_lives(
    p: int, v: int, m: int, chunks: int, counts: list[int], dense: int
) -> None:
    counts = counts[: p * v]
    dense = min(dense, sum(counts))
    built = program(p, v, m, counts, chunks=chunks, dense=dense)
    home = {layer: s % p for s, layers in enumerate(split(counts)) for layer in layers}
    wanted: Counter[tuple[int, Op]] = Counter()
    for layer, worker in home.items():
        for phase in (Phase.F, Phase.B):
            for b in range(m):
                wanted[worker, Op(Kind.ATTN, phase, layer, b)] += 1
                for c in range(chunks if layer >= dense else 1):
                    for kind in (Kind.DISPATCH, Kind.FFN, Kind.COMBINE) if layer >= dense else (Kind.FFN,):
                        wanted[worker, Op(kind, phase, layer, b, c)] += 1
    for kind, worker in ((Kind.EMBED, 0), (Kind.HEAD, p - 1)):
        wanted.update((worker, Op(kind, f, -1, b)) for f in (Phase.F, Phase.B) for b in range(m))
    step = (Kind.P2P, Kind.GRAD_SYNC, Kind.OPTIM)
    work = zip(built.rows(), ~is_wait(built), strict=True)
    assert Counter((r.worker, r.op) for r, works in work if works and r.op.kind not in step) == wanted


def test_waits_at_the_ends_of_a_stage_and_around_recompute() -> None:
    """Two stages on one worker, two layers each: what no data binds to the compute before it waits for it."""
    built = colocated_program(
        p=1, v=2, m=1, group=None, stage_layers=[[0, 1], [2, 3]], moe=[True] * 4, recompute=(Kind.DISPATCH, Kind.FFN)
    )
    stage = colocated_program(p=1, v=2, m=1, group=None, stage_layers=[[0, 1], [2, 3]], moe=[True] * 4)
    for program_, waits in (
        (stage, ["COMBINEF 1.0 mb0", "COMBINEB 1.0 mb0"]),
        (
            built,
            ["COMBINEF 1.0 mb0"]
            + [f"{kind} {layer}.0 mb0" for layer in (3, 2, 1, 0) for kind in ("DISPATCHR", "COMBINEB")],
        ),
    ):
        verify(program_)
        assert [n for n in names(program_, 0, Stream.COMPUTE) if n.startswith(("DISP", "COMB"))] == waits


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from(
        [(), (Kind.ATTN,), (Kind.FFN,), (Kind.DISPATCH, Kind.FFN), (Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE)]
    ),
    st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_an_exchange_runs_beside_nothing_but_the_experts_of_its_layer(
    p: int, v: int, m: int, chunks: int, recompute: tuple[Kind, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 3, p * v).tolist()
    moe = (rng.random(sum(counts)) < 0.7).tolist()
    built = colocated_program(
        p=p, v=v, m=m, group=None, stage_layers=split(counts), moe=moe, chunks=chunks, recompute=recompute
    )
    verify(built, recompute=recompute if all(moe) else None)
    price = rng.integers(1, 9, (len(Kind), len(Phase), sum(counts) + 1)).astype(float)
    seconds = np.where(is_wait(built), 0.0, price[built.kind, built.phase, built.layer])
    timeline = simulate(built, Pricing.ideal(seconds))
    compute = np.isin(built.kind, (Kind.EMBED, Kind.ATTN, Kind.FFN, Kind.HEAD))
    for x in np.flatnonzero(np.isin(built.kind, (Kind.DISPATCH, Kind.COMBINE)) & ~is_wait(built)):
        beside = compute & (built.worker == built.worker[x])
        beside &= (timeline.start_s < timeline.end_s[x]) & (timeline.end_s > timeline.start_s[x])
        for y in np.flatnonzero(beside):
            one, other = built.op(int(x)), built.op(int(y))
            assert chunks > 1, (one, other)
            assert other == one._replace(kind=Kind.FFN, chunk=other.chunk), (one, other)


def test_transfers_join_the_stages() -> None:
    """p = 2, v = 2: F leaves on SEND, its gradient comes back on SEND_B; chunk 1 starts on worker 0 again."""
    built = program(2, 2, 1, [2, 1, 1, 2])
    moves = {
        (r.worker, r.stream.name, r.op.phase.name, r.op.layer, r.peer) for r in built.rows() if r.op.kind == Kind.P2P
    }
    assert moves == {
        (0, "SEND", "F", 1, 1), (1, "RECV", "F", 1, 0), (1, "SEND", "F", 2, 0), (0, "RECV", "F", 2, 1),
        (0, "SEND", "F", 3, 1), (1, "RECV", "F", 3, 0), (1, "SEND_B", "B", 3, 0), (0, "RECV_B", "B", 3, 1),
        (0, "SEND_B", "B", 2, 1), (1, "RECV_B", "B", 2, 0), (1, "SEND_B", "B", 1, 0), (0, "RECV_B", "B", 1, 1),
    }  # fmt: skip
    assert not (program(1, 3, 2, [1, 1, 1]).kind == Kind.P2P).any()


def test_gradients_are_reduced_as_the_last_backwards_finish() -> None:
    """Worker 0 of p = 2, v = 2 holds layers 0, 1 (chunk 0) and 3 (chunk 1): 3 is done first, then 1, then 0."""
    built = program(2, 2, 4, [2, 1, 1, 2])
    assert names(built, 0, Stream.SYNC) == [
        "GRAD_SYNCB 3.0 mb-1", "GRAD_SYNCB 1.0 mb-1", "GRAD_SYNCB 0.0 mb-1",
        "GRAD_SYNCB -1.0 mb-1", "GRAD_SYNCF -1.0 mb-1",
    ]  # fmt: skip
    middle = program(3, 1, 3, [1, 1, 1])  # holds neither embedding nor head
    assert names(middle, 1, Stream.SYNC) == ["GRAD_SYNCB 1.0 mb-1", "GRAD_SYNCF -1.0 mb-1"]


@pytest.mark.parametrize(
    ("stages", "chunks", "message"),
    [
        ([[0], [1, 2]], 1, r"stage_layers has 2 stages; p\*v = 2\*2 = 4 are needed"),
        ([[0], [1, 2], [], [3]], 1, r"4 layers leave a stage empty"),
        ([[0], [2], [1], [3]], 1, r"layers 0\.\.3 once each, in order"),
        ([[0], [1], [2], [3]], 0, r"chunks = 0"),
    ],
)
def test_errors_name_the_rule(stages: list[list[int]], chunks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        colocated_program(p=2, v=2, m=4, group=None, stage_layers=stages, moe=[True] * 4, chunks=chunks)
