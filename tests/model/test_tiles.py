"""Experts tile by tile give what the plain part gives: results, gradients, weights; also in bf16 autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from disagmoe.model import ExpertPart
from disagmoe.model.tiles import TiledExperts, column_ranges
from tests.model.shapes import FAMILIES, blueprint, random, scramble


def part_of(family: str) -> ExpertPart:
    part = ExpertPart(blueprint(FAMILIES[family]), FAMILIES[family].layers - 1, (1, 2, 4))
    scramble(part)
    return part


def arrivals(part: ExpertPart, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows with up to two experts each, some of them not here (-1), every third at home."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor([-1, 1, 2, 4])[torch.randint(0, 4, (rows, 2), generator=generator)]
    return random(rows, part.ffn_norm.weight.shape[0]), ids, random(rows, 2, seed=1), torch.arange(0, rows, 3)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("cuts", [(0, 7), (3, 0, 4), (7,)])
@pytest.mark.parametrize("columns", [1, 5, 16])
def test_tiles_equal_the_whole(family: str, cuts: tuple[int, ...], columns: int) -> None:
    part, tiled_part = part_of(family), part_of(family)
    rows, ids, weights, home = arrivals(part, 7)
    out, saved = part.start(rows, ids, weights, home)
    grad = random(*out.shape, seed=2)
    rows_grad, weights_grad = saved.backward(grad)

    tiled = TiledExperts(tiled_part, columns)
    ends = torch.tensor(cuts).cumsum(0).tolist()
    pieces = [slice(end - size, end) for end, size in zip(ends, cuts, strict=True)]
    for piece in pieces:
        at_home = home[(home >= piece.start) & (home < piece.stop)] - piece.start
        tiled.first(rows[piece], ids[piece], weights[piece], at_home)
    found = torch.cat([tiled.second(c) for c in range(columns)], 1)
    torch.testing.assert_close(found, out, rtol=1e-12, atol=1e-12)
    found_weights = torch.cat([tiled.first_back(i, grad[piece]) for i, piece in enumerate(pieces)])
    torch.testing.assert_close(found_weights, weights_grad, rtol=1e-12, atol=1e-12)
    normed_grad = torch.cat([tiled.second_back(c) for c in range(columns)], 1)
    tiled.weight_back()
    leaf = rows.clone().requires_grad_()
    tiled_part.ffn_norm(leaf).backward(normed_grad)
    residual = torch.zeros_like(rows).index_copy(0, home, grad[home])
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad + residual, rows_grad, rtol=1e-12, atol=1e-12)
    expected = part.gradients()
    assert expected.keys() == tiled_part.gradients().keys()
    for label, value in tiled_part.gradients().items():
        torch.testing.assert_close(value, expected[label], rtol=1e-11, atol=1e-12, msg=label)


def test_under_autocast_multiplies_run_in_bf16_and_rows_keep_their_type() -> None:
    part = part_of("deepseek_v2").float()
    rows, ids, weights, home = (t.float() if t.is_floating_point() else t for t in arrivals(part, 7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = part.forward(rows, ids, weights, home)
        tiled = TiledExperts(part, 3)
        tiled.first(rows, ids, weights, home)
        found = torch.cat([tiled.second(c) for c in range(3)], 1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)


def test_column_blocks_cover_the_width() -> None:
    assert [cut.stop - cut.start for cut in column_ranges(10, 4)] == [3, 3, 2, 2]
    assert [cut.stop - cut.start for cut in column_ranges(2, 3)] == [1, 1, 0]


def test_a_dense_layer_has_no_tiles() -> None:
    part = ExpertPart(blueprint(FAMILIES["deepseek"]), 0)
    with pytest.raises(ValueError, match="layer 0 is dense"):
        TiledExperts(part, 2)
