"""Starting values: by name and seed alone."""

from __future__ import annotations

import math

import pytest
import torch

from disagmoe.model import AttentionPart, Blueprint, ExpertPart, ReferenceModel
from disagmoe.model.init import initial_value
from tests.model.shapes import BASE, FAMILIES, blueprint


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_an_expert_starts_alike_for_every_number_of_ranks(ranks: int) -> None:
    whole = ExpertPart(blueprint(BASE), 1).values()
    size = BASE.experts // ranks
    parts = [ExpertPart(blueprint(BASE), 1, range(r * size, (r + 1) * size)).values() for r in range(ranks)]
    names = {name for part in parts for name in part}
    assert names == set(whole)
    for part in parts:
        assert all(torch.equal(value, whole[name]) for name, value in part.items())


def test_no_two_matrices_start_alike() -> None:
    values = ReferenceModel(FAMILIES["deepseek_v3"]).values()
    matrices = {name: value for name, value in values.items() if value.dim() == 2}
    assert len({value.flatten()[:4].sum().item() for value in matrices.values()}) == len(matrices)


def test_replicas_are_identical_and_seeds_differ() -> None:
    first, second = (AttentionPart(blueprint(BASE), 0).values() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = AttentionPart(Blueprint(BASE, torch.float64, seed=1), 0).values()
    assert not torch.equal(first["layers.0.attention.wq"], other["layers.0.attention.wq"])


def test_types_start_from_the_same_values() -> None:
    wide, narrow = (ReferenceModel(BASE, 3, dtype).values() for dtype in (torch.float64, torch.float32))
    assert all(torch.equal(wide[name].float(), narrow[name]) for name in wide)


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("embedding.weight", 0.02),
        ("head.weight", 0.02),
        ("layers.1.attention.wq", 0.02),
        ("layers.1.router.weight", 0.02),
        ("layers.1.experts.17.w1", 0.02),
        ("layers.1.attention.wo", 0.02 / math.sqrt(16)),
        ("layers.1.experts.17.w2", 0.02 / math.sqrt(16)),
        ("layers.1.shared.w2", 0.02 / math.sqrt(16)),
    ],
)
def test_deviations(name: str, deviation: float) -> None:
    values = initial_value(name, (200, 300), seed=0, layers=8)
    assert values.std().item() == pytest.approx(deviation, rel=0.01)
    assert abs(values.mean().item()) < 4 * deviation / math.sqrt(60_000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("head.norm.weight", 1.0),
        ("layers.1.ffn_norm.weight", 1.0),
        ("layers.1.attention.q_norm.weight", 1.0),
        ("layers.1.attention.bq", 0.0),
        ("layers.1.attention.bkv_a", 0.0),
        ("layers.1.attention.sinks", 0.0),
        ("layers.1.router.bias", 0.0),
        ("layers.1.router.correction_bias", 0.0),
        ("layers.1.experts.3.b1", 0.0),
    ],
)
def test_constants(name: str, value: float) -> None:
    assert initial_value(name, (5,), seed=0, layers=8).tolist() == [value] * 5


def test_without_a_seed_everything_is_zero() -> None:
    assert not any(value.any() for value in ReferenceModel(BASE, None).values().values())
