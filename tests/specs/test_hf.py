"""config.json files: what each family's keys mean, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from disagmoe.specs import from_hf_config, load_model, parameters
from tests.specs.configs import PUBLIC, TINY, Config, without


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_config_equals_the_shipped_file(name: str) -> None:
    shipped = load_model(name)
    assert from_hf_config(PUBLIC[name], name) == replace(shipped, title=name)


def test_tiny_config_equals_the_shipped_file() -> None:
    assert from_hf_config(TINY, "tiny") == replace(load_model("tiny"), title="tiny", assumptions=())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek"])
def test_three_spellings_of_the_expert_count_are_one_model(family: str) -> None:
    base = without(TINY, "num_experts") | {"model_type": family}
    spellings = [
        base | {"num_local_experts": 8},
        base | {"num_experts": 8},
        base | {"n_routed_experts": 8},
        without(base, "num_experts_per_tok") | {"num_local_experts": 8, "experts_per_token": 2},
    ]
    models = [from_hf_config(config, "x") for config in spellings]
    assert models[0].experts == 8
    assert models[0].top_k == 2
    assert all(model == models[0] for model in models)


def test_aliases_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok 2, experts_per_token 4"):
        from_hf_config(TINY | {"experts_per_token": 4}, "x")


def test_expert_width_is_not_the_dense_width() -> None:
    model = load_model("qwen3_30b")
    assert model.expert_width == 768
    wrong = parameters(replace(model, expert_width=6144)).total
    assert wrong == 233_469_327_360
    assert from_hf_config(PUBLIC["mixtral_8x7b"], "x").expert_width == 14336


def test_gpt_oss_windows_with_and_without_layer_types() -> None:
    listed = from_hf_config(PUBLIC["gpt_oss"], "x")
    assert from_hf_config(without(PUBLIC["gpt_oss"], "layer_types"), "x") == listed
    assert [listed.window(layer) for layer in range(4)] == [128, None, 128, None]
    swapped = PUBLIC["gpt_oss_20b"] | {"layer_types": ["full_attention", "sliding_attention"] * 12}
    assert from_hf_config(swapped, "x").windowed_layers == tuple(range(1, 24, 2))
    assert from_hf_config(without(swapped, "layer_types") | {"sliding_window": None}, "x").windowed_layers == ()


def test_mixtral_window_covers_all_layers() -> None:
    model = from_hf_config(PUBLIC["mixtral_8x7b"] | {"sliding_window": 4096}, "x")
    assert model.windowed_layers == tuple(range(32))


def test_qwen3_windows_only_where_it_is_told_to() -> None:
    """use_sliding_window is false in Qwen3MoeConfig unless given; layer types say it layer by layer."""
    width = without(TINY, "use_sliding_window") | {"sliding_window": 1024}
    assert from_hf_config(width, "x").windowed_layers == ()
    assert from_hf_config(width | {"use_sliding_window": False}, "x").windowed_layers == ()
    assert from_hf_config(width | {"use_sliding_window": True}, "x").windowed_layers == (0, 1, 2, 3)
    mixed = width | {"layer_types": ["full_attention", "sliding_attention"] * 2}
    assert from_hf_config(mixed, "x").windowed_layers == (1, 3)
    assert from_hf_config(mixed, "x").window(1) == 1024


def test_dense_layers_of_every_family() -> None:
    qwen = TINY | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert from_hf_config(qwen, "x").dense_layers == (0, 2, 3)
    assert from_hf_config(qwen, "x").dense_width == 256
    v3 = PUBLIC["deepseek_v3"] | {"first_k_dense_replace": 1, "moe_layer_freq": 2, "num_hidden_layers": 5}
    assert from_hf_config(v3, "x").dense_layers == (0, 1, 3)
    assert from_hf_config(PUBLIC["deepseek_v3"], "x").moe_layers == 58
    assert from_hf_config(PUBLIC["deepseek_moe_16b"], "x").moe_layers == 27


def test_only_latent_families_report_latent_attention() -> None:
    assert {name for name in PUBLIC if from_hf_config(PUBLIC[name], name).mla is not None} == {
        "deepseek_v2_lite",
        "deepseek_v2",
        "deepseek_v3",
    }


def test_mtp_module_is_no_main_layer() -> None:
    short = from_hf_config(PUBLIC["deepseek_v3"] | {"num_hidden_layers": 8}, "x")
    assert (short.layers, short.mtp_layers) == (8, 1)


def test_original_spelling_of_greedy_routing() -> None:
    model = from_hf_config(PUBLIC["deepseek_v2_lite"] | {"topk_method": "gready"}, "x")
    assert model == from_hf_config(PUBLIC["deepseek_v2_lite"], "x")


DENSE = without(TINY, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
REFUSED: dict[str, tuple[Config, str]] = {
    "unknown family": (TINY | {"model_type": "weird_moe"}, "unknown model_type 'weird_moe'; known: qwen3_moe, gpt_oss"),
    "no family": (without(TINY, "model_type"), "missing key model_type"),
    "unknown expert key": (without(TINY, "num_experts") | {"n_expert": 8}, "no known expert count.*n_routed_experts"),
    "dense": (DENSE, "not an MoE model"),
    "dense llama": (DENSE | {"model_type": "llama"}, "not an MoE model: model_type 'llama'"),
    "no experts": (TINY | {"num_experts": 0}, "not an MoE model"),
    "no top-k": (without(TINY, "num_experts_per_tok"), "missing key num_experts_per_tok or experts_per_token"),
    "no vocabulary": (without(TINY, "vocab_size"), "missing key vocab_size"),
    "no KV heads": (without(TINY, "num_key_value_heads"), "missing key num_key_value_heads"),
    "no expert width": (without(TINY, "moe_intermediate_size"), "missing key moe_intermediate_size"),
    "top-k above experts": (TINY | {"num_experts": 4, "num_experts_per_tok": 5}, "top_k 5 does not fit 4 experts"),
    "top-k zero": (TINY | {"num_experts": 4, "num_experts_per_tok": 0}, "top_k 0 does not fit 4 experts"),
    "heads": (TINY | {"num_key_value_heads": 3}, "heads 4 not divisible by kv_heads 3"),
    "groups": (
        PUBLIC["deepseek_v3"] | {"n_routed_experts": 10, "n_group": 4, "num_experts_per_tok": 2},
        "experts 10 not divisible by n_group 4",
    ),
    "groups without method": (without(PUBLIC["deepseek_v2"], "topk_method"), "missing key topk_method"),
    "latent attention of the wrong family": (
        PUBLIC["deepseek_moe_16b"] | {"kv_lora_rank": 512},
        "'deepseek' has no latent attention but kv_lora_rank given",
    ),
    "latent attention cut": (without(PUBLIC["deepseek_v2"], "v_head_dim"), "missing key v_head_dim"),
    "dense first layers unknown": (
        without(PUBLIC["deepseek_v3"], "first_k_dense_replace"),
        "missing key first_k_dense_replace",
    ),
    "layer types too short": (PUBLIC["gpt_oss"] | {"num_hidden_layers": 24}, "layer_types has 36 entries for 24"),
    "layer type unknown": (TINY | {"layer_types": ["linear"] * 4}, "unknown layer type 'linear'"),
    "window without width": (TINY | {"layer_types": ["sliding_attention"] * 4}, "sliding_window is missing"),
    "text for a number": (TINY | {"hidden_size": "64"}, "hidden_size must be an integer, got '64'"),
    "head size not whole": (without(TINY, "head_dim") | {"hidden_size": 66}, "66 is not divisible by 4 heads"),
    "only dense layers": (TINY | {"mlp_only_layers": [0, 1, 2, 3]}, "all 4 layers are dense"),
    "no layers": (TINY | {"num_hidden_layers": 0}, "layers must be positive, got 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    config, reason = REFUSED[case]
    with pytest.raises(ValueError) as error:
        from_hf_config(config, "x")
    message = str(error.value)
    assert re.search(reason, message)
    assert "\n" not in message


def test_one_expert_per_group_is_accepted() -> None:
    config = PUBLIC["deepseek_v3"] | {"n_routed_experts": 8, "num_experts_per_tok": 2}
    assert from_hf_config(config, "x").n_group == 8


def test_top_k_beyond_the_kept_groups_is_refused() -> None:
    config = PUBLIC["deepseek_v3"] | {"n_routed_experts": 8, "num_experts_per_tok": 5}
    with pytest.raises(ValueError, match="top_k 5 exceeds the 4 experts in 4 of 8 groups"):
        from_hf_config(config, "x")
