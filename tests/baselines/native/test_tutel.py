"""Tutel's layer and a model made of such layers equal ours: output, losses, gradients, and which tokens are dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baselines.native.tutel.model import TutelOptions
from disagmoe.runtime.data import Synthetic
from disagmoe.runtime.launch import spawn
from disagmoe.runtime.optimizer import Recipe
from disagmoe.runtime.single import SingleTrainer
from tests.baselines.native import needs_tutel
from tests.baselines.native.truth import MARGIN, Case, Truth, clear_choices

needs_tutel()

from tests.baselines.native.tutel_cases import SPEC, layer_step, tutel_step, tutel_trained  # noqa: E402

BOUND = 1e-5
DROPLESS = TutelOptions()
OPTIONS = {
    "dropless": DROPLESS,
    "capacity 1": TutelOptions(capacity_factor=1.0),
    "at most 0.7": TutelOptions(capacity_factor=-0.7),
    "degree 2": TutelOptions(degree=2, capacity_factor=1.0),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_layer_equals_ours_and_drops_the_same(ranks: int, options: TutelOptions) -> None:
    """24 rows for 8 experts, 2 each: a capacity of 1 is 6 rows of one expert from one rank."""
    found = spawn(ranks, layer_step, [options, SPEC])
    for each in found:
        assert each.margin > MARGIN
        assert each.output < BOUND and each.input_gradient < BOUND
        assert max(each.parameters.values()) < BOUND, each.parameters
        assert each.dropped == each.expected_dropped
    assert (sum(each.dropped for each in found) > 0) == (options.capacity_factor != 0.0)


@pytest.mark.parametrize(
    "spec", [replace(SPEC, norm_topk_prob=False, routed_scaling_factor=2.5), replace(SPEC, top_k=3)]
)
def test_other_gates(spec: object) -> None:
    for each in spawn(2, layer_step, [OPTIONS["capacity 1"], spec]):
        assert max(each.output, each.input_gradient, *each.parameters.values()) < BOUND


@pytest.mark.slow
def test_2dh_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks, as Tutel is told."""
    monkeypatch.setenv("LOCAL_SIZE", "2")
    for each in spawn(4, layer_step, [TutelOptions(algorithm="2dh"), SPEC]):
        assert max(each.output, each.input_gradient, *each.parameters.values()) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "deepseek", "after_topk"])
def test_losses_and_gradients_of_a_model(ranks: int, family: str) -> None:
    case = clear_choices(Case(ep=ranks, family=family, layers=2))
    found = spawn(ranks, tutel_step, [case, DROPLESS])
    for each in found:
        assert each.loss == pytest.approx(each.expected, rel=BOUND)
        assert each.gradient < BOUND, each.worst
    assert frozenset(name for each in found for name in each.names) == frozenset(Truth(case).model.values())


@pytest.mark.slow
def test_trained_steps_equal_our_own_trainer() -> None:
    case = clear_choices(Case(ep=2, layers=2))
    recipe = Recipe(lr=1e-3, warmup=2, steps=5, clip=0.5)
    source = Synthetic(case.spec.vocab, case.seq, 0)
    trainer = SingleTrainer(case.spec, recipe, source, batch=case.cut.sequences)
    ours = [trainer.step() for _ in range(5)]
    for theirs in spawn(2, tutel_trained, [case, DROPLESS, recipe, source]):
        assert [loss for loss, _ in theirs] == pytest.approx([step.report.loss for step in ours], rel=BOUND)
        assert [norm for _, norm in theirs] == pytest.approx([step.grad_norm for step in ours], rel=1e-4)
