"""Loading models by name, file and mapping; what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from disagmoe.specs import ModelSpec, load_model, model_from_mapping, model_names
from tests.specs.configs import TINY

SHIPPED = {
    "qwen3",
    "qwen3_30b",
    "gpt_oss",
    "gpt_oss_20b",
    "deepseek_moe",
    "deepseek_moe_16b",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "mixtral_8x7b",
    "tiny",
}
MINIMAL: dict[str, object] = {
    "name": "mine",
    "family": "qwen3_moe",
    "layers": 6,
    "hidden": 64,
    "vocab": 512,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "experts": 8,
    "top_k": 2,
    "expert_width": 96,
}


def test_shipped_names_include_every_promised_model() -> None:
    assert set(model_names()) >= SHIPPED
    assert "hf" not in model_names()
    for name in model_names():
        assert load_model(name).name == name


def test_qwen3_means_the_large_model() -> None:
    assert load_model("qwen3").title == "Qwen3-235B-A22B"


def test_paper_model_states_what_it_assumes() -> None:
    model = load_model("deepseek_moe")
    assert (model.layers, model.experts, model.top_k, model.hidden, model.expert_width) == (28, 64, 4, 2048, 1408)
    assert (model.shared_width, model.dense_layers) == (0, ())
    told = " ".join(model.assumptions)
    assert all(word in told for word in ("top-k 4", "shared", "dense first layer"))


def test_a_users_files(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(yaml.safe_dump(MINIMAL))
    assert load_model(str(own)) == model_from_mapping(MINIMAL)

    (tmp_path / "My Model").mkdir()
    config = tmp_path / "My Model" / "config.json"
    config.write_text(json.dumps(TINY))
    assert load_model(str(config)).name == "My-Model"
    assert load_model(str(config.parent)) == load_model(str(config))
    assert model_from_mapping({"path": str(config)}) == load_model(str(config))


def test_layers_by_word() -> None:
    for word, expected in (("even", (0, 2, 4)), ("odd", (1, 3, 5)), ("all", tuple(range(6))), ([1], (1,))):
        model = model_from_mapping(MINIMAL | {"window_tokens": 16, "windowed_layers": word})
        assert model.windowed_layers == expected


def test_cut_to_fewer_layers() -> None:
    model = load_model("deepseek_v3").with_layers(4)
    assert (model.layers, model.dense_layers, model.moe_layers) == (4, (0, 1, 2), 1)
    assert load_model("gpt_oss").with_layers(3).windowed_layers == (0, 2)
    with pytest.raises(ValueError, match="cannot be cut to 62 layers; allowed: 1 to 61"):
        load_model("deepseek_v3").with_layers(62)


REFUSED = {
    "unknown key": ({"layer": 6}, "unknown key layer; known keys: .*layers"),
    "name": ({"name": "a/b"}, "name 'a/b' may hold only"),
    "text": ({"layers": "6"}, "layers must be an integer, got '6'"),
    "fraction": ({"layers": 6.5}, "layers must be an integer, got 6.5"),
    "bool": ({"layers": True}, "layers must be an integer, got True"),
    "null": ({"layers": None}, "layers must be an integer, got None"),
    "switch": ({"tied": 1}, "tied must be true or false, got 1"),
    "negative": ({"hidden": -64}, "hidden must be positive, got -64"),
    "zero factor": ({"routed_scaling_factor": 0.0}, "routed_scaling_factor must be positive"),
    "top-k": ({"top_k": 9}, "top_k 9 does not fit 8 experts; allowed: 1 to 8"),
    "heads": ({"kv_heads": 3}, "heads 4 not divisible by kv_heads 3"),
    "groups": ({"n_group": 3}, "experts 8 not divisible by n_group 3"),
    "kept groups": ({"n_group": 2, "topk_group": 3}, "topk_group 3 exceeds n_group 2"),
    "scoring": ({"scoring": "sparsemax"}, "unknown scoring 'sparsemax'; known: softmax, sigmoid"),
    "dense layer": ({"dense_layers": [6], "dense_width": 8}, "dense_layers must lie in 0 to 5"),
    "order": ({"dense_layers": [1, 0], "dense_width": 8}, "distinct and ascending"),
    "dense width": ({"dense_layers": [0]}, "positive dense_width, got 0"),
    "window": ({"windowed_layers": "even"}, "window_tokens is not"),
    "word": ({"windowed_layers": "some", "window_tokens": 4}, "even, odd, all or a list"),
    "latent key": ({"mla": {"kv_lora_rank": 4}}, "mla: missing key .*q_lora_rank"),
    "latent": ({"mla": 5}, "mla must be a mapping"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    change, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason) as error:
        model_from_mapping(MINIMAL | change)
    assert "\n" not in str(error.value)


def test_missing_keys_are_named() -> None:
    with pytest.raises(ValueError, match="model mine: missing key experts, top_k"):
        model_from_mapping({key: value for key, value in MINIMAL.items() if key not in ("experts", "top_k")})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nope", "unknown model 'nope'; known: .*gpt_oss.*qwen3.*path"),
        ("", "unknown model ''"),
        ("hf", "unknown model 'hf'"),
        ("no/such/config.json", "no such file 'no/such/config.json'"),
    ],
)
def test_unknown_names(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load_model(name)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("a.json", "{", "does not parse"),
        ("a.yaml", "a: [", "does not parse"),
        ("a.yaml", "", "must be a mapping"),
        ("a.json", "[1]", "must be a mapping"),
    ],
)
def test_broken_files_give_one_line(tmp_path: Path, file: str, text: str, reason: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=reason) as error:
        load_model(str(tmp_path / file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["", "???", None])
def test_hf_option_without_a_path(path: object) -> None:
    with pytest.raises(ValueError, match=r"model\.path must name"):
        model_from_mapping({"path": path})


def test_specs_load_neither_torch_nor_hydra() -> None:
    code = "import sys, disagmoe.specs, disagmoe.cost.flops; print({'torch', 'hydra', 'omegaconf'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_models_are_values() -> None:
    first, second = load_model("qwen3"), load_model("qwen3")
    assert isinstance(first, ModelSpec)
    assert first == second
    assert hash(first) == hash(second)
