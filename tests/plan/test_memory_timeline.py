"""Integration of bytes over Programs: counts in flight, and a slow reference that keeps a list of buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.cost.memory import LayerBytes, OpBytes
from disagmoe.cost.recompute import NO_RECOMPUTE, Recompute
from disagmoe.ops import Kind, Phase
from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.combined import combined_program, combined_stage_program
from disagmoe.plan.dualpipe import dualpipe_program, dualpipe_stage_program, dualpipev_stage_program
from disagmoe.plan.memory_tables import WorkerBytes
from disagmoe.plan.memory_timeline import compute_order, in_flight, levels
from disagmoe.plan.orders import interleaved, one_f_one_b, stage_program
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.simulator import simulate
from tests.plan.slow_memory import slow_peaks

FULL = Recompute("full", "full")
KEEP = Recompute("full", "full", tokens="keep")


def op(seed: int, scale: int = 1) -> OpBytes:
    """Whole numbers, all different, with kept <= saved."""
    rng = np.random.default_rng(seed)
    saved, kept, inputs, grads, forward, backward = (int(n) * scale for n in rng.integers(1, 50, 6))
    return OpBytes(saved + kept, kept, inputs, grads, forward, backward)


def worker(seed: int) -> WorkerBytes:
    rng = np.random.default_rng(seed + 1000)
    layers = tuple(
        LayerBytes(op(seed + 10 * t), op(seed + 10 * t + 5), *(float(n) for n in rng.integers(1, 40, 2)), stream=3.0)
        for t in range(2)
    )
    return WorkerBytes((layers[0], layers[1]), op(seed + 30), op(seed + 40))


def stages(layers: int, count: int) -> list[range]:
    cuts = [layers * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def test_in_flight_counts_of_1f1b() -> None:
    assert in_flight(stage_program(one_f_one_b(4, 8), 4, 1, 8)) == (4, 3, 2, 1)
    assert in_flight(stage_program(one_f_one_b(4, 2), 4, 1, 2)) == (2, 2, 2, 1)


def test_in_flight_counts_of_interleaving_with_and_without_overlap() -> None:
    # Megatron-Core's warm-up, p = 4, v = 2: 10, 8, 6, 4 forwards before the first backward; one more with overlap.
    assert in_flight(stage_program(interleaved(4, 2, 8), 4, 2, 8)) == (11, 9, 7, 5)
    assert in_flight(combined_stage_program(4, 2, 8)) == (12, 10, 8, 6)


def test_dualpipe_holds_one_set_more_than_stages() -> None:
    assert max(in_flight(dualpipe_stage_program(8, 20))) == 8 + 1
    assert max(in_flight(dualpipev_stage_program(4, 20))) == 2 * 4 + 1


def test_in_flight_counts_of_layers() -> None:
    program = colocated_program(p=2, v=1, m=6, group=None, stage_layers=stages(6, 2), moe=[True] * 6)
    assert in_flight(program) == (2 * 3, 1 * 3)
    chunked = colocated_program(p=2, v=1, m=6, group=None, stage_layers=stages(6, 2), moe=[True] * 6, chunks=4)
    assert in_flight(chunked) == (6, 3)
    ring = af_pipe_program(p=2, layers=4, m=8, group=4, order="megatron")
    assert in_flight(ring) == tuple(_most(ring, w, Kind.ATTN if w < 2 else Kind.FFN) for w in range(4))


def _most(program: Program, worker: int, kind: Kind) -> int:
    """Counted row by row, as the rows stand."""
    held = most = 0
    for row in program.rows():
        if row.worker == worker and row.op.kind == kind:
            held += {Phase.F: 1, Phase.B: -1}.get(row.op.phase, 0)
            most = max(most, held)
    return most


def test_two_compute_streams_run_forwards_as_far_ahead_as_allowed() -> None:
    one = af_pipe_program(p=2, layers=4, m=8, group=4, order="megatron")
    two = af_pipe_program(p=2, layers=4, m=8, group=4, order="megatron", compute_streams=2)
    assert in_flight(two) == two.in_flight
    assert in_flight(one) == two.in_flight
    rows = compute_order(two)
    for w in range(two.n_workers):
        mine = rows[two.worker[rows] == w]
        named = [(two.op(int(i)).kind, two.op(int(i)).layer, two.op(int(i)).microbatch) for i in mine]
        for i, row in enumerate(mine):
            if two.phase[row] == Phase.B and two.kind[row] in (Kind.ATTN, Kind.FFN):
                first = named.index(named[i])
                assert first < i and two.phase[mine[first]] == Phase.F


Builder = Callable[[], tuple[Program, list[bool], Recompute]]


def colocated(chunks: int, recompute: Recompute) -> tuple[Program, list[bool], Recompute]:
    moe = [False, True, True, True, True]
    program = colocated_program(
        p=2,
        v=2,
        m=5,
        group=None,
        stage_layers=stages(5, 4),
        moe=moe,
        chunks=chunks,
        recompute=recompute.repeated(disaggregated=False),
    )
    return program, moe, recompute


def ring(head: str, streams: int, recompute: Recompute) -> tuple[Program, list[bool], Recompute]:
    program = af_pipe_program(
        p=2,
        layers=5,
        m=6,
        group=6,
        order="comm_stage",
        head=head,
        compute_streams=streams,
        recompute=recompute.repeated(disaggregated=True),
    )
    return program, [True, False, True, True, True], recompute


CASES: dict[str, Builder] = {
    "1f1b": lambda: colocated(1, NO_RECOMPUTE),
    "1f1b full": lambda: colocated(1, FULL),
    "1f1b keep": lambda: colocated(1, KEEP),
    "combined": lambda: (
        combined_program(p=2, v=2, m=5, group=None, stage_layers=stages(8, 4), moe=[True] * 8),
        [True] * 8,
        NO_RECOMPUTE,
    ),
    "dualpipe": lambda: (
        dualpipe_program(ranks=2, microbatches=6, stage_layers=stages(4, 2), moe=[True] * 4),
        [True] * 4,
        NO_RECOMPUTE,
    ),
    "ring": lambda: ring("last_f", 1, NO_RECOMPUTE),
    "ring, two streams": lambda: ring("next_a", 2, NO_RECOMPUTE),
    "ring, spread head": lambda: ring("spread", 1, NO_RECOMPUTE),
    "ring full": lambda: ring("last_f", 1, FULL),
    "ring keep": lambda: ring("last_f", 2, KEEP),
}


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), frames=st.booleans())
def test_levels_over_time_equal_a_list_of_buffers(name: str, seed: int, frames: bool) -> None:
    program, moe, recompute = CASES[name]()
    frames = frames and not (program.pair >= 0).any() and not name.startswith("ring")
    rng = np.random.default_rng(seed)
    timeline = simulate(program, Pricing.ideal(_durations(program, rng)))
    workers = [worker(seed + w) for w in range(program.n_workers)]
    over_time = levels(program, workers, moe, recompute, frames=frames, start_s=timeline.start_s, end_s=timeline.end_s)
    expected = slow_peaks(program, workers, moe, timeline.start_s, timeline.end_s, frames=frames)
    assert [_peak(over_time, w) for w in range(program.n_workers)] == pytest.approx(expected)
    for at in (over_time, levels(program, workers, moe, recompute, frames=frames)):
        last = at.first[1:] - 1
        assert np.abs(at.nbytes[:, last]).max() < 1e-9  # everything is given back


def _durations(program: Program, rng: np.random.Generator) -> np.ndarray:
    """Whole numbers, the same at both ends of a transfer."""
    columns = ("kind", "phase", "layer", "microbatch", "chunk", "replica")
    key = np.stack([getattr(program, name) for name in columns], axis=1)
    _, inverse = np.unique(key, axis=0, return_inverse=True)
    return rng.integers(1, 9, int(inverse.max()) + 1)[inverse.reshape(-1)].astype(np.float64)


def _peak(at, w: int) -> float:  # type: ignore[no-untyped-def]
    event = at.peak_event(w)
    return float(at.nbytes[:, event].sum()) if event >= 0 else 0.0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), full=st.booleans())
def test_without_exchange_the_order_says_it_all(seed: int, full: bool) -> None:
    """On one compute stream and with free exchanges, any durations give the peaks that the order gives."""
    program, moe, recompute = colocated(1, FULL if full else NO_RECOMPUTE)
    workers = [
        replace(w, layers=tuple(replace(x, sent=0.0, received=0.0, stream=0.0) for x in w.layers))  # type: ignore[arg-type]
        for w in (worker(seed + i) for i in range(2))
    ]
    timeline = simulate(program, Pricing.ideal(_durations(program, np.random.default_rng(seed))))
    in_order = levels(program, workers, moe, recompute)
    over_time = levels(program, workers, moe, recompute, start_s=timeline.start_s, end_s=timeline.end_s)
    assert [_peak(in_order, w) for w in range(2)] == [_peak(over_time, w) for w in range(2)]


def test_chunks_of_an_exchange_add_up() -> None:
    """Cutting an operation keeps what it keeps; its buffers are never more than those of the whole."""
    whole, moe, recompute = colocated(1, NO_RECOMPUTE)
    cut, _, _ = colocated(4, NO_RECOMPUTE)
    workers = [worker(3), worker(4)]
    a, b = levels(whole, workers, moe, recompute), levels(cut, workers, moe, recompute)
    for w in range(2):
        kept = [at.nbytes[:2, at.first[w] : at.first[w + 1]].sum(axis=0).max() for at in (a, b)]
        assert kept[0] == pytest.approx(kept[1])
    assert np.abs(b.nbytes[:, b.first[1:] - 1]).max() < 1e-9


def test_weight_gradients_keep_their_inputs_until_they_run() -> None:
    """One layer, one micro-batch, I and W apart: the level between them is what W needs."""
    program = combined_program(p=1, v=1, m=1, group=None, stage_layers=[range(1)], moe=[True])
    of = worker(7)
    quiet = replace(
        of,
        layers=tuple(replace(x, sent=0.0, received=0.0, stream=0.0) for x in of.layers),  # type: ignore[arg-type]
        head=OpBytes(0, 0, 0, 0, 0, 0),
        embed=OpBytes(0, 0, 0, 0, 0, 0),
    )
    at = levels(program, [quiet], [True], NO_RECOMPUTE)
    rows = compute_order(program)
    kinds = [(Kind(program.kind[i]), Phase(program.phase[i])) for i in rows]
    after_inputs = 2 * kinds.index((Kind.FFN, Phase.I)) + 1
    ffn = quiet.layers[1].ffn
    assert at.nbytes[1, after_inputs] == ffn.weight_inputs + ffn.weight_grads
    assert at.nbytes[1, 2 * kinds.index((Kind.FFN, Phase.W)) + 1] == 0.0
