"""Bytes that one operation of one micro-batch allocates and frees on one GPU.

Decides what a forward keeps for its backward, tensor by tensor as Megatron-Core
with Transformer Engine does (https://github.com/NVIDIA/Megatron-LM,
megatron/core/transformer/{attention,multi_latent_attention,transformer_layer}.py and
moe/{router,experts,token_dispatcher}.py; https://github.com/NVIDIA/TransformerEngine,
transformer_engine/pytorch): the inputs of every norm and GEMM, the queries, keys
and values and the output of fused attention, and the input of the gated
activation. Beside these stand the temporaries that exist only while the
operation runs.

bf16 throughout. Tensor parallelism comes with sequence parallelism: norms,
residuals and the router hold 1/tp of the tokens, projections 1/tp of the width,
experts are not split by it (expert tensor parallel size 1). Context parallelism
splits the tokens and exchanges heads (`a2a`), which keeps the attention output
twice. All counts are floats or Python integers: nothing here can overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagmoe.cost.recompute import NO_RECOMPUTE, Recompute
from disagmoe.specs import ModelSpec

BF16 = 2
FP32 = 4
ROUTER_BYTES = FP32 + FP32 + 1 + 2 * FP32
"""Per token and expert: scores and probabilities in fp32, the boolean routing map, and the row map of TE's fused
permutation (int32 [2 x experts + 1] per token; transformer_engine/pytorch/triton/permutation.py)."""
LOSS_CHUNK_TOKENS = 2048
"""Tokens whose logits exist at once. The chunk's gradients are formed with its loss, so no logits outlive it."""


@dataclass(frozen=True)
class OpBytes:
    """One forward operation, its recompute and its backward, in bytes on one GPU.

    `saved` is kept from the forward to the backward. `kept` <= `saved` is what
    stays where the operation is recomputed by rows of its own. A backward split
    into I and W keeps `weight_inputs` and `weight_grads` (inputs of the GEMMs and
    gradients of their outputs) from I to W. `forward` and `backward` are
    temporaries beside `saved` while the operation runs.
    """

    saved: float
    kept: float
    weight_inputs: float
    weight_grads: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Shard:
    """Tensor (with sequence) and context parallel size."""

    tp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class Load:
    """What one GPU handles of one micro-batch in one layer, in tokens or token-expert rows.

    `tokens` are those of its context-parallel rank. `rows` go through its experts
    (0 in a dense layer), `home_tokens` through its shared experts or dense MLP.
    `sent` rows leave the attention side of an exchange, `received` rows arrive at
    its expert side (copies merged as the transport does). `experts` are local.
    """

    tokens: float
    rows: float
    home_tokens: float
    sent: float
    received: float
    experts: int = 1


@dataclass(frozen=True)
class LayerBytes:
    """The operations of one kind of layer, and its exchange.

    `sent` and `received` are the buffers at the two sides of one dispatch; a
    combine has the same ones the other way round. `stream` is one activation
    tensor, what pipeline stages send each other.
    """

    attention: OpBytes
    ffn: OpBytes
    sent: float
    received: float
    stream: float


def layer_bytes(
    model: ModelSpec,
    load: Load,
    *,
    moe: bool,
    disaggregated: bool = False,
    frames: bool = False,
    dense_exchange: bool = False,
    retained: float = 0.0,
    recompute: Recompute = NO_RECOMPUTE,
    shard: Shard = Shard(),
) -> LayerBytes:
    """Bytes of one layer with experts (`moe`) or a dense MLP.

    `frames`: the layer runs as one function whose frame holds the buffers of the
    exchange until it returns, as in Megatron-Core's MoELayer.forward; schedulers
    that split a layer into operations free them as they are consumed. `retained`
    are rows of expert outputs kept for the gates' gradient (Tutel applies them
    after the combine). `dense_exchange`: tokens of a dense layer travel too.
    """
    width = model.hidden * BF16
    exchanged = moe or dense_exchange
    sent, received = (load.sent * width, load.received * width) if exchanged else (0.0, 0.0)
    attention = _attention(model, load, recompute, shard, moe=moe, disaggregated=disaggregated)
    if moe:
        ffn = _experts(
            model,
            load,
            recompute,
            shard,
            disaggregated=disaggregated,
            held=sent if frames else None,
            retained=retained * width,
        )
    else:
        ffn = _dense(model, load, recompute, shard, disaggregated=disaggregated)
    return LayerBytes(attention, ffn, sent, received, load.tokens / shard.tp * width)


def _attention(
    model: ModelSpec, load: Load, recompute: Recompute, shard: Shard, *, moe: bool, disaggregated: bool
) -> OpBytes:
    """Norm, projections, fused attention, residual; the second norm and the router where they live here."""
    tokens, local = load.tokens * BF16 / shard.tp, load.tokens * FP32 / shard.tp
    stream = tokens * model.hidden
    whole = stream * shard.tp if shard.tp > 1 else 0.0  # a gathered sequence
    heads = model.heads * tokens
    query, value = heads * model.qk_dim, heads * model.v_dim
    norm = 0.0 if recompute.drops("layernorm") else stream
    second = moe or not disaggregated
    if model.mla is None:
        key_value = 2 * model.kv_heads * model.head_dim * tokens
        projected, latent = query + key_value, 0.0
        head_norms = (model.heads + model.kv_heads) * model.head_dim * tokens if model.qk_norm else 0.0
        qkv, mla_grads = query + key_value, 0.0
        dropped = 0.0
    else:
        mla = model.mla
        projected = heads * (model.qk_dim + mla.qk_nope_head_dim + mla.v_head_dim)
        down = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        latent = tokens * (2 * down + mla.qk_rope_head_dim)  # inputs and outputs of the latent norms
        head_norms = 0.0
        qkv = 2 * query + value
        mla_grads = projected - qkv + tokens * (down + mla.qk_rope_head_dim)
        dropped = qkv if recompute.drops("mla_up_proj") else 0.0
    output = value * (2 if shard.cp > 1 else 1)
    statistics = model.heads * local
    saved = stream + norm + latent + head_norms + qkv - dropped + output + statistics
    if second:
        saved += stream  # input of the second norm
    if moe:
        saved += norm + load.tokens / shard.tp * model.experts * ROUTER_BYTES
    redone = dropped + (stream - norm) * (2 if moe else 1)
    accumulator = heads * model.qk_dim * (FP32 / BF16)  # fp32 gradient of the queries inside the kernel
    return OpBytes(
        saved=saved,
        kept=stream,
        weight_inputs=stream + latent / 2 + output,
        weight_grads=qkv + mla_grads + stream,
        forward=projected + whole,
        backward=stream + value + qkv + accumulator + whole + redone,
    )


def _experts(
    model: ModelSpec,
    load: Load,
    recompute: Recompute,
    shard: Shard,
    *,
    disaggregated: bool,
    held: float | None,
    retained: float,
) -> OpBytes:
    """Routed and shared experts. `held` are the bytes of the dispatch's send buffer that a frame keeps, or None."""
    rows, home = load.rows * BF16, load.home_tokens * BF16
    inputs, act = rows * model.hidden, rows * model.expert_width
    shared = home * model.shared_width
    stream = home * model.hidden / shard.tp
    arrived = load.received * BF16 * model.hidden
    drop = act if recompute.drops("moe_act") else 0.0
    saved = inputs + 3 * act - drop + load.rows * FP32 + 3 * shared / shard.tp + retained
    kept = arrived if recompute.tokens == "keep" else 0.0
    if disaggregated:
        # Rows arrive before the norm and are normalised here: its input is kept, and its output for shared experts.
        saved += arrived + (stream if model.shared_width else 0.0)
    sorts = load.experts > 1
    copy = inputs if sorts else 0.0  # sorting by expert needs a second buffer, before and after
    # In a frame the peak is in the combine: what the experts made and what comes back, all buffers still held.
    forward = inputs + (copy if held is None else held)
    if not sorts and not disaggregated:
        forward -= arrived  # what arrived is itself the experts' input
    # Output gradients (counted as received), then those of the activation and of its input, freed as they go.
    backward = max(copy, act + drop, 2 * act + drop - inputs) + stream
    return OpBytes(
        saved=saved,
        kept=kept,
        weight_inputs=inputs + act + shared / shard.tp,
        weight_grads=inputs + 2 * act + 2 * shared / shard.tp + (stream if model.shared_width else 0.0),
        forward=forward,
        backward=backward,
    )


def _dense(model: ModelSpec, load: Load, recompute: Recompute, shard: Shard, *, disaggregated: bool) -> OpBytes:
    """A dense gated MLP with its norm; disaggregated, the residual arrives here and is the norm's input."""
    home = load.home_tokens * BF16
    stream, act = home * model.hidden / shard.tp, home * model.dense_width / shard.tp
    whole = stream * shard.tp if shard.tp > 1 else 0.0
    saved = stream + 3 * act + (stream if disaggregated else 0.0)
    kept = stream if disaggregated and recompute.tokens == "keep" else 0.0
    return OpBytes(
        saved=saved,
        kept=kept,
        weight_inputs=stream + act,
        weight_grads=stream + 2 * act,
        forward=stream + whole,
        backward=stream + max((whole or stream) + act, 2 * act),
    )


def head_bytes(
    model: ModelSpec,
    tokens: float,
    *,
    parts: int = 1,
    chunk: int | None = LOSS_CHUNK_TOKENS,
    shard: Shard = Shard(),
) -> OpBytes:
    """Final norm, output matrix and cross entropy of `tokens` tokens over 1 / `parts` of the vocabulary.

    With a `chunk` the logits of so many tokens exist at a time and the gradient
    of the norm's output is formed in the forward. Without one all logits are kept
    in bf16 until the backward, which turns them into their gradient in place
    (transformer_engine/pytorch/cross_entropy.py). The backward returns one dummy
    weight gradient (megatron/core/tensor_parallel/layers.py).
    """
    stream = tokens * model.hidden * BF16 / shard.tp
    whole = stream * shard.tp if shard.tp > 1 else 0.0
    row = model.vocab * BF16 / shard.tp / parts
    dummy = row * model.hidden
    if chunk is None:
        return OpBytes(2 * stream + tokens * row, stream, stream, 0.0, whole, dummy + whole + stream)
    logits = min(float(chunk), tokens) * row
    return OpBytes(2 * stream, stream, 0.0, 0.0, logits + dummy + whole, stream)


def embed_bytes(model: ModelSpec, tokens: float, *, shard: Shard = Shard()) -> OpBytes:
    """The look-up. Its backward makes a dense bf16 gradient before adding it to the fp32 one."""
    dense = model.vocab * model.hidden * BF16 / shard.tp
    return OpBytes(0.0, 0.0, 0.0, 0.0, tokens * model.hidden * BF16 / shard.tp, dense)
