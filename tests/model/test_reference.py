"""The reference model as a whole: its size, its batches, training steps with idle experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from disagmoe.model import AttentionPart, Blueprint, EmbeddingPart, ExpertPart, HeadPart, ReferenceModel
from disagmoe.specs import (
    attention_params,
    embedding_params,
    expert_params,
    ffn_shared_params,
    head_params,
    load_model,
    model_names,
    parameters,
)
from tests.model.shapes import BASE, FAMILIES, random_batch, scrambled_reference

META = torch.device("meta")


@pytest.mark.parametrize("name", model_names())
def test_a_built_model_has_the_counted_parameters(name: str) -> None:
    spec = load_model(name)
    model = ReferenceModel(spec, dtype=torch.bfloat16, device="meta")
    values = model.values()
    assert sum(value.numel() for value in values.values()) == parameters(spec).total
    stored = list(model.parameters()) + [b for n, b in model.named_buffers() if n.endswith("correction_bias")]
    assert sum(value.numel() for value in stored) == parameters(spec).total
    count = parameters(spec)
    experts = sum(value.numel() for name, value in values.items() if ".experts." in name)
    assert experts == count.routed_experts


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_have_the_counted_parameters(family: str) -> None:
    spec = FAMILIES[family]
    plan = Blueprint(spec, device=META)

    def size(part: EmbeddingPart | AttentionPart | ExpertPart | HeadPart) -> int:
        return sum(value.numel() for value in part.values().values())

    assert size(EmbeddingPart(plan)) == embedding_params(spec)
    assert size(HeadPart(plan)) == head_params(spec)
    for layer in range(spec.layers):
        moe = spec.is_moe(layer)
        # Where no router needs it, the FFN norm lives on the FFN side only.
        assert size(AttentionPart(plan, layer)) == attention_params(spec, layer) - (0 if moe else spec.hidden)
        local = [1, 4] if moe else None
        expected = spec.hidden + ffn_shared_params(spec, layer) + (2 * expert_params(spec) if moe else 0)
        assert size(ExpertPart(plan, layer, local)) == expected


@pytest.mark.parametrize("sizes", [[8], [4, 4], [2, 2, 2, 2], [1] * 8, [3, 4, 1]])
def test_gradients_do_not_depend_on_the_micro_batches(sizes: list[int]) -> None:
    tokens, targets = random_batch(BASE, sequences=8, seq=3)
    whole, cut = scrambled_reference(BASE), scrambled_reference(BASE)
    expected = whole.accumulate([(tokens, targets)])
    found = cut.accumulate(list(zip(tokens.split(sizes), targets.split(sizes), strict=True)))
    assert found.loss == pytest.approx(expected.loss, abs=1e-12)
    assert found.counts[0].tolist() == expected.counts[0].tolist()
    for name, gradient in whole.gradients().items():
        torch.testing.assert_close(cut.gradients()[name], gradient, rtol=0, atol=1e-12)


def test_repeats_to_the_bit() -> None:
    found = []
    for _ in range(2):
        model = ReferenceModel(BASE, 5)
        report = model.accumulate([random_batch(BASE, 2, 6)])
        found.append((report.loss, {name: gradient.clone() for name, gradient in model.gradients().items()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(gradient, found[1][1][name]) for name, gradient in found[0][1].items())


def test_idle_experts_over_three_steps_change_by_weight_decay_only() -> None:
    spec = replace(BASE, top_k=1, router_bias=True, experts=4)
    model = ReferenceModel(spec, 0, torch.float32)
    for layer in range(spec.layers):
        model.values()[f"layers.{layer}.router.bias"].copy_(torch.tensor([100.0, 0.0, 0.0, 0.0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    before = {name: value.clone() for name, value in model.values().items()}
    for step in range(3):
        optimizer.zero_grad()
        report = model.accumulate([random_batch(spec, 2, 5, seed=step)])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.isfinite()
        assert report.counts[0].tolist() == [10, 0, 0, 0]
        idle = {name: g for name, g in model.gradients().items() if ".experts." in name and ".experts.0." not in name}
        assert len(idle) == spec.layers * 3 * 3
        assert not any(gradient.any() for gradient in idle.values())
        optimizer.step()
    for name, value in model.values().items():
        if ".experts." in name and ".experts.0." not in name:
            torch.testing.assert_close(value, before[name] * (1 - 0.01 * 0.1) ** 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_follow_fp64(dtype: torch.dtype) -> None:
    """The grouped kernel takes these widths, so it is this path that is compared with the plain one."""
    spec = replace(BASE, hidden=16, expert_width=8, head_dim=8, top_k=6)  # every expert: no choice can flip
    batch = random_batch(spec, 2, 6)
    exact, model = scrambled_reference(spec), scrambled_reference(spec, dtype)
    expected, found = exact.accumulate([batch]), model.accumulate([batch])
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    assert found.loss == pytest.approx(expected.loss, rel=tolerance)
    for name, gradient in exact.gradients().items():
        assert (model.gradients()[name].double() - gradient).norm() <= tolerance * 2 * gradient.norm() + 1e-7, name


def test_missing_gradients_can_be_filled() -> None:
    part = ExpertPart(Blueprint(BASE), 0)
    assert part.gradients() == {}
    part.fill_gradients()
    assert set(part.gradients()) == set(part.values())
    assert not any(gradient.any() for gradient in part.gradients().values())
