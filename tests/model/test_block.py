"""The halves of a layer on several pretended workers, pieced together: equal to the reference layer.

Tokens live on M attention ranks, experts on N FFN ranks. Every FFN rank that holds one of a token's experts
gets a copy of its row; the owner of its first expert is its home. Autograd is cut at every hand-over and gradients
are carried by hand, as a distributed run does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from disagmoe.model import AttentionOutput, AttentionPart, Blueprint, ExpertPart, Saved
from disagmoe.specs import ModelSpec
from tests.model.shapes import BASE, FAMILIES, blueprint, random, scramble

LAYER = 1
BALANCE, Z = 0.02, 0.003


def owners(spec: ModelSpec, ranks: int) -> list[list[int]]:
    """Near-equal consecutive experts per FFN rank."""
    bounds = [rank * spec.experts // ranks for rank in range(ranks + 1)]
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def reference_layer(spec: ModelSpec, x: Tensor, seq: int, grad: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, input gradient and gradients by name of one layer without any cut."""
    attention, expert = AttentionPart(blueprint(spec), LAYER), ExpertPart(blueprint(spec), LAYER)
    scramble(attention)
    scramble(expert)
    leaf = x.clone().requires_grad_()
    output = attention.forward(leaf, seq)
    assert output.routing is not None
    out = expert.forward(output.x, output.routing.ids, output.routing.weights)
    torch.autograd.backward((out * grad).sum() + BALANCE * output.routing.balance + Z * output.routing.z)
    assert leaf.grad is not None
    return out.detach(), leaf.grad, summed([attention.gradients(), expert.gradients()])


def summed(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in gradients:
        for name, gradient in part.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


@dataclass
class PretendedRun:
    """One layer on M + N workers, one process."""

    spec: ModelSpec
    attention: list[AttentionPart]
    experts: list[ExpertPart]
    split: bool
    one_copy_per_expert: bool = False
    late: list[Saved] = field(default_factory=list)

    def back(self, saved: Saved, *gradients: Tensor | float) -> tuple[Tensor, ...]:
        if not self.split:
            return saved.backward(*gradients)
        self.late.append(saved)
        return saved.backward_input(*gradients)

    def shipment(self, rank: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows that `rank` gets of ids [t, k]: their tokens, their ids (-1 elsewhere), the places of home rows."""
        local = torch.isin(ids, torch.tensor(owned(self.experts[rank])))
        if self.one_copy_per_expert:
            token, slot = local.nonzero(as_tuple=True)
            return token, ids[token, slot].unsqueeze(1), (slot == 0).nonzero().flatten()
        token = local.any(1).nonzero().flatten()
        return token, ids[token].where(local[token], -1), local[token, 0].nonzero().flatten()

    def step(self, x: Tensor, seq: int, grad: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        share = [x.shape[0] // seq // len(self.attention) * seq] * len(self.attention)
        share[-1] = x.shape[0] - sum(share[:-1])
        outs, grads = [], []
        for part, rows, grad_rows in zip(self.attention, x.split(share), grad.split(share), strict=True):
            output, saved = part.start(rows, seq)
            out, grad_x, grad_weights = self.experts_there_and_back(output, grad_rows)
            outs.append(out)
            grads.append(self.back(saved, grad_x, grad_weights, BALANCE, Z)[0])
        for saved in self.late:
            saved.backward_weight()
        parts = [part.gradients() for part in (*self.attention, *self.experts)]
        return torch.cat(outs), torch.cat(grads), summed(parts)

    def experts_there_and_back(self, output: AttentionOutput, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert output.routing is not None
        ids, weights = output.routing.ids, output.routing.weights
        out, grad_x, grad_weights = torch.zeros_like(grad), torch.zeros_like(grad), torch.zeros_like(weights)
        for rank, part in enumerate(self.experts):
            token, chosen, home = self.shipment(rank, ids)
            place = (ids[token].unsqueeze(2) == chosen.unsqueeze(1)).to(weights.dtype)  # [r, k, columns sent]
            sent = torch.einsum("rk,rkc->rc", weights[token], place)
            result, saved = part.start(output.x[token], chosen, sent, home)
            out.index_add_(0, token, result)
            back_rows, back_weights = self.back(saved, grad[token])
            grad_x.index_add_(0, token, back_rows)
            grad_weights.index_add_(0, token, torch.einsum("rc,rkc->rk", back_weights, place))
        return out, grad_x, grad_weights


def owned(part: ExpertPart) -> list[int]:
    assert part.experts is not None
    return list(part.experts.experts)


def pretended(
    spec: ModelSpec, M: int, N: int, *, split: bool = False, one_copy_per_expert: bool = False
) -> PretendedRun:
    plan: Blueprint = blueprint(spec)
    attention = [AttentionPart(plan, LAYER) for _ in range(M)]
    experts = [ExpertPart(plan, LAYER, local) for local in owners(spec, N)]
    for part in (*attention, *experts):
        scramble(part)
    return PretendedRun(spec, attention, experts, split, one_copy_per_expert)


def assert_equal(
    found: tuple[Tensor, Tensor, dict[str, Tensor]], expected: tuple[Tensor, Tensor, dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-12)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        torch.testing.assert_close(found[2][name], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("M", "N"), [(1, 1), (2, 1), (1, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_pieces_add_up_to_the_layer(family: str, M: int, N: int, split: bool) -> None:
    spec = FAMILIES[family]
    seq = 4
    x, grad = random(6 * seq, spec.hidden), random(6 * seq, spec.hidden, seed=1)
    assert_equal(pretended(spec, M, N, split=split).step(x, seq, grad), reference_layer(spec, x, seq, grad))


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss"])
def test_one_copy_per_expert(family: str) -> None:
    spec = FAMILIES[family]
    x, grad = random(12, spec.hidden), random(12, spec.hidden, seed=1)
    run = pretended(spec, 2, 3, one_copy_per_expert=True)
    assert_equal(run.step(x, 3, grad), reference_layer(spec, x, 3, grad))


def test_a_source_without_tokens_and_a_rank_without_rows() -> None:
    """All tokens go to expert 0; the second attention rank has none at all."""
    spec = replace(BASE, top_k=1, router_bias=True)
    x, grad = random(4, spec.hidden), random(4, spec.hidden, seed=1)
    run = pretended(spec, 2, 3)
    for part in run.attention:
        part.values()[f"layers.{LAYER}.router.bias"].copy_(torch.tensor([50.0, 0, 0, 0, 0, 0]))
    out, _, gradients = run.step(x, 4, grad)
    assert out.isfinite().all()
    names = {piece.name for part in (*run.attention, *run.experts) for piece in part.all_pieces()}
    assert set(gradients) == names
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    for expert in range(1, 6):
        for matrix in ("w1", "w2", "w3"):
            assert not gradients[f"layers.{LAYER}.experts.{expert}.{matrix}"].any()
    assert gradients[f"layers.{LAYER}.experts.0.w1"].abs().max() > 0
    empty, saved = run.attention[0].start(x[:0], 4)
    assert empty.x.shape == (0, spec.hidden)
    assert saved.backward(x[:0], empty.routing.weights, 1.0, 1.0)[0].shape == (0, spec.hidden)  # type: ignore[union-attr]


def test_a_dense_layer_cut_in_token_blocks() -> None:
    spec = FAMILIES["deepseek_v3"]
    plan = blueprint(spec)
    whole, blocks = ExpertPart(plan, 0), [ExpertPart(plan, 0) for _ in range(3)]
    for part in (whole, *blocks):
        scramble(part)
    x, grad = random(7, spec.hidden), random(7, spec.hidden, seed=1)
    expected, saved = whole.start(x)
    (expected_grad,) = saved.backward(grad)
    outs, grads = [], []
    for part, rows, grad_rows in zip(blocks, x.split([3, 4, 0]), grad.split([3, 4, 0]), strict=True):
        out, saved = part.start(rows)
        outs.append(out)
        grads.append(saved.backward(grad_rows)[0])
    found = (torch.cat(outs), torch.cat(grads), summed([part.gradients() for part in blocks]))
    assert_equal(found, (expected, expected_grad, whole.gradients()))


def test_home_work_apart_from_the_experts() -> None:
    """Colocated: a rank does its own tokens' residual and shared experts, others do the routed ones."""
    spec = FAMILIES["deepseek_v3"]
    x = random(5, spec.hidden)
    ids, weights = torch.tensor([[0, 3, 6]] * 5), random(5, 3).abs()
    part = ExpertPart(blueprint(spec), LAYER)
    scramble(part)
    nowhere = torch.zeros(0, dtype=torch.int64)
    with torch.no_grad():
        both = part.forward(x, ids, weights)
        apart = part.forward(x) + part.forward(x, ids, weights, home=nowhere)
    torch.testing.assert_close(both, apart, rtol=0, atol=1e-13)


def test_faults_are_told() -> None:
    spec = FAMILIES["deepseek_v3"]
    for experts in ([], [1, 1], [2, 1], [-1], [8]):
        with pytest.raises(ValueError, match="local experts must be distinct, ascending and within 0 to 7"):
            ExpertPart(blueprint(spec), LAYER, experts)
    with pytest.raises(ValueError, match="layer 0 is dense"):
        ExpertPart(blueprint(spec), 0).forward(random(1, spec.hidden), torch.zeros(1, 1), torch.ones(1, 1))
