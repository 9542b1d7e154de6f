"""Cross entropy in chunks against torch's, whole; the embedding; tied matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from disagmoe.model import EmbeddingPart, HeadPart
from tests.model.shapes import BASE, blueprint, random, random_batch, scramble, scrambled_reference


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 100])
@pytest.mark.parametrize("split", [False, True])
def test_chunks_do_not_change_the_loss(chunk: int, split: bool) -> None:
    head = HeadPart(blueprint(BASE), chunk_tokens=chunk)
    scramble(head)
    x, targets = random(7, BASE.hidden), torch.arange(7)
    leaf = x.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(head.logits(leaf), targets, reduction="sum")
    torch.autograd.backward(expected * 0.25)
    wanted = {name: gradient.clone() for name, gradient in head.gradients().items()}
    head.zero_grad()
    loss, saved = head.start(x, targets)
    grads = saved.backward_input(0.25) if split else saved.backward(0.25)
    if split:
        saved.backward_weight()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grads[0], leaf.grad, rtol=0, atol=1e-13)
    for name, gradient in head.gradients().items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-13)


def test_large_logits_do_not_overflow() -> None:
    head = HeadPart(blueprint(BASE, torch.float32))
    head.values()["head.weight"].fill_(1000.0)
    loss, _ = head.start(random(3, BASE.hidden, dtype=torch.float32), torch.arange(3))
    assert loss.item() == pytest.approx(3 * torch.log(torch.tensor(23.0)).item(), rel=1e-3)


def test_no_tokens() -> None:
    head = HeadPart(blueprint(BASE))
    loss, saved = head.start(random(0, BASE.hidden), torch.zeros(0, dtype=torch.int64))
    assert loss.item() == 0.0
    assert saved.backward(1.0)[0].shape == (0, BASE.hidden)
    assert not head.gradients()["head.weight"].any()


def test_chunks_must_be_positive() -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be positive, got 0"):
        HeadPart(blueprint(BASE), chunk_tokens=0)


def test_embedding_gradient_counts_every_use() -> None:
    part = EmbeddingPart(blueprint(BASE))
    rows, saved = part.start(torch.tensor([4, 0, 4]))
    assert torch.equal(rows[0], rows[2])
    assert saved.backward_input(torch.arange(36.0).view(3, 12)) == ()
    assert part.gradients() == {}
    saved.backward_weight()
    gradient = part.gradients()["embedding.weight"]
    assert gradient[4].tolist() == [24.0 + 2 * i for i in range(12)]
    assert gradient[0].tolist() == [12.0 + i for i in range(12)]
    assert int(gradient.any(1).sum()) == 2


def test_copies_of_a_tied_matrix_have_one_name_and_add_up() -> None:
    """Embedding and head as separate parts, as on two workers: their gradients sum to the tied model's."""
    spec = replace(BASE, tied=True)
    model = scrambled_reference(spec)
    tokens, targets = random_batch(spec, 2, 4)
    model.accumulate([(tokens, targets)])
    assert list(model.values()).count("embedding.weight") == 1
    assert "head.weight" not in model.values()

    embedding, head = EmbeddingPart(blueprint(spec)), HeadPart(blueprint(spec))
    assert torch.equal(embedding.values()["embedding.weight"], head.values()["embedding.weight"])
    scramble(embedding)
    scramble(head)
    leaf = embedding.forward(tokens.flatten()).detach()
    rows, first = embedding.start(tokens.flatten())
    assert torch.equal(rows, leaf)
    middle = rows.clone().requires_grad_()
    x = middle
    for attention, expert in model.layer_parts():
        output = attention.forward(x, 4)
        assert output.routing is not None
        x = expert.forward(output.x, output.routing.ids, output.routing.weights)
    _, last = head.start(x, targets.flatten())
    (grad,) = last.backward(1 / 8)
    torch.autograd.backward(x, grad)
    assert middle.grad is not None
    first.backward(middle.grad)
    name = "embedding.weight"
    total = embedding.gradients()[name] + head.gradients()[name]
    torch.testing.assert_close(total, model.gradients()[name], rtol=0, atol=1e-12)
