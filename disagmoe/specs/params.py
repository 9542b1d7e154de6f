"""Parameters by component, for the whole model and for one layer.

Decides what counts as a parameter and which "active" count is meant. Counts
belong to the model: replicas on other ranks are not added, however it is placed.
The router's correction bias counts, as in published totals of DeepSeek-V3.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagmoe.specs.architecture import ModelSpec

MATRICES_PER_MLP = 3
"""Gate, up and down projection of a gated MLP."""


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model by component; the components add up to `total`.

    `norms` are the RMSNorms of the layers and the last one (those inside
    attention belong to `attention`). `head` is 0 where it is tied to the
    embedding. `mtp` are the unique parameters of the multi-token-prediction
    modules; they are in no other figure.
    """

    embedding: int
    attention: int
    norms: int
    router: int
    routed_experts: int
    shared_experts: int
    dense_ffn: int
    head: int
    active_experts: int
    tied: bool
    mtp: int = 0

    @property
    def total(self) -> int:
        """Every parameter of the main model, once."""
        return self.attention_side + self.expert_side

    @property
    def attention_side(self) -> int:
        """What is not an MLP: attention, norms, router, embedding and head."""
        return self.embedding + self.attention + self.norms + self.router + self.head

    @property
    def expert_side(self) -> int:
        """Every MLP: routed and shared experts and dense layers."""
        return self.routed_experts + self.shared_experts + self.dense_ffn

    @property
    def active_all(self) -> int:
        """Parameters one token meets, with both embeddings."""
        return self.total - self.routed_experts + self.active_experts

    @property
    def active_no_input_embedding(self) -> int:
        """As `active_all` without the look-up. A tied matrix stays: the head multiplies by it."""
        return self.active_all - (0 if self.tied else self.embedding)

    @property
    def active_no_embeddings(self) -> int:
        """As `active_all` without the input embedding and the output matrix."""
        return self.active_all - self.embedding - self.head

    @property
    def total_with_mtp(self) -> int:
        """`total` plus the unique parameters of the multi-token-prediction modules."""
        return self.total + self.mtp

    @property
    def components(self) -> dict[str, int]:
        """Component name -> parameters, in reading order; sums to `total`."""
        keys = ("embedding", "attention", "norms", "router", "routed_experts", "shared_experts", "dense_ffn", "head")
        return {key: getattr(self, key) for key in keys}


def parameters(model: ModelSpec) -> ParameterCount:
    """Count the parameters of `model`."""
    moe, dense = model.moe_layers, len(model.dense_layers)
    return ParameterCount(
        embedding=embedding_params(model),
        attention=model.layers * self_attention_params(model),
        norms=(2 * model.layers + 1) * model.hidden,
        router=moe * router_params(model),
        routed_experts=moe * model.experts * expert_params(model),
        shared_experts=moe * _mlp(model, model.shared_width),
        dense_ffn=dense * _mlp(model, model.dense_width),
        head=0 if model.tied else model.hidden * model.vocab,
        active_experts=moe * model.top_k * expert_params(model),
        tied=model.tied,
        mtp=model.mtp_layers * _mtp_module(model),
    )


def self_attention_params(model: ModelSpec) -> int:
    """Projections, their biases, head norms and sinks of one attention block."""
    extras = model.heads if model.sinks else 0
    if model.mla is None:
        query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
        weights = model.hidden * (query + 2 * key) + query * model.hidden
        biases = query + 2 * key + model.hidden if model.attention_bias else 0
        norms = 2 * model.head_dim if model.qk_norm else 0
        return weights + biases + norms + extras
    return _latent_attention_params(model) + extras


def _latent_attention_params(model: ModelSpec) -> int:
    assert model.mla is not None
    mla, hidden, heads = model.mla, model.hidden, model.heads
    down = mla.kv_lora_rank + mla.qk_rope_head_dim
    weights = hidden * down + mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    weights += heads * mla.v_head_dim * hidden
    norms = mla.kv_lora_rank
    biases = down + hidden
    if mla.q_lora_rank is None:
        weights += hidden * heads * model.qk_dim
    else:
        weights += hidden * mla.q_lora_rank + mla.q_lora_rank * heads * model.qk_dim
        norms += mla.q_lora_rank
        biases += mla.q_lora_rank
    return weights + norms + (biases if model.attention_bias else 0)


def router_params(model: ModelSpec) -> int:
    """Router of one MoE layer: matrix, bias and correction bias."""
    return model.experts * (model.hidden + int(model.router_bias) + int(model.correction_bias))


def attention_params(model: ModelSpec, layer: int) -> int:
    """What an attention worker holds of `layer`: attention, both norms and, in an MoE layer, the router."""
    router = router_params(model) if model.is_moe(layer) else 0
    return self_attention_params(model) + 2 * model.hidden + router


def ffn_shared_params(model: ModelSpec, layer: int) -> int:
    """What every FFN rank holds of `layer`: its dense MLP or its shared experts."""
    return _mlp(model, model.shared_width if model.is_moe(layer) else model.dense_width)


def expert_params(model: ModelSpec) -> int:
    """One routed expert."""
    biases = 2 * model.expert_width + model.hidden if model.expert_bias else 0
    return _mlp(model, model.expert_width) + biases


def embedding_params(model: ModelSpec) -> int:
    """Input embedding."""
    return model.vocab * model.hidden


def head_params(model: ModelSpec) -> int:
    """What the worker of the output head holds: output matrix (its own copy even where tied) and last norm."""
    return model.vocab * model.hidden + model.hidden


def _mlp(model: ModelSpec, width: int) -> int:
    return MATRICES_PER_MLP * model.hidden * width


def _mtp_module(model: ModelSpec) -> int:
    """One multi-token-prediction module without its copies of embedding and head.

    Two input norms, a projection from 2 x hidden to hidden, one MoE layer and
    its last norm (DeepSeek-V3, README_WEIGHTS.md).
    """
    layer = self_attention_params(model) + 2 * model.hidden + router_params(model)
    layer += _mlp(model, model.shared_width) + model.experts * expert_params(model)
    return 3 * model.hidden + 2 * model.hidden * model.hidden + layer
