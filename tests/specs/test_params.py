"""Parameter counts against published ones, and their invariants."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.specs import (
    ModelSpec,
    attention_params,
    embedding_params,
    expert_params,
    ffn_shared_params,
    from_hf_config,
    head_params,
    load_model,
    model_from_mapping,
    model_names,
    parameters,
)
from tests.specs.configs import TINY, Config

EXACT = {
    # total, active with both embeddings, without the input one, without both, MoE layers, routed experts
    "deepseek_moe_16b": (16_375_728_128, 2_828_650_496, 2_618_935_296, 2_409_220_096, 27, 14_948_499_456),
    "deepseek_v2_lite": (15_706_484_224, 2_661_150_208, 2_451_435_008, 2_241_719_808, 26, 14_394_851_328),
    "deepseek_v2": (235_741_434_880, 21_375_800_320, 20_851_512_320, 20_327_224_320, 59, 222_717_542_400),
    "deepseek_v3": (671_026_419_200, 37_552_297_472, 36_625_618_432, 35_698_939_392, 58, 653_908_770_816),
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248, 12_748_853_248, 12_617_781_248, 32, 45_097_156_608),
}
PUBLISHED = {
    # total, active in the convention that the publisher follows
    "qwen3": (235.0e9, 22.0e9, "active_all"),
    "qwen3_30b": (30.5e9, 3.3e9, "active_all"),
    "gpt_oss": (116.83e9, 5.13e9, "active_no_input_embedding"),
    "gpt_oss_20b": (20.91e9, 3.61e9, "active_no_input_embedding"),
    "deepseek_moe_16b": (16.4e9, 2.8e9, "active_all"),
    "deepseek_v2": (236.0e9, 21.0e9, "active_all"),
    "deepseek_v3": (671.0e9, 37.0e9, "active_all"),
    "mixtral_8x7b": (46.7e9, 12.9e9, "active_all"),
}


@pytest.mark.parametrize("name", EXACT)
def test_counts_to_the_digit(name: str) -> None:
    model = load_model(name)
    count = parameters(model)
    found = (count.total, count.active_all, count.active_no_input_embedding, count.active_no_embeddings)
    assert (*found, model.moe_layers, count.routed_experts) == EXACT[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_near_the_published_figures(name: str) -> None:
    total, active, convention = PUBLISHED[name]
    count = parameters(load_model(name))
    assert count.total == pytest.approx(total, rel=0.002)
    assert getattr(count, convention) == pytest.approx(active, rel=0.025)


def test_totals_of_the_qwen3_checkpoints() -> None:
    """Sizes of the bf16 checkpoints (model.safetensors.index.json) over two bytes."""
    assert parameters(load_model("qwen3")).total == 235_093_634_560
    assert parameters(load_model("qwen3_30b")).total == 30_532_122_624


def test_both_sides_of_a_disaggregated_model_add_up() -> None:
    count = parameters(load_model("qwen3_30b"))
    assert count.attention_side == 1_541_093_376
    assert count.expert_side == count.routed_experts == 28_991_029_248
    assert count.attention_side + count.expert_side == 30_532_122_624


def test_active_conventions_of_gpt_oss_and_qwen3() -> None:
    gpt, qwen = parameters(load_model("gpt_oss")), parameters(load_model("qwen3_30b"))
    assert (gpt.active_all, gpt.active_no_input_embedding) == (5_711_982_912, 5_132_849_472)
    assert (qwen.active_all, qwen.active_no_input_embedding) == (3_353_032_704, 3_041_867_776)


def test_mtp_is_counted_apart() -> None:
    count = parameters(load_model("deepseek_v3"))
    assert count.mtp == 11_610_068_224
    assert count.total_with_mtp == 682_636_487_424
    assert count.total == 671_026_419_200


def test_the_dense_first_layer_is_neither_an_moe_layer_nor_5632_wide() -> None:
    model = load_model("deepseek_moe_16b")
    assert parameters(replace(model, dense_layers=())).total == 16_879_568_896
    assert parameters(replace(model, dense_width=5632)).total < 16_375_728_128


def test_paper_model_is_the_public_one_without_its_extras() -> None:
    paper, public = load_model("deepseek_moe"), load_model("deepseek_moe_16b")
    difference = parameters(paper).total - parameters(public).total
    dense_to_moe = 64 * 3 * 2048 * 1408 + 64 * 2048 - 3 * 2048 * 10944
    assert difference == dense_to_moe - 27 * 3 * 2048 * 2816
    assert len(paper.assumptions) >= 3


def _by_worker(model: ModelSpec) -> int:
    """The model's total gathered as workers hold it: layer by layer, attention and FFN apart."""
    total = embedding_params(model) + head_params(model)
    for layer in range(model.layers):
        total += attention_params(model, layer) + ffn_shared_params(model, layer)
        total += model.experts * expert_params(model) if model.is_moe(layer) else 0
    return total


@pytest.mark.parametrize("name", model_names())
def test_components_and_workers_add_up_to_the_total(name: str) -> None:
    model = load_model(name)
    count = parameters(model)
    assert sum(count.components.values()) == count.total
    assert _by_worker(model) == count.total


@st.composite
def models(draw: st.DrawFn) -> dict[str, object]:
    layers = draw(st.integers(1, 12))
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, 64))
    latent = {
        "q_lora_rank": draw(st.none() | st.integers(1, 64)),
        "kv_lora_rank": draw(st.integers(1, 64)),
        "qk_nope_head_dim": draw(st.integers(1, 64)),
        "qk_rope_head_dim": draw(st.integers(1, 64)),
        "v_head_dim": draw(st.integers(1, 64)),
    }
    return {
        "name": "x",
        "family": "test",
        "layers": layers,
        "hidden": draw(st.integers(1, 300)),
        "vocab": draw(st.integers(1, 1000)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": draw(st.integers(1, 64)),
        "mla": draw(st.none() | st.just(latent)),
        "experts": experts,
        "top_k": draw(st.integers(1, experts)),
        "expert_width": draw(st.integers(1, 300)),
        "shared_width": draw(st.integers(0, 300)),
        "dense_width": draw(st.integers(1, 300)),
        "dense_layers": sorted(draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))),
        **{key: draw(st.booleans()) for key in ("tied", "attention_bias", "router_bias", "expert_bias", "sinks")},
    }


@given(models(), st.randoms(use_true_random=False))
def test_invariants_of_any_model(mapping: dict[str, object], random: object) -> None:
    model = model_from_mapping(mapping)
    count = parameters(model)
    copy = model.vocab * model.hidden if model.tied else 0
    assert _by_worker(model) - copy == count.total == sum(count.components.values())
    assert 0 < count.active_no_embeddings < count.active_no_input_embedding <= count.active_all <= count.total
    assert (count.active_all == count.total) == (model.top_k == model.experts)
    keys = list(mapping)
    random.shuffle(keys)  # type: ignore[attr-defined]
    assert parameters(model_from_mapping({key: mapping[key] for key in keys})) == count


def test_a_tied_matrix_counts_once() -> None:
    untied, tied = (parameters(from_hf_config(TINY | {"tie_word_embeddings": value}, "x")) for value in (False, True))
    assert untied.total - tied.total == 512 * 64
    assert untied.active_no_input_embedding == tied.active_no_input_embedding


@given(st.permutations(sorted(TINY)))
def test_a_config_counts_the_same_in_any_key_order(keys: list[str]) -> None:
    config: Config = {key: TINY[key] for key in keys}
    assert parameters(from_hf_config(config, "x")) == parameters(load_model("tiny"))
