"""What the Tutel adapter takes and refuses: asked without Tutel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baselines.native.coverage import require_covered, tutel_lacks
from baselines.native.peers import TUTEL
from baselines.native.tutel.model import TutelOptions
from baselines.native.tutel.trainer import TutelRunner, check_runnable
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut
from disagmoe.specs import load_model
from tests.model.shapes import BASE, FAMILIES


@pytest.mark.parametrize("name", ["tiny", "qwen3", "mixtral_8x7b", "deepseek_moe", "deepseek_v2_lite"])
def test_shipped_models_of_these_families_are_covered(name: str) -> None:
    assert tutel_lacks(load_model(name)) == []


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("gpt_oss", "router biases, expert biases, a clamped activation"),
        ("deepseek_v2", "group-limited routing"),
        ("deepseek_v3", "sigmoid scores, a correction bias, group-limited routing"),
        ("tied_all_experts", "a tied head"),
    ],
)
def test_others_are_refused_by_name(family: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"model small: the Tutel adapter does not cover {named}$"):
        require_covered(TUTEL, FAMILIES[family])


def test_odd_widths_and_single_normalised_experts() -> None:
    assert tutel_lacks(replace(BASE, hidden=13, top_k=1)) == ["normalised weights of one expert", "an odd hidden size"]


def test_options_are_those_of_the_planner() -> None:
    with pytest.raises(ValueError, match="tutel degree=3: allowed are 1, 2, 4, 8"):
        TutelOptions(degree=3)
    with pytest.raises(ValueError, match="tutel algorithm=ring: allowed are linear, 2dh"):
        TutelOptions(algorithm="ring")


@pytest.mark.parametrize(("factor", "degree", "rows"), [(0.0, 1, None), (1.0, 1, 10), (1.0, 4, 12), (-1.5, 1, 14)])
def test_capacity_is_what_tutel_computes(factor: float, degree: int, rows: int | None) -> None:
    """27 tokens, 6 experts, k = 2: k * int(factor * ceil(27 / 6)), rounded up to the degree (extract_critical)."""
    assert TutelOptions(degree, "linear", factor).bound(27, BASE) == rows


def test_the_ranks_must_divide_the_experts() -> None:
    with pytest.raises(ValueError, match="needs the ranks to divide the experts: 6 experts, 4 ranks"):
        check_runnable(BASE, TutelOptions(), Cut(8, 8, 1, 2), 4)


def test_batches_must_give_every_rank_the_same() -> None:
    context = Context(0, 2, 0, 2, torch.device("cpu"), 10.0)
    with pytest.raises(ValueError, match="6 sequences over 2 micro-batches on 2 ranks; allowed: multiples of 4"):
        TutelRunner(context, BASE, TutelOptions(), Cut(6, 8, 1, 2))
