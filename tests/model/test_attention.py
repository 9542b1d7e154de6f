"""Attention scores, windows, sinks and rotations against explicit formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from disagmoe.model import AttentionPart, Conventions, Yarn
from disagmoe.model.rope import rotate, rotation
from disagmoe.model.scores import attend
from tests.model.shapes import FAMILIES, blueprint, random, scramble


def explicit(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Softmax over a full square with one more column for the sink."""
    batch, heads, seq, _ = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    i, j = torch.arange(seq).unsqueeze(1), torch.arange(seq).unsqueeze(0)
    forbidden = (j > i) | (i - j >= (window or seq))
    scores = scores.masked_fill(forbidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, heads, 1, 1).expand(batch, heads, seq, 1)), dim=-1)
    return scores.softmax(-1)[..., :seq] @ value


@pytest.mark.parametrize("window", [None, 1, 2, 3, 7, 8, 20])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attend(window: int | None, with_sinks: bool, kv_heads: int) -> None:
    inputs = [random(2, 4, 7, 6), random(2, kv_heads, 7, 6, seed=1), random(2, kv_heads, 7, 5, seed=2)]
    if with_sinks:
        inputs.append(random(4, seed=3))
    results = []
    for function in (attend, explicit):
        leaves = [x.clone().requires_grad_() for x in inputs]
        sinks = leaves[3] if with_sinks else None
        if function is attend:
            out = attend(*leaves[:3], scale=0.3, window=window, sinks=sinks)
        else:
            out = explicit(*leaves[:3], 0.3, window, sinks)
        out.backward(random(*out.shape, seed=4))
        results.append([out, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_a_window_of_one_sees_only_itself() -> None:
    query, key, value = random(1, 2, 5, 4), random(1, 2, 5, 4, seed=1), random(1, 2, 5, 4, seed=2)
    torch.testing.assert_close(attend(query, key, value, scale=1.0, window=1), value)


def test_no_sequences() -> None:
    for window in (None, 2):
        out = attend(random(0, 2, 5, 4), random(0, 1, 5, 4), random(0, 1, 5, 3), scale=1.0, window=window)
        assert out.shape == (0, 2, 5, 3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_product_of_complex_numbers(interleaved: bool) -> None:
    rules = Conventions(rope_theta=100.0)
    x = random(2, 9, 3, 8)
    cosine, sine = rotation(9, 8, rules, x)
    found = rotate(x, cosine, sine, interleaved=interleaved)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 4) for i in range(4)]
    for pair, (a, b) in enumerate(pairs):
        for position in range(9):
            angle = torch.tensor(position * 100.0 ** (-2 * pair / 8), dtype=torch.float64)
            turned = torch.complex(x[:, position, :, a], x[:, position, :, b]) * torch.exp(1j * angle)
            torch.testing.assert_close(found[:, position, :, a], turned.real)
            torch.testing.assert_close(found[:, position, :, b], turned.imag)


def test_scores_depend_on_distance_only() -> None:
    x, y = random(1, 1, 1, 8).expand(1, 12, 1, 8), random(1, 1, 1, 8, seed=1).expand(1, 12, 1, 8)
    for interleaved in (False, True):
        cosine, sine = rotation(12, 8, Conventions(), x)
        a, b = (rotate(z, cosine, sine, interleaved=interleaved)[0, :, 0] for z in (x, y))
        scores = a @ b.t()
        for offset in range(-5, 6):
            diagonal = scores.diagonal(offset)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_yarn_frequencies() -> None:
    """GPT-OSS's published setting: theta 150000, head 64, factor 32, 4096 positions, no truncation.

    Pairs below the first bound keep their frequency, those above the second get 1/32 of it, linear between; the
    bounds are 64 ln(4096 / (2 pi t)) / (2 ln 150000) for t = 32 and 1.
    """
    yarn = Yarn(factor=32.0, original_positions=4096, truncate=False)
    cosine, sine = rotation(2, 64, Conventions(rope_theta=150000.0, yarn=yarn), random(1))
    scale = 0.1 * math.log(32) + 1
    assert yarn.rotation_scale == pytest.approx(scale)
    assert yarn.score_scale == 1.0
    low = 32 * math.log(4096 / (2 * math.pi * 32)) / math.log(150000)
    high = 32 * math.log(4096 / (2 * math.pi)) / math.log(150000)
    for pair in range(32):
        plain = 150000 ** (-pair / 32)
        share = min(max((pair - low) / (high - low), 0), 1)
        frequency = plain * (1 - share) + plain / 32 * share
        assert cosine[1, pair].item() == pytest.approx(math.cos(frequency) * scale, abs=1e-14)
        assert sine[1, pair].item() == pytest.approx(math.sin(frequency) * scale, abs=1e-14)


def test_yarn_of_deepseek_scales_scores() -> None:
    yarn = Yarn(factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707)
    assert yarn.rotation_scale == 1.0
    assert yarn.score_scale == pytest.approx((0.0707 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_do_not_see_each_other_nor_the_future(family: str) -> None:
    spec = FAMILIES[family]
    part = AttentionPart(blueprint(spec), 1)
    scramble(part)
    x = random(3 * 6, spec.hidden)
    changed = x.clone()
    changed[6 + 4 :] += 1.0  # the end of the second sequence and all of the third
    with torch.no_grad():
        before, after = part.forward(x, 6).x, part.forward(changed, 6).x
    torch.testing.assert_close(before[:10], after[:10], rtol=0, atol=0)
    assert (before[10:] - after[10:]).abs().amax(-1).min() > 0.5


def test_tokens_must_be_whole_sequences() -> None:
    spec = FAMILIES["qwen3"]
    with pytest.raises(ValueError, match="7 tokens are no whole number of sequences of 3"):
        AttentionPart(blueprint(spec), 0).forward(random(7, spec.hidden), 3)
