"""Flat buckets and AdamW on shards: torch's AdamW, whatever the shard; schedule; clipping."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from disagmoe.model import AttentionPart, Blueprint, ExpertPart
from disagmoe.runtime.buckets import Bucket, decays
from disagmoe.runtime.holdings import Share
from disagmoe.runtime.optimizer import Recipe, ShardedAdamW
from tests.model.shapes import FAMILIES


def bucket_of(part: AttentionPart | ExpertPart) -> Bucket:
    pieces: dict[int, list] = {}
    for piece in part.all_pieces():
        pieces.setdefault(id(piece.tensor), []).append(piece)
    return Bucket.build(Share("dense", 0), [(p, pieces[id(p)]) for p in part.parameters()], None)


def test_parameters_and_gradients_become_views_and_keep_their_values() -> None:
    blueprint = Blueprint(FAMILIES["gpt_oss"], torch.float64)
    for part in (AttentionPart(blueprint, 1), ExpertPart(blueprint, 1, [1, 3])):
        before = {name: value.clone() for name, value in part.values().items()}
        bucket = bucket_of(part)
        assert all(torch.equal(value, before[name]) for name, value in part.values().items())
        bucket.values.copy_(torch.arange(bucket.values.numel()))
        bucket.gradients.copy_(torch.arange(bucket.values.numel()))
        values, gradients = part.values(), part.gradients()
        names = [run.name for run in bucket.runs]
        assert sorted(names) == sorted(values)
        for run in bucket.runs:
            expected = torch.arange(run.start, run.stop, dtype=torch.float64).view(run.shape)
            assert torch.equal(values[run.name], expected) and torch.equal(gradients[run.name], expected)
            assert (run.stop <= bucket.decayed) == (values[run.name].dim() > 1)


def test_what_decays() -> None:
    spec = FAMILIES["gpt_oss"]
    blueprint = Blueprint(replace(spec, qk_norm=True))
    parts = (AttentionPart(blueprint, 1), ExpertPart(blueprint, 1))
    kept = {p.name.rsplit(".", 2)[-1] for part in parts for p in part.all_pieces() if not decays(p.name, p.tensor)}  # type: ignore[arg-type]
    assert kept == {"weight", "bias", "sinks", "bq", "bk", "bv", "bo", "b1", "b2", "b3"}
    moved = {p.name for part in parts for p in part.all_pieces() if decays(p.name, p.tensor)}  # type: ignore[arg-type]
    assert "layers.1.router.weight" in moved and "layers.1.experts.2.w1" in moved
    assert not any("norm" in name for name in moved)


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_an_update_is_torchs_adamw_on_every_shard(shards: int) -> None:
    recipe = Recipe(lr=0.1, min_lr=0.01, warmup=2, steps=5, clip=0.5)
    part = AttentionPart(Blueprint(FAMILIES["gpt_oss"], torch.float64), 0)
    truth = AttentionPart(Blueprint(FAMILIES["gpt_oss"], torch.float64), 0)
    bucket = bucket_of(part)
    length = -(-bucket.size // shards)
    views = [replace(bucket, shard=slice(i * length, min((i + 1) * length, bucket.size))) for i in range(shards)]
    optimizers = [ShardedAdamW([view], recipe) for view in views]
    named = list(truth.named_parameters())
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": recipe.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=recipe.betas, eps=recipe.epsilon)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for mine, theirs in zip(part.parameters(), truth.parameters(), strict=True):
            gradient = torch.randn(theirs.shape, generator=generator, dtype=torch.float64)
            theirs.grad = gradient
            mine.grad.copy_(gradient)  # type: ignore[union-attr]
        norm = math.sqrt(sum(view.square_norm() for view in views))
        assert float(torch.nn.utils.clip_grad_norm_(truth.parameters(), recipe.clip)) == pytest.approx(norm, rel=1e-14)
        for group in reference.param_groups:
            group["lr"] = recipe.lr_at(step)
        reference.step()
        for optimizer in optimizers:
            optimizer.update(recipe.clip_factor(norm))
    for mine, theirs in zip(part.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


def test_the_learning_rate_warms_up_and_falls() -> None:
    recipe = Recipe(lr=1.0, min_lr=0.2, warmup=4, steps=12)
    rates = [recipe.lr_at(step) for step in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[8] == pytest.approx(0.6) and rates[12] == rates[13] == pytest.approx(0.2)
    assert Recipe(warmup=0, steps=1).lr_at(0) == Recipe().lr


def test_clipping_by_global_norm() -> None:
    assert Recipe(clip=1.0).clip_factor(4.0) == pytest.approx(0.25, rel=1e-6)
    assert Recipe(clip=1.0).clip_factor(0.5) == 1.0
    assert Recipe(clip=0.0).clip_factor(1e9) == 1.0


@pytest.mark.parametrize(("change", "message"), [({"lr": -1.0}, "lr=-1.0"), ({"betas": (0.9, 1.0)}, "betas=")])
def test_a_bad_recipe_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**change)
