"""The cut of a full-size plan: its shape, and prices that are those of the full-size plan."""

from __future__ import annotations

import numpy as np
import pytest

from baselines.registry import get_system
from bench.cut import CutPlan, make_cut
from bench.cut_sizes import LAYERS, MICROBATCHES
from disagmoe.cost.calibration import load_calibration
from disagmoe.cost.model import CostModel
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.dependencies import is_wait
from disagmoe.plan.plan import Layout
from disagmoe.plan.pricing import LayoutCosts
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.specs import Workload, load_cluster, load_model
from disagmoe.system import Candidate, NotApplicable, Problem, System

COLOCATED = {"ep": 16, "pp": 4, "virtual": 3, "micro_batch": 2, "group": 4}
CANDIDATES: dict[str, Candidate] = {
    "megatron_1f1b": COLOCATED,
    "megatron_1f1b_overlap": COLOCATED,
    "tutel": {**COLOCATED, "degree": 4, "algorithm": "linear"},
    "comet": {**COLOCATED, "tiles": "all"},
    "dualpipe": {"ep": 16, "pp": 4, "micro_batch": 2},
    "dualpipe_v": {"ep": 16, "pp": 4, "micro_batch": 2},
    "disagmoe": {"p": 2, "dp": 2, "m": 12, "n": 16, "micro_batch": 2, "order": "comm_stage", "group": 8}
    | {"nics": "halves", "stage_nodes": 0, "compute_streams": 2},
}
RING: Candidate = {**CANDIDATES["disagmoe"], "compute_streams": 1, "form": "ring", "head": "last_f", "put_off": -1} | {
    "map": "paper",
    "p_f": 0,
}
"""The same in the words of `disagmoe_plus`, every switch off."""
CANDIDATES["disagmoe_plus"] = {**RING, "put_off": 1}


def problem(model: str = "deepseek_moe", seq: int = 8192, layers: int | None = None) -> Problem:
    spec, cluster = load_model(model), load_cluster("h800_128")
    spec = spec if layers is None else spec.with_layers(layers)
    workload = Workload(seq=seq, global_batch=1024)
    return Problem(
        spec, cluster, workload, CostModel(spec, cluster, load_calibration("h800"), workload), "nccl", "none", 16
    )


def made(name: str, processes: int = 4, at: Problem | None = None) -> tuple[System, Problem, Layout, CutPlan]:
    there, system = at or problem(), get_system(name)
    layout = system.layout(there, CANDIDATES[name])
    return system, there, layout, make_cut(system, there, layout, CANDIDATES[name], processes)


@pytest.mark.parametrize("processes", [4, 8])
@pytest.mark.parametrize("name", CANDIDATES)
def test_every_system_has_a_cut_that_runs(name: str, processes: int) -> None:
    _, _, _, cut = made(name, processes)
    placement, program = cut.plan.layout.placement, cut.plan.program
    verify(cut.plan)
    assert placement.gpus_used == processes
    assert (program.n_layers, program.n_microbatches) == (LAYERS, MICROBATCHES)
    gpus = [worker.gpus for worker in placement.workers]
    assert gpus == ([2] * (processes // 2) if name.startswith("disagmoe") else [processes // 2] * 2)
    assert cut.plan.layout.ep == (2 if name.startswith("disagmoe") else processes // 2)
    assert simulate(program, cut.pricing).step_s > 0.0


@pytest.mark.parametrize("name", ["megatron_1f1b", "tutel", "dualpipe", "disagmoe", "disagmoe_plus"])
def test_operations_last_as_long_as_at_full_size(name: str) -> None:
    _, there, layout, cut = made(name)
    prices, program = LayoutCosts(layout, there.costs), cut.plan.program
    compared = 0
    for row in np.flatnonzero(~is_wait(program)).tolist():
        op = program.op(row)
        if op.kind is Kind.OPTIM or (op.kind is Kind.GRAD_SYNC and op.layer < 0):
            continue
        layer = there.model.layers - 1 if op.kind is Kind.COMBINE and op.layer == LAYERS - 1 else op.layer
        if op.kind is Kind.GRAD_SYNC:
            experts = cut.plan.layout.placement.workers[program.worker[row]].pool == "F"
            owner = (layout.placement.ffn if experts else layout.placement.attn)[op.layer]
            expected = prices.worker_op(op.kind, op.phase, op.layer, owner)
            assert expected.seconds > 0.0
        else:
            expected = prices.op(op.kind, op.phase, layer)
        assert cut.pricing.duration_s[row] == pytest.approx(expected.seconds, rel=1e-12)
        assert cut.pricing.link[row] == expected.link
        compared += 1
    assert compared > 16 * MICROBATCHES


def test_tiles_of_fewer_sources_add_up_to_those_of_the_whole_group() -> None:
    _, there, layout, cut = made("comet")
    assert layout.tiles is not None
    assert cut.plan.layout.tiles is not None
    assert (layout.tiles.groups, cut.plan.layout.tiles.groups) == (8, 2)  # itself, 3 near, 4 far; itself and one other
    prices, program = LayoutCosts(layout, there.costs), cut.plan.program
    for kind, phase, chunks in (
        *((Kind.DISPATCH, Phase.F, 8), (Kind.COMBINE, Phase.F, layout.tiles.columns)),
        *((Kind.FFN, Phase.F, 8 + layout.tiles.columns), (Kind.DISPATCH, Phase.B, layout.tiles.columns)),
    ):
        phases = [Phase.B, Phase.I] if phase is Phase.B else [phase]
        rows = (program.kind == int(kind)) & np.isin(program.phase, [int(p) for p in phases])
        rows &= (program.layer == 3) & (program.microbatch == 5)
        expected = sum(prices.op(kind, Phase(int(program.phase[rows][0])), 3, chunk).seconds for chunk in range(chunks))
        assert cut.pricing.duration_s[rows].sum() == pytest.approx(expected)


def test_a_cut_stands_for_gpus_and_sequences_of_the_full_size_plan() -> None:
    _, _, _, colocated = made("megatron_1f1b")
    assert colocated.gpus == 2 * 32  # 2 of 4 stages
    assert colocated.sequences == 8 * 2 * 32
    _, _, _, ring = made("disagmoe")
    assert ring.gpus == 2 * (12 + 16)  # one stage of two replicas
    assert ring.sequences == 8 * 2 * 2 * 12
    assert [worker.gpus for worker in ring.stands_for.workers] == [12, 16]


def test_the_choices_of_the_plan_are_kept() -> None:
    _, _, _, tutel = made("tutel")
    assert tutel.plan.layout.chunks == 4
    _, _, _, ring = made("disagmoe", 8)
    assert ring.plan.layout.options["order"] == "comm_stage"
    assert ring.plan.layout.options["group"] == 8
    assert Stream.COMPUTE_B in set(ring.plan.program.stream.tolist())


def test_the_step_end_is_that_of_the_layers_in_the_cut() -> None:
    _, there, layout, cut = made("dualpipe_v")
    prices, program = LayoutCosts(layout, there.costs), cut.plan.program
    row = int(np.flatnonzero((program.kind == int(Kind.OPTIM)) & (program.worker == 0))[0])
    held = sum(owner == 0 for owner in cut.plan.layout.placement.attn) / sum(
        owner == 0 for owner in layout.placement.attn
    )
    whole = prices.worker_op(Kind.OPTIM, Phase.F, -1, 0).seconds
    assert cut.pricing.duration_s[row] == pytest.approx(whole * held)


def test_parameters_gathered_early_cost_what_their_layer_costs() -> None:
    there, system = problem(), get_system("disagmoe_plus")
    candidate = {**RING, "gather": "early"}
    layout = system.layout(there, candidate)
    cut = make_cut(system, there, layout, candidate, 8)
    prices, program = LayoutCosts(layout, there.costs), cut.plan.program
    gathers = np.flatnonzero((program.kind == int(Kind.GRAD_SYNC)) & (program.phase == int(Phase.F)))
    layers = [(int(program.worker[row]), int(program.layer[row])) for row in gathers]
    # Two groups of either kind hold every other layer; the first A-group embeds, the last layer's F-group has the head.
    ends = [(0, -1), (3, -1)]
    assert sorted(layers) == sorted([*ends, *((w, x) for x in range(8) for w in (x % 2, 2 + x % 2))])
    for row, (worker, layer) in zip(gathers.tolist(), layers, strict=True):
        expected = prices.worker_op(Kind.GRAD_SYNC, Phase.F, layer, worker).seconds
        assert cut.pricing.duration_s[row] == pytest.approx(expected, rel=1e-12)
        assert expected > 0.0


def test_dense_layers_stay_dense_and_a_shallow_model_stays_whole() -> None:
    _, there, _, cut = made("megatron_1f1b", at=problem("deepseek_v3"))
    assert [cut.model.is_moe(layer) for layer in range(8)] == [there.model.is_moe(layer) for layer in range(8)]
    assert not cut.model.is_moe(0)
    shallow = problem(layers=6)
    system = get_system("megatron_1f1b")
    candidate = {**COLOCATED, "pp": 2, "group": 2}
    found = make_cut(system, shallow, system.layout(shallow, candidate), candidate, 4)
    assert found.plan.program.n_layers == 6


def test_what_no_planner_can_cut_is_refused_with_the_reason() -> None:
    there, system = problem(layers=2), get_system("dualpipe_v")
    layout = get_system("megatron_1f1b").layout(there, {**COLOCATED, "pp": 2, "virtual": 1, "group": 2})
    with pytest.raises(NotApplicable, match=r"no cut of this plan"):
        make_cut(system, there, layout, {"ep": 16, "pp": 2, "micro_batch": 2}, 4)
    with pytest.raises(NotApplicable, match=r"names no pp"):
        make_cut(system, there, layout, {"stages": 2}, 4)
