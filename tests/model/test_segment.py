"""Backward in two halves: equal to one to the bit, against numerical gradients, keeping little."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from disagmoe.model import AttentionPart, EmbeddingPart, ExpertPart, HeadPart, Part, Saved
from disagmoe.model.deferred import Tape, linear
from disagmoe.model.segment import run_segment
from tests.model.shapes import FAMILIES, blueprint, random, scramble


def parts_of(family: str) -> list[tuple[Part, str]]:
    plan = blueprint(FAMILIES[family])
    parts: list[tuple[Part, str]] = [
        (EmbeddingPart(plan), "embedding"),
        (AttentionPart(plan, 1), "attention"),
        (ExpertPart(plan, 1, [0, 2, 3]), "experts"),
        (HeadPart(plan, chunk_tokens=3), "head"),
    ]
    for part, _ in parts:
        scramble(part)
    return parts


def start(part: Part, x: Tensor, weights: Tensor) -> tuple[Saved, list[Tensor | float]]:
    """Forward, and some gradients for its outputs."""
    if isinstance(part, EmbeddingPart):
        out, saved = part.start(torch.tensor([3, 1, 3, 0, 2, 3, 1, 1]))
        return saved, [out + 1.0]
    if isinstance(part, AttentionPart):
        output, saved = part.start(x, 4)
        assert output.routing is not None
        return saved, [output.x, output.routing.weights, 0.5, 0.1]
    if isinstance(part, ExpertPart):
        k = weights.shape[1]
        out, saved = part.start(x, torch.arange(8 * k).view(8, k) % 6, weights, torch.tensor([0, 5, 6]))
        return saved, [out]
    assert isinstance(part, HeadPart)
    loss, saved = part.start(x, torch.arange(8))
    return saved, [loss * 0 + 0.125]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_halves_equal_the_whole_to_the_bit(family: str) -> None:
    spec = FAMILIES[family]
    x, weights = random(8, spec.hidden), random(8, 2, seed=1)
    for part, kind in parts_of(family):
        saved, gradients = start(part, x, weights)
        whole = saved.backward(*gradients)
        expected = {name: gradient.clone() for name, gradient in part.gradients().items()}
        part.zero_grad()
        saved, gradients = start(part, x, weights)
        half = saved.backward_input(*gradients)
        early = set(part.gradients())
        assert all("norm" in name or "sinks" in name for name in early), (kind, early)
        saved.backward_weight()
        assert len(half) == len(whole)
        assert all(torch.equal(a, b) for a, b in zip(half, whole, strict=True))
        found = part.gradients()
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            # The head sums its chunks in the same order either way.
            assert torch.equal(found[name], gradient), (kind, name)


def test_gradients_of_several_micro_batches_add_up_in_any_order_of_weight_halves() -> None:
    part, _ = parts_of("qwen3")[1]
    handles = []
    for seed in (1, 2):
        saved, gradients = start(part, random(8, 12, seed=seed), random(8, 2))
        saved.backward_input(*gradients)
        handles.append(saved)
    for saved in reversed(handles):
        saved.backward_weight()
    found = {name: gradient.clone() for name, gradient in part.gradients().items()}
    part.zero_grad()
    for seed in (1, 2):
        saved, gradients = start(part, random(8, 12, seed=seed), random(8, 2))
        saved.backward(*gradients)
    for name, gradient in part.gradients().items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)


def run_part(part: Part, weights: Tensor, x: Tensor, parameters: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
    """Outputs of a part with these parameters, and its handle."""
    for own, given in zip(part.parameters(), parameters, strict=True):
        own.data.copy_(given)
    if isinstance(part, AttentionPart):
        output, saved = part.start(x, 4)
        assert output.routing is not None
        return [output.x, output.routing.weights, output.routing.balance, output.routing.z], saved
    if isinstance(part, ExpertPart):
        out, saved = part.start(x, torch.arange(16).view(8, 2) % 6, weights, torch.tensor([0, 5]))
        return [out], saved
    assert isinstance(part, HeadPart)
    out, saved = part.start(x, torch.arange(8))
    return [out], saved


class Split(torch.autograd.Function):
    """A part as one differentiable function of its inputs and parameters, backward by its two halves."""

    @staticmethod
    def forward(ctx: Any, part: Part, weights: Tensor, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(weights, x, *parameters)
        outs, _ = run_part(part, weights, x, parameters)
        return torch.cat([out.flatten() for out in outs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, x, *parameters = ctx.saved_tensors
        outs, saved = run_part(ctx.part, weights, x, parameters)
        pieces = grad.split([out.numel() for out in outs])
        ctx.part.zero_grad()
        found = saved.backward_input(*(g.view(out.shape) for g, out in zip(pieces, outs, strict=True)))
        saved.backward_weight()
        of_weights = found[1] if len(found) == 2 else None
        return None, of_weights, found[0], *(parameter.grad.clone() for parameter in ctx.part.parameters())


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("index", [1, 2, 3], ids=["attention", "experts", "head"])
def test_two_halves_against_numerical_gradients(family: str, index: int) -> None:
    part, kind = parts_of(family)[index]
    x, weights = random(8, 12).requires_grad_(), random(8, 2, seed=1).requires_grad_(kind == "experts")
    parameters = [nn.Parameter(parameter.detach().clone()) for parameter in part.parameters()]

    def function(*inputs: Tensor) -> Tensor:
        result: Tensor = Split.apply(part, *inputs)
        return result

    assert torch.autograd.gradcheck(function, (weights, x, *parameters), fast_mode=True, atol=1e-6)


def test_the_input_half_releases_what_the_weight_half_does_not_need() -> None:
    weight = nn.Parameter(random(3, 3))
    kept: list[weakref.ref[Tensor]] = []

    def forward(tape: Tape, x: Tensor) -> tuple[Tensor, ...]:
        y = linear(x, weight, tape=tape)
        squares = y * y  # needs y in backward, but no weight gradient does
        kept.append(weakref.ref(squares))
        return (torch.exp(squares),)

    (out,), saved = run_segment(forward, random(4, 3))
    saved.backward_input(out)
    del out
    gc.collect()
    assert kept[0]() is None
    assert weight.grad is None
    saved.backward_weight()
    assert weight.grad is not None


def test_misuse_is_told() -> None:
    part, _ = parts_of("qwen3")[3]
    assert isinstance(part, HeadPart)
    loss, saved = part.start(random(8, 12), torch.arange(8))
    with pytest.raises(RuntimeError, match="after its input half"):
        saved.backward_weight()
    with pytest.raises(ValueError, match="2 gradients for 1 outputs"):
        part.start(random(8, 12), torch.arange(8))[1].backward(1.0, 1.0)
    with pytest.raises(ValueError, match="gradient of shape"):
        part.start(random(8, 12), torch.arange(8))[1].backward(torch.ones(2))
    saved.backward(loss)
    with pytest.raises(RuntimeError, match="already differentiated"):
        saved.backward_input(loss)


def test_outputs_and_inputs_carry_no_graph() -> None:
    part, _ = parts_of("qwen3")[1]
    assert isinstance(part, AttentionPart)
    x = random(8, 12).requires_grad_()
    output, saved = part.start(x * 2, 4)
    assert not output.x.requires_grad
    assert output.routing is not None
    assert not output.routing.weights.requires_grad
    saved.backward(output.x, None, None, None)
    assert x.grad is None


def test_recomputation_repeats_the_choice() -> None:
    """A second forward with the stored experts gives the same gradients, whatever the scores would choose now."""
    part, _ = parts_of("deepseek_v3")[1]
    assert isinstance(part, AttentionPart)
    x = random(8, 12)
    with torch.no_grad():
        first = part.forward(x, 4).routing
    assert first is not None
    again, saved = part.start(x, 4, chosen=first.ids)
    assert again.routing is not None
    assert torch.equal(again.routing.weights, first.weights)
    (plain,) = part.start(x, 4)[1].backward(again.x, again.routing.weights, 1.0, 1.0)
    (recomputed,) = saved.backward(again.x, again.routing.weights, 1.0, 1.0)
    assert torch.equal(plain, recomputed)
    part.values()["layers.1.router.correction_bias"].copy_(torch.arange(8.0))
    moved = part.forward(x, 4, chosen=first.ids).routing
    assert moved is not None
    assert torch.equal(moved.ids, first.ids)
    assert part.forward(x, 4).routing.ids.tolist() != first.ids.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("index", range(4), ids=["embedding", "attention", "experts", "head"])
def test_autocast_multiplies_in_bf16_and_keeps_fp32_gradients(index: int) -> None:
    spec = FAMILIES["gpt_oss"]
    plan = blueprint(spec, torch.float32)
    part: Part = [EmbeddingPart(plan), AttentionPart(plan, 0), ExpertPart(plan, 0, [0, 2, 3]), HeadPart(plan)][index]
    scramble(part)
    x, weights = random(8, 12, dtype=torch.float32), random(8, 2, seed=1, dtype=torch.float32)
    saved, gradients = start(part, x, weights)
    exact = saved.backward(*gradients)
    expected = {name: gradient.clone() for name, gradient in part.gradients().items()}
    for split in (False, True):
        part.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            saved, _ = start(part, x, weights)
        if split:
            found = saved.backward_input(*gradients)
            saved.backward_weight()
        else:
            found = saved.backward(*gradients)
        assert all(gradient.dtype == torch.float32 for gradient in (*found, *part.gradients().values()))
        for near, far in zip(found, exact, strict=True):
            assert (near - far).norm() <= 0.05 * far.norm()
        for name, gradient in part.gradients().items():
            assert (gradient - expected[name]).norm() <= 0.05 * expected[name].norm() + 1e-6, name
