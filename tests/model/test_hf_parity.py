"""Tiny random transformers models: their weights load by name and their logits are ours (fp32, 1e-4)."""

from __future__ import annotations

import json

import pytest
import torch

from disagmoe.model import ReferenceModel, hf_conventions, hf_weights, load_hf_weights
from disagmoe.specs import from_hf_config

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

TOLERANCE = 1e-4
VOCAB, SEQUENCES, SEQ = 61, 2, 19
BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
GROUPED = BASE | {"num_key_value_heads": 2}
QWEN3 = GROUPED | {
    "head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
GPT_OSS = GROUPED | {
    "head_dim": 16,
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
}
DEEPSEEK = BASE | {
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
V2 = DEEPSEEK | {"norm_topk_prob": False}
V3 = DEEPSEEK | {"num_nextn_predict_layers": 0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
PLAIN = {"rope_type": "default", "rope_theta": 150_000.0}
MODELS = {
    "qwen3": ("Qwen3Moe", QWEN3),
    "qwen3_dense_and_tied": ("Qwen3Moe", QWEN3 | {"mlp_only_layers": [1], "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", GROUPED | {"intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOss", GPT_OSS | {"rope_parameters": PLAIN}),
    "gpt_oss_yarn": ("GptOss", GPT_OSS | {"max_position_embeddings": 131_072}),
    "deepseek_v2_greedy": ("DeepseekV2", V2 | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v2_groups": ("DeepseekV2", V2 | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", V3),
    "deepseek_v3_yarn": ("DeepseekV3", V3 | {"rope_parameters": YARN}),
    "deepseek_v3_half_pairs": ("DeepseekV3", V3 | {"rope_interleave": False}),
}


def made(name):
    """A random model of transformers, with no parameter at zero or one."""
    family, values = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**values)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)]:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def ours(config, state):
    spec = from_hf_config(config, "small")
    model = ReferenceModel(spec, None, torch.float32, conventions=hf_conventions(config, spec))
    load_hf_weights(model.values(), spec, state)
    return model


def logits_of_both(theirs, model):
    ids = torch.randint(0, VOCAB, (SEQUENCES, SEQ), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return theirs(ids).logits, model(ids)


@pytest.mark.parametrize("name", MODELS)
def test_logits(name):
    theirs = made(name)
    expected, found = logits_of_both(theirs, ours(theirs.config.to_dict(), theirs.state_dict()))
    assert float(expected.abs().max()) > 0.5
    assert float((expected - found).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt_oss", "deepseek_v2_groups", "deepseek_v3"])
def test_saved_files_give_the_same_weights(name, tmp_path):
    """What save_pretrained writes: config.json, and safetensors with the names of the files on the Hub."""
    from safetensors.torch import load_file

    theirs = made(name)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    model = ours(config, load_file(tmp_path / "model.safetensors"))
    expected, found = logits_of_both(theirs, model)
    assert float((expected - found).abs().max()) <= TOLERANCE


def test_what_does_not_fit_is_named():
    theirs = made("qwen3")
    config, state = theirs.config.to_dict(), dict(theirs.state_dict())
    spec = from_hf_config(config, "small")
    with pytest.raises(ValueError, match=r"^model small has no place for model\.extra of the state dict$"):
        hf_weights(spec, state | {"model.extra": torch.zeros(1)})
    missing = {name: value for name, value in state.items() if name != "model.layers.1.self_attn.q_norm.weight"}
    with pytest.raises(ValueError, match=r"has nothing for layers\.1\.attention\.q_norm\.weight$"):
        ours(config, missing)
    with pytest.raises(ValueError, match=r"embedding\.weight has shape \[61, 32\], the state dict gives \[3, 32\]"):
        ours(config, state | {"model.embed_tokens.weight": torch.zeros(3, 32)})
    with pytest.raises(ValueError, match="rope_type 'llama3' is not known"):
        hf_conventions(config | {"rope_parameters": {"rope_type": "llama3"}}, spec)


def test_a_model_cut_short_takes_its_layers_only():
    theirs = made("qwen3")
    spec = from_hf_config(theirs.config.to_dict(), "small")
    names = hf_weights(spec.with_layers(2), theirs.state_dict())
    assert {int(name.split(".")[1]) for name in names if name.startswith("layers.")} == {0, 1}
