"""The reference model against an independent token-by-token one: loss, loads and every gradient."""

from __future__ import annotations

import pytest
import torch

from disagmoe.model import LossWeights
from tests.model.shapes import FAMILIES, random_batch, scrambled_reference
from tests.model.slow_model import SlowModel


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_loads_and_every_gradient(family: str) -> None:
    spec = FAMILIES[family]
    model = scrambled_reference(spec)
    tokens, targets = random_batch(spec, sequences=2, seq=7)
    leaves = {name: value.clone().requires_grad_() for name, value in model.values().items()}
    slow = SlowModel(spec, leaves)
    expected = slow.loss(tokens, targets, balance=0.3, z=0.05)
    expected.backward()

    report = model.accumulate([(tokens, targets)], LossWeights(balance=0.3, z=0.05))

    assert report.loss == pytest.approx(expected.item(), abs=1e-12)
    assert report.balance == pytest.approx(slow.balance.item() / 2, abs=1e-12)
    assert report.z == pytest.approx(slow.z.item() / tokens.numel(), abs=1e-12)
    assert {layer: counts.tolist() for layer, counts in report.counts.items()} == slow.counts
    gradients = model.gradients()
    trained = {name for name in leaves if not name.endswith("correction_bias")}
    assert set(gradients) == trained
    for name in sorted(trained):
        wanted = leaves[name].grad
        found = gradients[name]
        torch.testing.assert_close(found, torch.zeros_like(found) if wanted is None else wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str) -> None:
    spec = FAMILIES[family]
    model = scrambled_reference(spec)
    tokens, _ = random_batch(spec, sequences=2, seq=5, seed=3)
    with torch.no_grad():
        found = model(tokens)
        expected = torch.stack([torch.stack(SlowModel(spec, model.values()).logits(row)) for row in tokens.tolist()])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
