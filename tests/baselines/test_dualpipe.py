"""The planners of DualPipe and DualPipeV: rules, twice the parameters, mirrored gradients, layer split, variants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.dualpipe import DualPipe, DualPipeV, folded_counts
from baselines.megatron import Megatron1F1B
from baselines.registry import get_system, system_options
from disagmoe.allocator import tune
from disagmoe.ops import Kind, Phase
from disagmoe.plan.bounds import lower_bound_s
from disagmoe.plan.memory import holdings
from disagmoe.plan.plan import Layout, Plan
from disagmoe.plan.pricing import LayoutCosts, price
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.specs.params import parameters
from disagmoe.system import NotApplicable, Problem, System, variants_of
from disagmoe.timeline.metrics import worker_metrics
from tests.problems import problem, small_cluster


def small(global_batch: int = 128, **settings: object) -> Problem:
    return problem("deepseek_moe_16b", small_cluster(nodes=4), ep=8, global_batch=global_batch, **settings)  # type: ignore[arg-type]


def test_both_are_registered_systems() -> None:
    assert get_system("dualpipe", pp=4, p2p_exposed=True) == DualPipe(pp=4, p2p_exposed=True)
    assert get_system("dualpipe_v") == DualPipeV()
    assert system_options("dualpipe") == system_options("dualpipe_v") == ("pp", "p2p_exposed", "replay")
    for system in (DualPipe(), DualPipeV()):
        assert isinstance(system, System)


def test_native_rows_are_nccl_first_then_deepep() -> None:
    """In the uniform view every system has the same transport, so there is one row."""
    system = DualPipe(pp=4)
    rows = variants_of(system, "native")
    assert [(v.label, v.native_transport or system.native_transport) for v in rows] == [
        ("", "nccl"),
        ("deepep", "deepep"),
    ]
    assert all(v.system == system for v in rows)
    assert [v.label for v in variants_of(system, "uniform")] == [""]


def test_candidates_keep_the_rules() -> None:
    """Even pp; micro-batches even in number and at least 2 pp. 32 GPUs, 128 sequences."""
    pr = small()
    found = set()
    for candidate in DualPipe().candidates(pr):
        pp, sequences = int(candidate["pp"]), int(candidate["micro_batch"])
        count = 128 // (sequences * (32 // pp))
        assert pp % 2 == 0 and count % 2 == 0 and count >= 2 * pp
        found.add((pp, sequences))
    # pp = 2 has 8 micro-batches of one sequence per rank (or 4 of two), pp = 4 has 16, 8.
    assert found == {(2, 1), (2, 2), (4, 1), (4, 2)}
    assert {int(c["pp"]) for c in DualPipeV().candidates(pr)} == {1, 2, 4}


@pytest.mark.parametrize(
    ("system", "batch", "reason"),
    [
        (
            DualPipe(),
            15,
            r"an even number of micro-batches, at least 2 x pp: pp=2 with 1 x 16 sequences in each has 1",
        ),
        (DualPipe(pp=4), 56, r"pp=4 with 1 x 8 sequences in each has 7 \(global batch 56\)"),
        (DualPipe(pp=6), 128, "DualPipe: pp=6 is no even number that divides 32 GPUs"),
        (DualPipeV(pp=4), 56, r"DualPipeV needs micro-batches, at least 2 x pp: pp=4 .* has 7"),
        (DualPipeV(pp=16), 128, "at most 14 ranks of a multiple of EP 8 GPUs"),
    ],
)
def test_rules_are_reasons(system: DualPipe | DualPipeV, batch: int, reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason) as error:
        list(system.candidates(small(batch)))
    assert "\n" not in str(error.value)


def test_odd_ranks_are_refused_before_planning() -> None:
    with pytest.raises(ValueError, match="dualpipe pp=3: DualPipe needs an even number of pipeline ranks"):
        DualPipe(pp=3)
    with pytest.raises(ValueError, match="dualpipe_v pp=0: must be at least 1"):
        DualPipeV(pp=0)
    with pytest.raises(ValueError, match="p2p_exposed='yes': allowed are true and false"):
        DualPipe(p2p_exposed="yes")  # type: ignore[arg-type]


def test_the_sweep_records_not_applicable() -> None:
    tuned = tune(DualPipe(), small(15), lambda plan: 1.0)
    assert (tuned.status, tuned.plan) == ("not_applicable", None)
    assert "even number of micro-batches" in tuned.reason


def layouts(pr: Problem) -> tuple[Layout, Layout, Layout]:
    candidate = {"ep": 8, "pp": 4, "micro_batch": 1}
    plain = Megatron1F1B().layout(pr, {**candidate, "virtual": 1, "group": 4})
    return plain, DualPipe().layout(pr, candidate), DualPipeV().layout(pr, candidate)


def test_dualpipe_holds_everything_twice_and_the_v_once() -> None:
    pr = small()
    plain, dual, folded = layouts(pr)

    def held(layout: Layout) -> float:
        """Parameters over all ranks that differ: experts lie on all EP ranks, the rest once per pipeline rank."""
        return sum(h.dense + h.expert * layout.ep for h in holdings(layout, pr.model))

    total = parameters(pr.model).total
    assert held(plain) == held(folded) == total
    assert held(dual) == 2 * total
    assert dual.placement.copies == 2
    # 8 GPUs per pipeline rank, EP 8: dense tensors on 8 (16 mirrored) GPUs, an expert on 1 (2).
    assert {(h.dense_ranks, h.expert_ranks) for h in holdings(plain, pr.model)} == {(8, 1)}
    assert {(h.dense_ranks, h.expert_ranks) for h in holdings(dual, pr.model)} == {(16, 2)}
    # The optimizer state of the whole system is the same: it is sharded over both copies.
    for layout in (plain, dual, folded):
        updated = sum(
            h.updated * w.gpus for h, w in zip(holdings(layout, pr.model), layout.placement.workers, strict=True)
        )
        assert updated == pytest.approx(total, rel=1e-12)


def test_mirrored_ranks_hold_the_same() -> None:
    pr = small()
    _, dual, _ = layouts(pr)
    held = holdings(dual, pr.model)
    assert held == held[::-1]
    assert dual.placement.holders(0) == (0, 3)


def test_gradients_are_summed_over_both_copies() -> None:
    """Without data parallelism of experts a plain pipeline reduces none; DualPipe reduces every expert over two."""
    pr = small()
    plain, dual, _ = layouts(pr)
    dense_layer, moe_layer = 0, 1  # of DeepSeek-MoE 16B
    assert [pr.model.is_moe(x) for x in (dense_layer, moe_layer)] == [False, True]
    for layer in (dense_layer, moe_layer):
        seconds = [
            LayoutCosts(layout, pr.costs)
            .worker_op(Kind.GRAD_SYNC, Phase.B, layer, layout.placement.attn[layer])
            .seconds
            for layout in (plain, dual)
        ]
        assert seconds[1] > seconds[0]
    mirror = LayoutCosts(dual, pr.costs)
    for layer in (dense_layer, moe_layer):
        workers = dual.placement.holders(dual.placement.attn[layer])
        assert len({mirror.worker_op(Kind.GRAD_SYNC, Phase.B, layer, w).seconds for w in workers}) == 1


@pytest.mark.parametrize("exposed", [False, True])
def test_every_plan_is_sound(exposed: bool) -> None:
    """verify passes, bounds hold, every GPU's time adds up, and both directions cover the batch once."""
    pr = small()
    for system in (DualPipe(p2p_exposed=exposed), DualPipeV(p2p_exposed=exposed)):
        for candidate in system.candidates(pr):
            layout = system.layout(pr, candidate)
            program = system.program(pr, layout)
            verify(program)
            timeline = simulate(program, price(layout, program, pr.costs))
            assert timeline.step_s >= lower_bound_s(layout, pr.costs) * (1 - 1e-12)
            worker_metrics(timeline)
            batch = layout.batch
            assert batch.microbatches * batch.sequences * batch.data_ranks == pr.workload.global_batch
            heads = (program.kind == Kind.HEAD) & (program.phase == Phase.F)
            assert sorted(program.microbatch[heads]) == list(range(batch.microbatches))


def test_waiting_for_transfers_costs_time() -> None:
    pr = small(transport="deepep", merge="node")
    steps = []
    for exposed in (False, True):
        system = DualPipe(pp=4, p2p_exposed=exposed)
        layout = system.layout(pr, {"ep": 8, "pp": 4, "micro_batch": 1})
        program = system.program(pr, layout)
        steps.append(simulate(program, price(layout, program, pr.costs)).step_s)
        assert layout.details["p2p"] == ("exposed" if exposed else "asynchronous")
    assert steps[0] < steps[1] < 1.2 * steps[0]


def test_the_tuned_plan_fits_and_is_the_fastest_tried() -> None:
    pr = small()
    tuned = tune(
        DualPipe(),
        pr,
        lambda plan: simulate(plan.program, price(plan.layout, plan.program, pr.costs)).step_s,
    )
    assert tuned.status == "ok"
    assert isinstance(tuned.plan, Plan)
    assert tuned.step_s == min(t.step_s for t in tuned.trials if t.step_s is not None)


def test_lower_bound_counts_half_of_the_micro_batches_per_copy() -> None:
    """Compute alone, no exchange: the busiest pair of stages, for half of the micro-batches each."""
    pr = small()
    _, dual, _ = layouts(pr)
    prices = LayoutCosts(dual, pr.costs)
    busy = np.zeros(4)
    for layer, worker in enumerate(dual.placement.attn):
        seconds = sum(prices.op(k, f, layer).seconds for k in (Kind.ATTN, Kind.FFN) for f in (Phase.F, Phase.B))
        busy[[worker, 3 - worker]] += seconds / 2
    ends = sum(prices.op(k, f, -1).seconds for k in (Kind.EMBED, Kind.HEAD) for f in (Phase.F, Phase.B))
    busy[[0, 3]] += ends / 2
    assert lower_bound_s(dual, pr.costs) >= busy.max() * dual.batch.microbatches * (1 - 1e-12)


@given(
    st.integers(1, 6), st.lists(st.floats(0.5, 2.0), min_size=14, max_size=30), st.floats(0.0, 5.0), st.floats(0.0, 1.0)
)
def test_folded_split_covers_all_layers(ranks: int, loads: list[float], head: float, embed: float) -> None:
    counts = folded_counts(loads, 2 * ranks, head_load=head, embed_load=embed)
    assert len(counts) == 2 * ranks
    assert sum(counts) == len(loads)
    assert min(counts) >= 1


def test_folded_split_gives_the_outermost_rank_fewer_layers() -> None:
    """16 layers, 4 stages, head of 2 layers: ranks of 7 and 9 layers, each in halves."""
    assert folded_counts([1.0] * 16, 4) == (4, 4, 4, 4)
    assert folded_counts([1.0] * 16, 4, head_load=2.0) == (4, 5, 4, 3)
    assert folded_counts([1.0] * 28, 2, head_load=5.0) == (14, 14)  # one rank's worth: nothing to balance
