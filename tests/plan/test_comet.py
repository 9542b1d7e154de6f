"""Programs whose exchange is fused with the experts: order, dependencies, closed forms, faults."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.comet import comet_program
from disagmoe.plan.dependencies import PlanError, build_graph, data_edges, is_wait
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import COLUMNS, Program
from disagmoe.plan.text import row_token
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.timeline.metrics import worker_metrics

Seconds = dict[tuple[Kind, Phase], list[int]]


def one_layer(groups: int, columns: int) -> Program:
    built = comet_program(p=1, v=1, m=1, group=None, stage_layers=[[0]], moe=[True], groups=groups, columns=columns)
    verify(built)
    return built


def step_s(built: Program, seconds: Seconds) -> float:
    """Simulated step with the given seconds per chunk (all chunks in one for chunk -1), 0 for what is not named."""
    duration = np.zeros(len(built))
    for (kind, phase), chunks in seconds.items():
        rows = np.flatnonzero((built.kind == int(kind)) & (built.phase == int(phase)))
        duration[rows] = np.array(chunks)[np.maximum(built.chunk[rows], 0)]
    duration[is_wait(built)] = 0.0
    return simulate(built, Pricing.ideal(duration)).step_s


def dependencies(built: Program) -> set[str]:
    graph = build_graph(built)
    token = [row_token(built, int(row)).split("@")[0] for row in graph.first_row]
    return {f"{token[a]} {token[b]}" for a, b in zip(*data_edges(graph), strict=True)}


def without(built: Program, drop: np.ndarray) -> Program:
    table = np.stack([getattr(built, name) for name in COLUMNS], axis=1)[~drop]
    return Program.from_table(
        table,
        n_workers=built.n_workers,
        n_layers=built.n_layers,
        n_microbatches=built.n_microbatches,
        n_chunks=built.n_chunks,
    )


def test_order_of_one_layer() -> None:
    built = one_layer(2, 3)
    order = {s: [row_token(built, int(i)) for i in built.stream_rows(0, s)] for s in (Stream.COLL, Stream.COMPUTE)}
    tokens = {s: " ".join(t.split("@")[0] for t in row) for s, row in order.items()}
    assert tokens[Stream.COLL] == "D0F0 D0F0.1 C0F0 C0F0.1 C0F0.2 C0B0 C0B0.1 D0B0 D0B0.1 D0B0.2"
    assert tokens[Stream.COMPUTE] == (
        "E-F0 A0F0 M0F0 M0F0.1 M0F0.2 M0F0.3 M0F0.4 H-F0 H-B0 M0I0 M0I0.1 M0I0.2 M0I0.3 M0I0.4 M0W0.- A0B0 E-B0 O-F-"
    )


@pytest.mark.parametrize(("groups", "columns"), [(2, 2), (1, 3), (3, 1)])
def test_halves_depend_on_their_own_exchange_only(groups: int, columns: int) -> None:
    """Also where both halves have equally many chunks, which are then no partners of each other."""

    def chunked(text: str, chunk: int) -> str:
        return f"{text}.{chunk}" if chunk else text

    expected = set()
    for experts, before, after in (("M0F0", "D0F0", "C0F0"), ("M0I0", "C0B0", "D0B0")):
        blocks = [chunked(experts, groups + c) for c in range(columns)]
        expected |= {f"{chunked(before, c)} {chunked(experts, c)}" for c in range(groups)}
        expected |= {f"{chunked(experts, c)} {blocks[0]}" for c in range(groups)}
        expected |= {f"{a} {b}" for a, b in pairwise(blocks)}
        expected |= {f"{block} {chunked(after, c)}" for c, block in enumerate(blocks)}
    built = one_layer(groups, columns)
    of_experts = {edge for edge in dependencies(built) if "M0F" in edge or "M0I" in edge}
    assert {edge for edge in of_experts if "W" not in edge} == expected
    assert {edge for edge in of_experts if "W" in edge} == {
        f"{chunked('M0I0', c)} M0W0.-" for c in range(groups + columns)
    }


def test_without_the_sum_of_chunks_all_wait_for_all() -> None:
    """Three chunks of experts between one and one of exchange are three pieces of one whole, not two halves."""
    built = one_layer(1, 2)
    table = np.stack([getattr(built, name) for name in COLUMNS], axis=1)
    keep = ~((built.kind == int(Kind.COMBINE)) & (built.phase == int(Phase.F)) & (built.chunk == 1))
    other = Program.from_table(table[keep], n_workers=1, n_layers=1, n_microbatches=1, n_chunks=3)
    edges = dependencies(other)
    assert {f"M0F0{c} C0F0" for c in ("", ".1", ".2")} <= edges
    assert {f"D0F0 M0F0{c}" for c in ("", ".1", ".2")} <= edges


chunks = st.lists(st.integers(0, 20), min_size=1, max_size=9)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=9), chunks, chunks)
@settings(max_examples=120, deadline=None)
def test_first_half_ends_when_the_last_source_that_matters_has_arrived(
    groups: list[tuple[int, int]], blocks: list[int], sends: list[int]
) -> None:
    """T0 = max over j of arrive_j + G1 (1 - cum_j), cum_j the share of tiles before group j (arXiv 2502.19811)."""
    arrive = list(accumulate(a for a, _ in groups))
    tiles = [t for _, t in groups]
    before = [sum(tiles[:j]) for j in range(len(tiles))]
    t0 = max(a + sum(tiles) - b for a, b in zip(arrive, before, strict=True))
    # And the second half after it: block i is sent when it is made and block i - 1 is sent.
    blocks, sends = blocks[: len(sends)], sends[: len(blocks)]
    t1 = max(sum(blocks[: i + 1]) + sum(sends[i:]) for i in range(len(blocks)))
    built = one_layer(len(groups), len(blocks))
    arrivals = [a for a, _ in groups]
    forward: Seconds = {
        (Kind.DISPATCH, Phase.F): arrivals,
        (Kind.FFN, Phase.F): tiles + blocks,
        (Kind.COMBINE, Phase.F): sends,
    }
    backward: Seconds = {
        (Kind.COMBINE, Phase.B): arrivals,
        (Kind.FFN, Phase.I): tiles + blocks,
        (Kind.DISPATCH, Phase.B): sends,
    }
    assert step_s(built, forward) == t0 + t1
    assert step_s(built, backward) == t0 + t1


@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 20), st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_equal_column_blocks_and_the_weight_gradients_behind_them(columns: int, g: int, x: int, w: int) -> None:
    """T1 = max(G2 + X / b, X + G2 / b); weight gradients W hide behind what is still leaving."""
    built = one_layer(1, columns)
    sends: Seconds = {(Kind.FFN, Phase.I): [0] + [g] * columns, (Kind.DISPATCH, Phase.B): [x] * columns}
    t1 = max(columns * g + x, g + columns * x)
    assert step_s(built, sends) == t1
    assert step_s(built, {**sends, (Kind.FFN, Phase.W): [w]}) == max(t1, columns * g + w)


def test_exposed_is_at_least_what_the_experts_cannot_cover() -> None:
    """X_D + X_C - (G1 + G2) at least, as for chunks: the window is the same, only the grain is finer."""
    for x in (4, 8, 16):
        built = one_layer(8, 8)
        duration = np.zeros(len(built))
        comm = np.isin(built.kind, (Kind.DISPATCH, Kind.COMBINE)) & (built.phase == int(Phase.F))
        duration[comm], duration[(built.kind == int(Kind.FFN)) & (built.phase == int(Phase.F))] = x, 3
        metrics = worker_metrics(simulate(built, Pricing.ideal(duration)))[0]
        floor = max(0, 16 * x - 16 * 3)
        assert floor <= metrics.exposed_s <= floor + 3 * max(x, 3)


def test_pipelines_verify_and_stay_small() -> None:
    layers = [[2 * s, 2 * s + 1] for s in range(4)]
    built = comet_program(
        p=2, v=2, m=4, group=None, stage_layers=layers, moe=[layer > 0 for layer in range(8)], groups=8, columns=8
    )
    verify(built)
    per_layer_and_microbatch = 2 * (8 + 16 + 8) + 2 + 1  # exchange and experts both ways, attention, weight gradients
    assert len(built) < 8 * 4 * (per_layer_and_microbatch + 4)
    dense = np.isin(built.kind, (Kind.DISPATCH, Kind.COMBINE)) & (built.layer == 0)
    assert not dense.any()


def test_recomputed_halves_overlap_their_own_exchange_too() -> None:
    """Tokens sent again arrive tile by tile as in the forward, and the repeat comes before the backward."""
    again = (Kind.DISPATCH, Kind.FFN, Kind.COMBINE)
    built = comet_program(
        p=1, v=1, m=1, group=None, stage_layers=[[0]], moe=[True], groups=2, columns=2, recompute=again
    )
    verify(built, recompute=again)
    edges = {e for e in dependencies(built) if "M0R" in e and "F0" not in e and "I0" not in e}
    assert edges == {
        *("D0R0 M0R0", "D0R0.1 M0R0.1", "M0R0 M0R0.2", "M0R0.1 M0R0.2"),
        *("M0R0.2 M0R0.3", "M0R0.2 C0R0", "M0R0.3 C0R0.1"),
        "M0R0.3 C0B0",  # the backward's exchange waits for the compute before it
    }
    seconds: Seconds = {
        (Kind.DISPATCH, Phase.R): [0, 5],
        (Kind.FFN, Phase.R): [3, 1, 2, 2],
        (Kind.COMBINE, Phase.R): [7, 1],
    }
    assert step_s(built, seconds) == 5 + 1 + 2 + 7 + 1


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_missing_tile_is_named(everywhere: bool) -> None:
    built = comet_program(p=1, v=1, m=2, group=None, stage_layers=[[0]], moe=[True], groups=3, columns=2)
    lost = (built.kind == int(Kind.DISPATCH)) & (built.phase == int(Phase.F)) & (built.chunk == 2)
    if not everywhere:
        lost &= built.microbatch == 1
    with pytest.raises(PlanError, match=r"missing operation: (D0F1.2|D0F0.2|C0F0.2)"):
        verify(without(built, lost))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="0 arrival groups and 8 column blocks: at least one each is needed"):
        comet_program(p=1, v=1, m=1, group=None, stage_layers=[[0]], moe=[True], groups=0, columns=8)
