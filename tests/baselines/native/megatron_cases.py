"""Steps of Megatron-Core against the single-process model: what runs on every rank."""

from __future__ import annotations

from baselines.native.megatron.schedule import MegatronRunner
from baselines.native.megatron.shape import Shape
from disagmoe.runtime.child import Context
from disagmoe.runtime.data import Source
from disagmoe.runtime.optimizer import Recipe
from tests.baselines.native.truth import Case, Found, Truth, compare


def shape_of(case: Case) -> Shape:
    return Shape(case.pp, case.ep, case.replicas, case.stages, case.group, case.overlap)


def native_step(context: Context, case: Case) -> Found:
    """One step of Megatron-Core with the values of the reference; collective."""
    truth, tokens = Truth(case), case.tokens
    with MegatronRunner(context, case.spec, shape_of(case), case.cut) as runner:
        runner.load(truth.model.values())
        step = runner.step(lambda wanted: tokens[wanted.start : wanted.stop])
        found = runner.gradients()
    stage = context.rank // case.replicas
    order = " ".join(f"{a.chunk * case.pp + stage}{a.phase.name}{a.microbatch}" for a in step.actions)
    return compare(truth, step, found, f"w{stage}: {order}")


def trained(
    context: Context, case: Case, recipe: Recipe, source: Source, precision: str = "fp32"
) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step of a training run; collective."""
    batch, found = case.cut.sequences, []
    with MegatronRunner(context, case.spec, shape_of(case), case.cut, recipe, precision=precision) as runner:
        for number in range(recipe.steps):
            begin = number * batch
            step = runner.step(lambda wanted, at=begin: source.samples(range(at + wanted.start, at + wanted.stop)))
            assert step.grad_norm is not None
            found.append((step.loss, step.grad_norm))
    return found
