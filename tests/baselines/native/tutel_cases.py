"""Tutel's layer and model against ours: what runs on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baselines.native.tutel.model import TutelFfn, TutelOptions, _transposed
from baselines.native.tutel.trainer import TutelRunner
from disagmoe.model import Blueprint
from disagmoe.model.block import AttentionPart, ExpertPart
from disagmoe.model.init import standard_normal
from disagmoe.runtime.child import Context
from disagmoe.runtime.data import Source
from disagmoe.runtime.optimizer import Recipe
from disagmoe.specs import ModelSpec
from tests.baselines.native.truth import Case, Found, Truth, compare
from tests.model.shapes import BASE, scramble

ROWS = 24
SPEC = replace(BASE, experts=8, expert_width=6, shared_width=4)


@dataclass(frozen=True)
class LayerFound:
    """Largest relative differences of one rank to our layer, and what both dropped."""

    output: float
    input_gradient: float
    parameters: dict[str, float]
    dropped: int
    expected_dropped: int
    margin: float


def kept(ids: Tensor, bound: int | None, experts: int) -> Tensor:
    """`ids` [t, k] with -1 where Tutel drops: experts fill with all first choices in order, then all second, ..."""
    held = [0] * experts
    result = ids.clone()
    for choice in range(ids.shape[1]):
        for token in range(ids.shape[0]):
            expert = int(ids[token, choice])
            held[expert] += 1
            if bound is not None and held[expert] > bound:
                result[token, choice] = -1
    return result


def layer_step(context: Context, options: TutelOptions, spec: ModelSpec) -> LayerFound:
    """Forward and backward of one layer on rows of every rank's own; collective."""
    blueprint, ranks = Blueprint(spec), context.world_size
    attention, expert = AttentionPart(blueprint, 0), ExpertPart(blueprint, 0)
    scramble(attention)
    scramble(expert)
    expert.ffn_norm = attention.ffn_norm  # type: ignore[assignment]  # one parameter, as in the whole model
    assert attention.router is not None and attention.ffn_norm is not None
    ffn = TutelFfn(blueprint, attention, options, ranks)
    _fill(ffn, expert, context.rank, spec)
    theirs = _rows(context.rank, spec)
    out = ffn(theirs)
    out.backward(_rows(100 + context.rank, spec).detach())
    own = {name: p.grad.clone() for name, p in attention.named_parameters() if p.grad is not None}
    count = (ffn.moe.dispatch_count - (options.bound(ROWS, spec) or ROWS * spec.top_k)).clamp(min=0)
    tutel = ffn.moe.experts
    stacked = {"w1": tutel.W_fc1.grad.clone(), "w3": tutel.W_fc2.grad.clone(), "w2": tutel.W_fc3.grad.clone()}
    attention.zero_grad()

    # Ours: the rows of every rank, one after the other; an expert's gradient is the sum.
    dropped, margins = 0, []
    for rank in range(ranks):
        rows = _rows(rank, spec)
        routing = attention.router(attention.ffn_norm(rows), ROWS)
        ids = kept(routing.ids, options.bound(ROWS, spec), spec.experts)
        y = expert(rows, ids, routing.weights)
        attention.zero_grad()
        y.backward(_rows(100 + rank, spec).detach())
        scores = (attention.ffn_norm(rows) @ attention.router.weight.t()).sort(-1, descending=True).values
        margins.append(float((scores[:, spec.top_k - 1] - scores[:, spec.top_k]).min()))
        if rank == context.rank:
            output, gradient, dropped = _error(out, y), _error(theirs.grad, rows.grad), int((ids < 0).sum())
            parameters = {n: _error(own[n], p.grad) for n, p in attention.named_parameters() if n in own}
    number = spec.experts // ranks
    mine = slice(context.rank * number, (context.rank + 1) * number)
    assert expert.experts is not None and expert.experts.w13.grad is not None and expert.experts.w2.grad is not None
    gate, up = expert.experts.w13.grad[mine].chunk(2, dim=1)
    for name, truth in (("w1", gate), ("w3", up), ("w2", expert.experts.w2.grad[mine])):
        parameters[name] = _error(stacked[name].view(number, truth.shape[2], truth.shape[1]).transpose(1, 2), truth)
    return LayerFound(output, gradient, parameters, int(count.sum()), dropped, min(margins))


def _fill(ffn: TutelFfn, expert: ExpertPart, rank: int, spec: ModelSpec) -> None:
    values, number = expert.values(), ffn.moe.num_local_experts
    with torch.no_grad():
        for place in range(number):
            name = f"layers.0.experts.{rank * number + place}."
            for matrix, parameter in (("w1", "W_fc1"), ("w3", "W_fc2"), ("w2", "W_fc3")):
                out, into = values[name + matrix].shape
                window = _transposed(number, into, out, place)(getattr(ffn.moe.experts, parameter))
                window.copy_(values[name + matrix])
        if ffn.shared is not None and expert.shared is not None:
            ffn.shared.load_state_dict(expert.shared.state_dict())


def _rows(number: int, spec: ModelSpec) -> Tensor:
    return standard_normal(f"rows {number}", (ROWS, spec.hidden), seed=1).requires_grad_()


def _error(found: Tensor | None, truth: Tensor | None) -> float:
    assert found is not None and truth is not None
    return float((found - truth).detach().norm() / truth.detach().norm())


def tutel_step(context: Context, case: Case, options: TutelOptions) -> Found:
    """One step of a whole model with the values of the reference; collective."""
    truth, tokens = Truth(case), case.tokens
    runner = TutelRunner(context, case.spec, options, case.cut)
    runner.load(truth.model.values())
    step = runner.step(lambda wanted: tokens[wanted.start : wanted.stop])
    assert step.dropped == 0
    return compare(truth, step, runner.gradients(), "")


def tutel_trained(
    context: Context, case: Case, options: TutelOptions, recipe: Recipe, source: Source
) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step of a training run; collective."""
    batch, found = case.cut.sequences, []
    runner = TutelRunner(context, case.spec, options, case.cut, recipe)
    for number in range(recipe.steps):
        begin = number * batch
        step = runner.step(lambda wanted, at=begin: source.samples(range(at + wanted.start, at + wanted.stop)))
        assert step.grad_norm is not None
        found.append((step.loss, step.grad_norm))
    return found
