"""Grouped experts: both multiplies, idle experts, biases, activations; against numerical gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from disagmoe.model import Conventions
from disagmoe.model.deferred import Tape
from disagmoe.model.experts import activate
from disagmoe.model.grouped import (
    grouped_linear,
    kernel_takes,
    multiply,
    multiply_one_by_one,
    outer,
    outer_one_by_one,
)
from tests.model.shapes import random

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=30)
@given(counts=COUNTS)
def test_the_kernel_equals_one_multiply_per_expert(dtype: torch.dtype, counts: list[int]) -> None:
    rows, experts = sum(counts), len(counts)
    x, grad = random(rows, 16).to(dtype), random(rows, 24, seed=1).to(dtype)
    weight = random(experts, 24, 16, seed=2).to(dtype)
    assert kernel_takes(x, 16, 24) == (rows > 0)
    tolerance = {"rtol": 1e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for matrices, left in ((weight.transpose(1, 2), x), (weight, grad)):
        torch.testing.assert_close(
            multiply(left, matrices, counts), multiply_one_by_one(left, matrices, counts), **tolerance
        )
    found = outer(grad, x, counts)
    torch.testing.assert_close(found, outer_one_by_one(grad, x, counts), **tolerance)
    assert all(not found[e].any() for e, count in enumerate(counts) if count == 0)


@given(counts=COUNTS)
def test_rows_meet_their_own_expert(counts: list[int]) -> None:
    x, weight, bias = random(sum(counts), 3), random(len(counts), 2, 3, seed=1), random(len(counts), 2, seed=2)
    found = grouped_linear(x, weight, bias, counts)
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    expected = [weight[e] @ row + bias[e] for e, row in zip(owners, x, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected) if expected else x.new_zeros(0, 2))


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 1], [0, 0, 0]])
def test_gradients_against_numerical_ones(counts: list[int]) -> None:
    inputs = (random(sum(counts), 3), random(3, 2, 3, seed=1), random(3, 2, seed=2))
    leaves = tuple(x.requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(lambda x, w, b: grouped_linear(x, w, b, counts), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("deferred", [False, True])
def test_idle_experts_have_a_gradient_of_exactly_zero(dtype: torch.dtype, deferred: bool) -> None:
    weight = random(4, 8, 16).to(dtype).requires_grad_()
    bias = random(4, 8).to(dtype).requires_grad_()
    for counts in ([3, 0, 0, 0], [0, 0, 0, 0]):
        weight.grad = bias.grad = None
        tape = Tape() if deferred else None
        x = random(sum(counts), 16).to(dtype).requires_grad_()
        out = grouped_linear(x, weight, bias, counts, tape=tape)
        if tape is not None:
            tape.deferring = True
        out.sum().backward()  # a broadcast gradient: not contiguous
        if tape is not None:
            tape.run()
        for gradient in (weight.grad, bias.grad):
            assert gradient is not None
            assert gradient.isfinite().all()
            assert not gradient[1:].any()
        assert bool(weight.grad[0].any()) == bool(counts[0])


def test_counts_must_fit() -> None:
    weight = random(2, 2, 3)
    for counts in ([2, 2], [3], [1, 1, 1]):
        with pytest.raises(ValueError, match="do not fit 3 rows of 2 experts"):
            grouped_linear(random(3, 3), weight, None, counts)


def test_activations() -> None:
    fused = torch.tensor([[2.0, -3.0, 9.0, 0.5, 1.0, -20.0]], dtype=torch.float64)

    def sigmoid(x: float) -> Tensor:
        return 1 / (1 + torch.exp(torch.tensor(-x, dtype=torch.float64)))

    plain = [2 * sigmoid(2) * 0.5, -3 * sigmoid(-3) * 1, 9 * sigmoid(9) * -20]
    torch.testing.assert_close(activate(fused, Conventions()), torch.stack(plain).unsqueeze(0))
    clamped = [2 * sigmoid(3.404) * 1.5, -3 * sigmoid(-5.106) * 2, 7 * sigmoid(11.914) * -6]
    found = activate(fused, Conventions(activation_limit=7.0))
    torch.testing.assert_close(found, torch.stack(clamped).unsqueeze(0))
