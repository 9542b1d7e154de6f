"""Megatron-Core's losses, gradients and order equal ours.

Weights and batch are the same; parameters are scrambled so that no term is zero. fp32: the bound is the promised
1e-5 relative, what is found is below 1e-6.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.combined import combined_program
from disagmoe.plan.text import stage_text
from disagmoe.runtime.data import Synthetic
from disagmoe.runtime.launch import spawn
from disagmoe.runtime.optimizer import Recipe
from disagmoe.runtime.single import SingleTrainer
from tests.baselines.native import needs_megatron
from tests.baselines.native.truth import SPECS, Case, Found, Truth, clear_choices

needs_megatron()

from tests.baselines.native.megatron_cases import native_step, trained  # noqa: E402

BOUND = 1e-5
SHAPES = [(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 1, 1)]
OVERLAP = [Case(ep=2, overlap=True), Case(pp=2, virtual=2, ep=2, overlap=True)]
UNEVEN = [
    Case(pp=2, virtual=2, layers=6, family="deepseek", microbatches=6),
    Case(pp=2, layers=3, microbatches=1),
    Case(pp=2, virtual=2, layers=5, ep=1, dp=2, microbatches=5, family="sigmoid", group=3),
    Case(pp=3, virtual=2, layers=7, microbatches=7, group=4),
    Case(ep=2, dp=4, layers=2, family="deepseek"),
]


def run(case: Case) -> list[Found]:
    """Every rank's findings, after the checks that hold for all cases."""
    case = clear_choices(case)
    found = spawn(case.ranks, native_step, [case], timeout_s=240.0, group_timeout_s=60.0)
    for rank, each in enumerate(found):
        assert each.loss == pytest.approx(each.expected, rel=BOUND), f"rank {rank}"
        assert each.gradient < BOUND, f"rank {rank}: gradient of {each.worst} differs by {each.gradient}"
    everything = frozenset(name for each in found for name in each.names)
    assert everything == frozenset(Truth(case).model.values())
    return found


def planned(case: Case) -> list[str]:
    """The stage projection of our own Program, a line per pipeline rank."""
    make = combined_program if case.overlap else colocated_program
    moe = [case.spec.is_moe(layer) for layer in range(case.layers)]
    program = make(p=case.pp, v=case.virtual, m=case.microbatches, group=case.group, stage_layers=case.stages, moe=moe)
    stages = [s for s, layers in enumerate(case.stages) for _ in layers]
    return stage_text(program, stages).splitlines()


def unpaired(line: str) -> str:
    """Pairs written forward first, and the two halves of a lone backward as one."""
    line = re.sub(r"\((\w+);(\w+)\)OVERLAP_F_B", r"\1 \2", line)
    return re.sub(r"(\d+)I(\d+) \1W\2", r"\1B\2", line)


@pytest.mark.parametrize("sizes", SHAPES, ids=lambda s: f"pp{s[0]}-vpp{s[1]}-ep{s[2]}")
def test_losses_gradients_and_order(sizes: tuple[int, int, int]) -> None:
    pp, virtual, ep = sizes
    case = Case(pp, virtual, ep)
    lines = planned(case)
    for rank, found in enumerate(run(case)):
        assert found.order == lines[rank // ep]


@pytest.mark.parametrize("case", OVERLAP, ids=["pp1", "pp2-vpp2"])
def test_combined_1f1b_runs_as_planned_and_gives_the_same(case: Case) -> None:
    """Every rank warms up by one forward more than without overlap."""
    lines = [unpaired(line) for line in planned(case)]
    for rank, found in enumerate(run(case)):
        assert found.order == lines[rank // case.ep]


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in SPECS if family != "qwen3"])
def test_every_covered_family(family: str) -> None:
    run(Case(ep=2, family=family))


@pytest.mark.slow
@pytest.mark.parametrize("case", UNEVEN, ids=lambda c: f"pp{c.pp}-vpp{c.virtual}-ep{c.ep}-l{c.layers}")
def test_uneven_stages_trailing_groups_and_expert_replicas(case: Case) -> None:
    lines = planned(case)
    for rank, found in enumerate(run(case)):
        assert found.order == lines[rank // case.replicas]


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(pp=2, virtual=2, layers=4), Case(ep=2, dp=4, layers=2, family="deepseek")])
def test_trained_steps_equal_our_own_trainer(case: Case) -> None:
    """Adam, weight decay on matrices, clipping and the schedule of learning rates; state sharded over replicas."""
    case = clear_choices(case)
    recipe = Recipe(lr=1e-3, warmup=2, steps=6, clip=0.5)
    source = Synthetic(case.spec.vocab, case.seq, 0)
    trainer = SingleTrainer(case.spec, recipe, source, batch=case.cut.sequences)
    ours = [trainer.step() for _ in range(6)]
    for theirs in spawn(case.ranks, trained, [case, recipe, source], timeout_s=240.0, group_timeout_s=60.0):
        assert [loss for loss, _ in theirs] == pytest.approx([step.report.loss for step in ours], rel=BOUND)
        assert [norm for _, norm in theirs] == pytest.approx([step.grad_norm for step in ours], rel=1e-4)
        assert ours[-1].report.loss < ours[0].report.loss


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(ep=2), Case(pp=2, virtual=2, ep=2, overlap=True)])
def test_bf16_trains_like_fp32(case: Case) -> None:
    """bf16 has 8 bits: losses within 1 %; gradients and the optimizer's copies stay fp32."""
    recipe = Recipe(lr=1e-3, warmup=2, steps=6, clip=0.5)
    source = Synthetic(case.spec.vocab, case.seq, 0)
    runs = {
        precision: spawn(case.ranks, trained, [case, recipe, source, precision], timeout_s=240.0, group_timeout_s=60.0)
        for precision in ("fp32", "bf16")
    }
    losses = {precision: [loss for loss, _ in ranks[0]] for precision, ranks in runs.items()}
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["bf16"] != losses["fp32"]


@pytest.mark.slow
def test_outputs_are_not_freed_under_an_asynchronous_send() -> None:
    """With `deallocate_pipeline_outputs` six runs over gloo gave six different, wrong losses."""
    case = replace(Case(2, 2, 2), each=8, seq=32)
    assert len({tuple(each.loss for each in spawn(4, native_step, [case], timeout_s=240.0)) for _ in range(6)}) == 1
