"""Routing by hand-computed numbers: scores, groups, ties, scaling, loads, losses, bias update."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from disagmoe.model import AttentionPart, LossWeights, update_correction_bias
from disagmoe.model.router import Routing, choose, route
from disagmoe.specs import ModelSpec
from tests.model.shapes import BASE, FAMILIES, blueprint, random, random_batch, scramble, scrambled_reference


def router(experts: int, top_k: int, **changes: object) -> ModelSpec:
    return replace(BASE, experts=experts, top_k=top_k, **changes)  # type: ignore[arg-type]


def routed(spec: ModelSpec, logits: list[list[float]], dtype: torch.dtype = torch.float64, **more: Tensor) -> Routing:
    return route(torch.tensor(logits, dtype=dtype), spec, seq=len(logits), **more)


def test_masked_groups_cannot_win_with_negative_scores() -> None:
    spec = router(4, 2, scoring="sigmoid", n_group=2, topk_group=1, group_score="max")
    choice = torch.tensor([[0.5, 0.4, 0.3, 0.2]]) + torch.tensor([-0.9, -0.9, -2.0, -2.0])
    assert choose(choice, spec).tolist() == [[0, 1]]
    both = replace(spec, group_score="top2_sum")
    assert choose(choice, both).tolist() == [[0, 1]]


def test_scaling_once_without_normalisation() -> None:
    spec = router(4, 2, norm_topk_prob=False, routed_scaling_factor=16.0)
    assert routed(spec, [[2, 1, 0, -1]]).weights.tolist() == [pytest.approx([10.302628, 3.790125], abs=1e-6)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"norm_topk_prob": False}, [0.643914, 0.236883]),
        ({"norm_topk_prob": True}, [0.731059, 0.268941]),
        ({"scoring": "softmax_after_topk"}, [0.731059, 0.268941]),
    ],
)
def test_softmax_before_and_after_the_choice(changes: dict[str, object], expected: list[float]) -> None:
    routing = routed(router(4, 2, **changes), [[2, 1, 0, -1]])
    assert routing.weights.tolist() == [pytest.approx(expected, abs=1e-6)]
    assert routing.ids.tolist() == [[0, 1]]


def test_weights_are_not_recovered_from_biased_scores() -> None:
    spec = router(3, 2, scoring="sigmoid", correction_bias=True)
    routing = routed(spec, [[-18, -18, -19]], dtype=torch.float32, correction_bias=torch.tensor([12.0, 12.0, 0.0]))
    assert routing.ids.tolist() == [[0, 1]]
    assert routing.weights.tolist() == [[0.5, 0.5]]


def test_scaling_applies_after_normalisation() -> None:
    spec = router(3, 2, scoring="sigmoid", routed_scaling_factor=2.5)
    assert routed(spec, [[0, 0, -1]]).weights.tolist() == [[1.25, 1.25]]


@pytest.mark.parametrize(("experts", "k", "groups"), [(4, 5, 1), (4, 0, 1), (10, 2, 4)])
def test_impossible_choices_are_refused_with_both_numbers(experts: int, k: int, groups: int) -> None:
    with pytest.raises(ValueError) as error:
        router(experts, k, n_group=groups, topk_group=1)
    assert str(experts) in str(error.value)
    assert str(k if groups == 1 else groups) in str(error.value)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
def test_one_expert_per_token(scoring: str) -> None:
    routing = routed(router(4, 1, scoring=scoring), [[0.3, 2, 0, -1], [0, 0, 5, 1]])
    assert routing.weights.tolist() == [[1.0], [1.0]]
    assert routing.ids.tolist() == [[1], [2]]


def test_groups_of_one_expert() -> None:
    spec = router(8, 2, n_group=8, topk_group=4, group_score="top2_sum")
    assert routed(spec, [[0, 1, 2, 3, 4, 5, 6, 7.5]]).ids.tolist() == [[7, 6]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
def test_ties_go_to_the_lowest_ids(scoring: str) -> None:
    routing = routed(router(8, 2, scoring=scoring), [[0.0] * 8] * 5)
    assert routing.ids.tolist() == [[0, 1]] * 5
    assert routing.counts.tolist() == [5, 5, 0, 0, 0, 0, 0, 0]
    groups = routed(router(8, 2, scoring=scoring, n_group=4, topk_group=2), [[0.0] * 8])
    assert groups.ids.tolist() == [[0, 1]]


@given(st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=6), st.integers(1, 6))
def test_choice_equals_a_sort_with_ties_by_id_and_loads_add_up(logits: list[list[int]], k: int) -> None:
    routing = routed(router(6, k, scoring="softmax_after_topk"), [[float(x) for x in row] for row in logits])
    assert routing.ids.tolist() == [sorted(range(6), key=lambda e: (-row[e], e))[:k] for row in logits]
    assert int(routing.counts.sum()) == len(logits) * k


def test_a_given_choice_is_kept() -> None:
    """Recomputation passes the experts chosen before, whatever the scores say now."""
    spec = router(4, 2)
    routing = routed(spec, [[2, 1, 0, -1]], chosen=torch.tensor([[3, 0]]))
    assert routing.ids.tolist() == [[3, 0]]
    assert routing.weights.tolist() == [pytest.approx([1 / (1 + math.exp(3)), 1 / (1 + math.exp(-3))])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_routing_runs_in_fp32_or_better(dtype: torch.dtype) -> None:
    part = AttentionPart(blueprint(BASE, dtype), 0)
    scramble(part)
    x = random(4, BASE.hidden).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        routing = part.forward(x, 4).routing
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert routing is not None
    assert (routing.weights.dtype, routing.z.dtype, routing.balance.dtype) == (wide, wide, wide)
    weights = routing.weights.sum(-1)
    torch.testing.assert_close(weights, torch.ones_like(weights), rtol=0, atol=1e-6)


def one_hot(experts: list[int]) -> list[list[float]]:
    return [[1000.0 if e == chosen else 0.0 for e in range(4)] for chosen in experts]


@pytest.mark.parametrize(
    ("experts", "expected"),
    [([0, 1, 2, 3], 1.0), ([2, 2, 2, 2], 4.0), ([0, 0, 1, 1], 2.0), ([2, 3, 3, 2], 2.0)],
    ids=["balanced", "collapsed", "half", "other half"],
)
@pytest.mark.parametrize("scoring", ["softmax", "softmax_after_topk", "sigmoid"])
def test_balance_loss_of_one_sequence(experts: list[int], expected: float, scoring: str) -> None:
    logits = [[x if scoring != "sigmoid" else x - 500 for x in row] for row in one_hot(experts)]
    assert routed(router(4, 1, scoring=scoring), logits).balance.item() == pytest.approx(expected)


def test_balance_loss_counts_sequences_apart() -> None:
    logits = torch.tensor(one_hot([0, 0, 1, 1]), dtype=torch.float64)
    assert route(logits, router(4, 1), seq=4).balance.item() == pytest.approx(2.0)
    assert route(logits, router(4, 1), seq=2).balance.item() == pytest.approx(8.0)  # two collapsed sequences, summed


def test_balance_loss_reaches_the_gate() -> None:
    logits = random(6, 4).requires_grad_()
    routing = route(logits, router(4, 1), seq=3)
    (gradient,) = torch.autograd.grad(routing.balance, logits)
    assert gradient.abs().max() > 1e-3


def test_z_loss() -> None:
    routing = routed(router(4, 1), [[0.0, 0, 0, 0], [1, 1, 1, 1]])
    assert routing.z.item() == pytest.approx(math.log(4) ** 2 + (1 + math.log(4)) ** 2)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3"])
def test_router_losses_do_not_depend_on_the_micro_batches(family: str) -> None:
    spec = FAMILIES[family]
    tokens, targets = random_batch(spec, sequences=8, seq=5)
    weights = LossWeights(balance=0.7, z=0.2)
    found = []
    for size in (8, 4, 2, 1):
        model = scrambled_reference(spec)
        batches = list(zip(tokens.split(size), targets.split(size), strict=True))
        report = model.accumulate(batches, weights)
        assert all(int(counts.sum()) == 40 * spec.top_k for counts in report.counts.values())
        found.append((report, model.gradients()))
    for report, gradients in found[1:]:
        assert report.loss == pytest.approx(found[0][0].loss, abs=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][1][name], rtol=0, atol=1e-12)


def test_bias_moves_against_the_load() -> None:
    bias = torch.tensor([0.5, 0.0, -1.0, 0.0])
    before = bias.clone()
    micro_batches = [[4, 0, 1, 0], [2, 1, 1, 0], [2, 0, 1, 0], [2, 1, 1, 0]]
    update_correction_bias(bias, torch.tensor(micro_batches).sum(0), 0.001)
    torch.testing.assert_close(bias - before, torch.tensor([-0.001, 0.001, 0.0, 0.001]), rtol=0, atol=1e-7)


def test_only_the_update_moves_the_bias() -> None:
    """Neither forward, nor backward, nor recomputation touch it; it has no gradient and is saved by name."""
    spec = FAMILIES["deepseek_v3"]
    model = scrambled_reference(spec)
    name = "layers.1.router.correction_bias"
    before = model.values()[name].clone()
    report = model.accumulate([random_batch(spec, 2, 4)])
    with torch.no_grad():
        model(random_batch(spec, 2, 4)[0])
    assert torch.equal(model.values()[name], before)
    assert name not in model.gradients()
    assert any(key.endswith("router.correction_bias") for key in model.state_dict())
    update_correction_bias(model.values()[name], report.counts[1], 0.001)
    assert not torch.equal(model.values()[name], before)
