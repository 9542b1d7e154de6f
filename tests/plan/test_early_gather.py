"""Parameters gathered before the next step's forwards: where the rows go, what waits for them, what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baselines import get_system
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.plan.combined import combined_program
from disagmoe.plan.dependencies import PlanError, build_graph, data_edges
from disagmoe.plan.early_gather import gather_early
from disagmoe.plan.plan import Plan
from disagmoe.plan.pricing import LayoutCosts, price
from disagmoe.plan.program import Program
from disagmoe.plan.split_backward import split_backward
from disagmoe.plan.text import from_text, row_token, to_text
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from tests.problems import problem, small_cluster

PIPELINE = combined_program(p=2, v=1, m=4, group=2, stage_layers=((0, 1), (2, 3)), moe=[True] * 4)
RING = af_pipe_program(p=2, layers=3, m=4, group=4, order="comm_stage", head="spread")


def gathers(program: Program, worker: int) -> list[int]:
    rows = program.stream_rows(worker, Stream.SYNC)
    return [int(program.layer[r]) for r in rows if program.phase[r] == int(Phase.F)]


def test_every_worker_gathers_what_it_holds_in_the_order_of_use() -> None:
    early = gather_early(PIPELINE)
    verify(early)
    assert [gathers(early, w) for w in (0, 1)] == [[-1, 0, 1], [-1, 2, 3]]
    ring = gather_early(RING)
    verify(ring)
    # A0 has the embedding, both F-groups a part of the head.
    assert [gathers(ring, w) for w in range(4)] == [[-1, 0, 2], [1], [-1, 0, 2], [-1, 1]]
    for program in (early, ring):
        for worker in range(program.n_workers):
            rows = program.stream_rows(worker, Stream.SYNC)
            assert (np.diff(program.phase[rows] == int(Phase.B)) >= 0).all()  # all gathers come first


def test_forwards_wait_for_their_own_layer_and_nothing_else_does() -> None:
    early = gather_early(PIPELINE)
    graph = build_graph(early)
    src, dst = data_edges(graph)
    rows = graph.first_row
    waiting: dict[str, set[str]] = {}
    for a, b in zip(rows[src].tolist(), rows[dst].tolist(), strict=True):
        if early.kind[a] == int(Kind.GRAD_SYNC) and early.phase[a] == int(Phase.F):
            waiting.setdefault(row_token(early, a), set()).add(row_token(early, b))
    assert waiting["G2F-@w1"] == {f"{kind}2F{b}@w1" for kind in "AM" for b in range(4)}
    assert waiting["G-F-@w0"] == {f"E-F{b}@w0" for b in range(4)}
    assert waiting["G-F-@w1"] == {f"H-F{b}@w1" for b in range(4)}


def test_moving_it_twice_or_without_any_changes_nothing() -> None:
    early = gather_early(PIPELINE)
    assert gather_early(early) is early
    bare = from_text("program workers=1 layers=1 microbatches=1 chunks=1\nw0 COMPUTE: A0F0 M0F0 M0B0 A0B0 O-F-\n")
    assert gather_early(bare) is bare


def test_a_layer_left_out_is_named() -> None:
    early = gather_early(PIPELINE)
    lost = (early.kind == int(Kind.GRAD_SYNC)) & (early.phase == int(Phase.F)) & (early.layer == 1)
    with pytest.raises(PlanError, match="missing operation: G1F-@w0"):
        verify(from_text(to_text(early).replace(" G1F-", "", 1)))
    assert lost.sum() == 1


def test_text_keeps_it_and_passes_keep_it() -> None:
    early = gather_early(PIPELINE)
    again = from_text(to_text(early))
    assert again.early_gather and to_text(again) == to_text(early)
    assert split_backward(gather_early(RING)).early_gather


def test_layer_by_layer_costs_what_the_whole_costs_but_for_latency() -> None:
    pr = problem("deepseek_moe", small_cluster(4), global_batch=256, transport="deepep", merge="node", layers=6)
    system = get_system("megatron_1f1b_overlap")
    candidate = {"ep": 16, "pp": 1, "virtual": 1, "micro_batch": 1, "group": 1}
    layout = system.layout(pr, candidate)
    early = replace(layout, options={**layout.options, "gather": "early"})
    whole = LayoutCosts(layout, pr.costs).worker_op(Kind.GRAD_SYNC, Phase.F, -1, 0)
    prices = LayoutCosts(early, pr.costs)
    parts = [prices.worker_op(Kind.GRAD_SYNC, Phase.F, layer, 0) for layer in range(-1, 6)]
    assert sum(part.nic_bytes for part in parts) == pytest.approx(whole.nic_bytes)
    assert sum(part.seconds for part in parts) >= whole.seconds
    program = system.program(pr, layout)
    late_s, early_s = (
        simulate(plan.program, price(plan.layout, plan.program, pr.costs)).step_s
        for plan in (Plan(layout, program), Plan(early, gather_early(program)))
    )
    assert early_s < late_s
    assert lower_bound_s(early, pr.costs) <= early_s
    assert lower_bound_s(early, pr.costs) <= lower_bound_s(layout, pr.costs)
