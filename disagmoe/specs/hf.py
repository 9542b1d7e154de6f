"""Reading a Hugging Face config.json of a mixture-of-experts model.

Decides, per model family, what the keys of a config mean: which names the same
fact goes by, which width is an expert's, which layers are dense or windowed, and
which facts the model code fixes without a key (transformers, modeling_*.py of
each family). A family that is not known here is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from disagmoe.specs.architecture import LatentAttention, ModelSpec
from disagmoe.specs.fields import as_bool, as_float, as_int, as_list, as_str

Config = Mapping[str, object]

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
TOP_K_KEYS = ("num_experts_per_tok", "experts_per_token")
LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
GPT_OSS_WINDOW = 128
"""Window of GPT-OSS's even layers where a config does not name one."""


def from_hf_config(config: Config, name: str) -> ModelSpec:
    """The ModelSpec of a config.json (as a mapping); `name` becomes its name.

    Raises ValueError for an unknown model_type, a model without experts, missing
    or contradicting keys and impossible combinations.
    """
    reader = _Reader(config, f"config of model {name}")
    family = reader.text("model_type")
    _refuse_dense(reader, family)
    if family not in _FAMILIES:
        raise ValueError(f"{reader.what}: unknown model_type {family!r}; known: {', '.join(_FAMILIES)}")
    _refuse_latent(reader, family)
    layers = reader.integer("num_hidden_layers")
    heads = reader.integer("num_attention_heads")
    values: dict[str, object] = {
        "name": name,
        "title": name,
        "family": family,
        "layers": layers,
        "hidden": reader.integer("hidden_size"),
        "vocab": reader.integer("vocab_size"),
        "heads": heads,
        "kv_heads": reader.integer("num_key_value_heads", default=heads if family.startswith("deepseek") else None),
        "experts": reader.integer(*EXPERT_KEYS),
        "top_k": reader.integer(*TOP_K_KEYS),
        "max_position": reader.integer("max_position_embeddings", default=0) or None,
        "tied": reader.flag("tie_word_embeddings", default=False),
        "attention_bias": reader.flag("attention_bias", default=family == "gpt_oss"),
    }
    values |= _FAMILIES[family](reader, layers)
    if "head_dim" not in values:
        values["head_dim"] = _head_dim(reader, family, heads)
    values |= _windows(reader, family, layers)
    return ModelSpec(**values)  # type: ignore[arg-type]  # each value was read with its field's type


class _Reader:
    """Typed access to a config; a null value counts as absent."""

    def __init__(self, config: Config, what: str) -> None:
        self.config = config
        self.what = what

    def has(self, *keys: str) -> bool:
        return any(self.config.get(key) is not None for key in keys)

    def _pick(self, keys: tuple[str, ...]) -> tuple[str, object] | None:
        """The entry among the aliases `keys`; aliases that disagree are an error."""
        present = [(key, self.config[key]) for key in keys if self.config.get(key) is not None]
        if any(value != present[0][1] for _, value in present):
            told = ", ".join(f"{key} {value!r}" for key, value in present)
            raise ValueError(f"{self.what}: keys of one meaning disagree: {told}")
        return present[0] if present else None

    def integer(self, *keys: str, default: int | None = None) -> int:
        entry = self._pick(keys)
        if entry is None and default is not None:
            return default
        if entry is None:
            raise ValueError(f"{self.what}: missing key {' or '.join(keys)}")
        return as_int(entry[1], f"{self.what}: {entry[0]}")

    def number(self, key: str, default: float | None) -> float:
        if default is not None and not self.has(key):
            return default
        return as_float(self._required(key), f"{self.what}: {key}")

    def flag(self, key: str, default: bool) -> bool:
        return as_bool(self.config[key], f"{self.what}: {key}") if self.has(key) else default

    def text(self, key: str, default: str | None = None) -> str:
        if default is not None and not self.has(key):
            return default
        return as_str(self._required(key), f"{self.what}: {key}")

    def _required(self, key: str) -> object:
        if not self.has(key):
            raise ValueError(f"{self.what}: missing key {key}")
        return self.config[key]

    def items(self, key: str) -> list[object]:
        return as_list(self.config[key], f"{self.what}: {key}") if self.has(key) else []


def _refuse_dense(reader: _Reader, family: str) -> None:
    """Raise where the config has no experts, telling a dense model from an MoE in unknown words."""
    if any(reader.integer(key, default=0) for key in EXPERT_KEYS):
        return
    known = ", ".join(EXPERT_KEYS)
    if reader.has(*TOP_K_KEYS, "moe_intermediate_size") and not reader.has(*EXPERT_KEYS):
        raise ValueError(
            f"{reader.what}: asks for experts per token but has no known expert count; known keys: {known}"
        )
    raise ValueError(f"{reader.what}: not an MoE model: model_type {family!r} without experts (none of {known})")


def _refuse_latent(reader: _Reader, family: str) -> None:
    """Raise where latent attention is configured for a family that has none."""
    latent = [key for key in LATENT_KEYS if reader.has(key)]
    if latent and family not in LATENT_FAMILIES:
        raise ValueError(
            f"{reader.what}: model_type {family!r} has no latent attention but {', '.join(latent)} given; "
            f"families with it: {', '.join(LATENT_FAMILIES)}"
        )


def _head_dim(reader: _Reader, family: str, heads: int) -> int:
    """head_dim, or hidden / heads where the family defines it so."""
    if reader.has("head_dim") or family == "gpt_oss":
        return reader.integer("head_dim")
    hidden = reader.integer("hidden_size")
    if heads <= 0 or hidden % heads:
        raise ValueError(f"{reader.what}: no head_dim, and hidden_size {hidden} is not divisible by {heads} heads")
    return hidden // heads


def _windows(reader: _Reader, family: str, layers: int) -> dict[str, object]:
    """Sliding windows by layer: from layer_types where given, otherwise by the family's rule."""
    default = GPT_OSS_WINDOW if family == "gpt_oss" and "sliding_window" not in reader.config else 0
    tokens = reader.integer("sliding_window", default=default)
    # Qwen3MoeConfig has windows switched off by default; the other families have no such switch.
    if not reader.flag("use_sliding_window", default=family != "qwen3_moe" or reader.has("layer_types")):
        return {}
    if reader.has("layer_types"):
        windowed = _windowed_types(reader, layers)
    else:
        windowed = tuple(range(0, layers, 2 if family == "gpt_oss" else 1)) if tokens else ()
    if windowed and not tokens:
        raise ValueError(f"{reader.what}: layer_types has sliding_attention but sliding_window is missing")
    return {"window_tokens": tokens, "windowed_layers": windowed} if windowed else {}


def _windowed_types(reader: _Reader, layers: int) -> tuple[int, ...]:
    types = reader.items("layer_types")
    if len(types) != layers:
        raise ValueError(f"{reader.what}: layer_types has {len(types)} entries for {layers} layers")
    known = ("sliding_attention", "full_attention")
    unknown = sorted({repr(kind) for kind in types if kind not in known})
    if unknown:
        raise ValueError(f"{reader.what}: unknown layer type {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")


def _expert_width(reader: _Reader) -> int:
    """The expert width of families whose every MLP is an expert, so that intermediate_size means it."""
    return reader.integer("moe_intermediate_size" if reader.has("moe_intermediate_size") else "intermediate_size")


def _mixtral(reader: _Reader, layers: int) -> dict[str, object]:
    """Softmax over all experts, then the chosen weights normalised."""
    return {"expert_width": _expert_width(reader)}


def _gpt_oss(reader: _Reader, layers: int) -> dict[str, object]:
    """Biases everywhere but the head, one sink per head, softmax over the chosen logits."""
    return {
        "expert_width": _expert_width(reader),
        "router_bias": True,
        "expert_bias": True,
        "sinks": True,
        "scoring": "softmax_after_topk",
    }


def _qwen3_moe(reader: _Reader, layers: int) -> dict[str, object]:
    """RMSNorm on every query and key head; dense layers by step and by list."""
    step = reader.integer("decoder_sparse_step", default=1)
    if step <= 0:
        raise ValueError(f"{reader.what}: decoder_sparse_step must be positive, got {step}")
    listed = {as_int(item, f"{reader.what}: mlp_only_layers") for item in reader.items("mlp_only_layers")}
    dense = sorted(listed | {i for i in range(layers) if (i + 1) % step})
    return {
        "expert_width": reader.integer("moe_intermediate_size"),
        "qk_norm": True,
        "norm_topk_prob": reader.flag("norm_topk_prob", default=False),
        "dense_layers": tuple(dense),
        "dense_width": reader.integer("intermediate_size") if dense else 0,
    }


def _deepseek_ffn(reader: _Reader, layers: int) -> dict[str, object]:
    """What all DeepSeek families share: dense first layers, fused shared experts, scaling."""
    first = reader.integer("first_k_dense_replace", default=0)
    every = reader.integer("moe_layer_freq", default=1)
    if first < 0 or every <= 0:
        raise ValueError(
            f"{reader.what}: first_k_dense_replace must not be negative and moe_layer_freq must be positive, "
            f"got {first} and {every}"
        )
    dense = tuple(i for i in range(layers) if i < first or i % every)
    width = reader.integer("moe_intermediate_size")
    return {
        "expert_width": width,
        "shared_width": reader.integer("n_shared_experts", default=0) * width,
        "dense_layers": dense,
        "dense_width": reader.integer("intermediate_size") if dense else 0,
        "scoring": reader.text("scoring_func", default="softmax"),
        "norm_topk_prob": reader.flag("norm_topk_prob", default=False),
        "routed_scaling_factor": reader.number("routed_scaling_factor", default=1.0),
    }


def _deepseek(reader: _Reader, layers: int) -> dict[str, object]:
    """The first DeepSeekMoE: plain multi-head attention, greedy routing."""
    return _deepseek_ffn(reader, layers)


def _latent(reader: _Reader) -> dict[str, object]:
    mla = LatentAttention(
        q_lora_rank=reader.integer("q_lora_rank") if reader.has("q_lora_rank") else None,
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
    )
    return {"mla": mla, "head_dim": mla.v_head_dim}


def _deepseek_v2(reader: _Reader, layers: int) -> dict[str, object]:
    """Latent attention; routing greedy or limited to the groups with the best expert."""
    groups = reader.integer("n_group", default=1)
    method = reader.text("topk_method", default="greedy" if groups == 1 else None)
    known = ("greedy", "gready", "group_limited_greedy")  # the second is a spelling of the original code
    if method not in known:
        raise ValueError(f"{reader.what}: unknown topk_method {method!r}; known: {', '.join(known)}")
    values = _deepseek_ffn(reader, layers) | _latent(reader)
    if method == "group_limited_greedy":
        values |= {"n_group": groups, "topk_group": reader.integer("topk_group")}
    return values


def _deepseek_v3(reader: _Reader, layers: int) -> dict[str, object]:
    """Latent attention; sigmoid scores with a correction bias, groups by their two best, MTP modules.

    Keys whose default in the model code is V3's own value are required: taken
    over silently, it would be wrong for any other model of the family.
    """
    method = reader.text("topk_method", default="noaux_tc")
    if method != "noaux_tc":
        raise ValueError(f"{reader.what}: unknown topk_method {method!r}; known: noaux_tc")
    reader.integer("first_k_dense_replace")
    return (
        _deepseek_ffn(reader, layers)
        | _latent(reader)
        | {
            "scoring": reader.text("scoring_func", default="sigmoid"),
            "norm_topk_prob": reader.flag("norm_topk_prob", default=True),
            "routed_scaling_factor": reader.number("routed_scaling_factor", default=None),
            "n_group": reader.integer("n_group"),
            "topk_group": reader.integer("topk_group"),
            "group_score": "top2_sum",
            "correction_bias": True,
            "mtp_layers": reader.integer("num_nextn_predict_layers", default=0),
        }
    )


_FAMILIES: Mapping[str, Callable[[_Reader, int], dict[str, object]]] = {
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "mixtral": _mixtral,
}
