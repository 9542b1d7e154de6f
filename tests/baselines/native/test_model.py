"""Which models and batches the adapter takes, what it refuses by name, and whose storage is whose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baselines.native.coverage import megatron_lacks, require_covered
from baselines.native.peers import MEGATRON
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut
from disagmoe.specs import load_model
from tests.baselines.native import needs_megatron

needs_megatron()

from baselines.native.megatron.model import transformer_config  # noqa: E402
from baselines.native.megatron.schedule import MegatronRunner  # noqa: E402
from baselines.native.megatron.shape import Shape  # noqa: E402
from baselines.native.megatron.weights import _attention  # noqa: E402
from baselines.native.slot import Slot  # noqa: E402
from tests.model.shapes import BASE, FAMILIES  # noqa: E402

CPU = torch.device("cpu")
STAGES = ((0,), (1,), (2,), (3,))


def context(world_size: int = 1) -> Context:
    return Context(0, world_size, 0, world_size, CPU, 10.0)


@pytest.mark.parametrize("name", ["tiny", "qwen3", "qwen3_30b", "mixtral_8x7b", "deepseek_moe", "deepseek_moe_16b"])
def test_shipped_models_of_these_families_are_covered(name: str) -> None:
    assert megatron_lacks(load_model(name)) == []


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("gpt_oss", "attention biases, attention sinks, sliding windows, router biases, expert biases, a clamped"),
        ("deepseek_v2", r"latent attention \(MLA\), group-limited routing"),
        ("deepseek_v3", r"latent attention \(MLA\), attention biases, a correction bias, group-limited routing"),
        ("tied_all_experts", "sliding windows, a tied head"),
    ],
)
def test_others_are_refused_by_name(family: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"model small: the Megatron-Core adapter does not cover {named}"):
        require_covered(MEGATRON, FAMILIES[family])


def test_one_expert_per_token_is_covered_where_its_weight_is_the_score() -> None:
    assert megatron_lacks(replace(BASE, top_k=1, norm_topk_prob=False)) == []
    assert megatron_lacks(replace(BASE, top_k=1)) == ["normalised weights of one expert"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 1, 1, STAGES[:3]), "3 virtual stages are no multiple of pp=2"),
        ((1, 1, 1, STAGES), "4 virtual stages need a pipeline"),
        ((2, 2, 3, STAGES), "ep=2 does not divide the 3 ranks of a stage"),
        ((0, 1, 1, STAGES), "pp=0, ep=1, dp=1: each must be at least 1"),
        ((2, 1, 1, STAGES, None, True), "EP overlap needs expert parallelism: ep is 1"),
        ((4, 2, 2, STAGES, None, True), "EP overlap with pp=4 needs virtual stages"),
    ],
)
def test_shapes_that_megatron_does_not_run(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "shape", "cut", "message"),
    [
        (4, Shape(2, 1, 1, STAGES), Cut(4, 8, 1, 4), "pp=2 with 1 ranks per stage needs 2, not 4"),
        (2, Shape(2, 1, 1, STAGES), Cut(5, 8, 1, 4), "5 sequences over 4 micro-batches on 1 ranks; allowed: mult"),
        (2, Shape(2, 1, 1, STAGES), Cut(5, 8, 1, 5), "cannot run 5 micro-batches in groups of 2"),
        (4, Shape(1, 4, 4, ((0, 1, 2, 3),)), Cut(4, 8, 1, 1), "needs ep to divide the experts: ep=4, 6 experts"),
    ],
)
def test_batches_that_megatron_does_not_run(ranks: int, shape: Shape, cut: Cut, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronRunner(context(ranks), replace(BASE, layers=4), shape, cut)


def test_stages_must_hold_every_layer_once() -> None:
    with pytest.raises(ValueError, match="the stages must hold layers 0 to 4 once each"):
        transformer_config(replace(BASE, layers=5), Shape(2, 1, 1, STAGES), CPU)


def test_heads_of_a_query_group_lie_together() -> None:
    """4 heads of 6 on 2 key heads: [q0 q1 k0 v0 q2 q3 k1 v1], as Megatron's SelfAttention splits it."""
    rows = torch.arange(48.0).repeat_interleave(12).view(48, 12)
    slots: dict[str, Slot] = dict(_attention(torch.nn.Parameter(rows), BASE))
    first_rows = {name: slot.value()[:, 0].tolist() for name, slot in slots.items()}
    assert first_rows["attention.wq"] == [*range(12), *range(24, 36)]
    assert first_rows["attention.wk"] == [*range(12, 18), *range(36, 42)]
    assert first_rows["attention.wv"] == [*range(18, 24), *range(42, 48)]
    slots["attention.wk"].fill(torch.zeros(12, 12))
    assert slots["attention.wk"].value().abs().sum() == 0
    assert slots["attention.wq"].value()[:, 0].tolist() == first_rows["attention.wq"]
