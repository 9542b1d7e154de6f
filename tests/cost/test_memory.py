"""Bytes of one operation against counts written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.cost.memory import LOSS_CHUNK_TOKENS, Load, OpBytes, Shard, embed_bytes, head_bytes, layer_bytes
from disagmoe.cost.recompute import MODES, Recompute
from disagmoe.ops import Kind
from disagmoe.specs import ModelSpec, load_model
from tests.plan.memory_cases import llama

T = 4096
LLAMA = llama("llama", 2, 8192, 64, 8, 28672)


def dense_load(tokens: float = T) -> Load:
    return Load(tokens, 0.0, tokens, tokens, tokens)


def moe_load(model: ModelSpec, tokens: float = T, experts: int = 8) -> Load:
    rows = tokens * model.top_k
    return Load(tokens, rows, tokens, rows, rows, experts)


def test_dense_layer_of_llama_70b_keeps_what_its_kernels_read() -> None:
    layer = layer_bytes(LLAMA, dense_load(), moe=False)
    stream = T * 8192 * 2
    qkv = T * (64 + 2 * 8) * 128 * 2
    statistics = T * 64 * 4
    # Input, first norm, queries/keys/values, attention output, row statistics, input of the second norm.
    assert layer.attention.saved == stream + stream + qkv + stream + statistics + stream
    # Second norm, gate and up (2 x 28672), their product (28672).
    assert layer.ffn.saved == stream + T * 3 * 28672 * 2
    assert layer.attention.saved + layer.ffn.saved == pytest.approx(1_125_122_048)
    assert (layer.sent, layer.received, layer.stream) == (0.0, 0.0, stream)


def test_moe_layer_of_qwen3_30b_keeps_k_rows() -> None:
    model = load_model("qwen3_30b")
    layer = layer_bytes(model, moe_load(model), moe=True)
    stream = T * 2048 * 2
    qkv = T * (32 + 2 * 4) * 128 * 2
    before_head_norms = T * (32 + 4) * 128 * 2
    output = T * 32 * 128 * 2
    router = T * 128 * (4 + 4 + 1 + 8)
    assert layer.attention.saved == 4 * stream + qkv + before_head_norms + output + T * 32 * 4 + router
    rows = T * 8
    assert layer.ffn.saved == rows * (2048 + 3 * 768) * 2 + rows * 4
    assert layer.sent == layer.received == rows * 2048 * 2


def test_latent_attention_keeps_its_latents_and_the_expanded_heads() -> None:
    model = load_model("deepseek_v2_lite")
    layer = layer_bytes(model, moe_load(model), moe=True)
    per_token = 4 * 2048  # input, both norms, input of the second norm
    per_token += (512 + 64) + 512  # compressed keys and values with the rotary key, and after their norm
    per_token += 16 * (192 + 192 + 128) + 16 * 128  # queries, keys, values; output
    assert layer.attention.saved == T * (2 * per_token + 16 * 4 + 64 * 17)
    # Two shared experts of 1408 run on the token's own rank.
    assert layer.ffn.saved == T * 6 * ((2048 + 3 * 1408) * 2 + 4) + T * 3 * 2816 * 2


def test_long_sequences_do_not_overflow() -> None:
    model = load_model("deepseek_v3")
    for tokens, elements in ((38_000, 2_179_072_000), (65_536, 3_758_096_384)):
        layer = layer_bytes(model, moe_load(model, tokens), moe=True)
        assert layer.sent == 2 * elements > 2**31
        assert layer.ffn.saved > layer.sent
    assert layer.sent == 7_516_192_768


def test_tensor_parallelism_splits_widths_and_sequences() -> None:
    whole = layer_bytes(LLAMA, dense_load(), moe=False)
    split = layer_bytes(LLAMA, dense_load(), moe=False, shard=Shard(tp=8))
    assert split.attention.saved == pytest.approx(whole.attention.saved / 8)
    assert split.ffn.saved == pytest.approx(whole.ffn.saved / 8)
    # Temporaries shrink less: a gathered sequence is whole.
    assert split.attention.backward > whole.attention.backward / 8


def test_context_parallelism_keeps_the_output_before_and_after_its_exchange() -> None:
    alone = layer_bytes(LLAMA, dense_load(), moe=False)
    shared = layer_bytes(LLAMA, dense_load(), moe=False, shard=Shard(cp=8))
    assert shared.attention.saved - alone.attention.saved == T * 64 * 128 * 2
    assert shared.ffn == alone.ffn


def test_selective_recompute_drops_what_it_names() -> None:
    qwen, lite = load_model("qwen3_30b"), load_model("deepseek_v2_lite")
    none = layer_bytes(qwen, moe_load(qwen), moe=True)
    some = layer_bytes(qwen, moe_load(qwen), moe=True, recompute=Recompute("selective", "selective"))
    assert none.attention.saved - some.attention.saved == 2 * T * 2048 * 2  # both norms
    assert none.ffn.saved - some.ffn.saved == T * 8 * 768 * 2  # the activation's output
    only_act = Recompute("selective", "selective", modules=("moe_act",))
    assert layer_bytes(qwen, moe_load(qwen), moe=True, recompute=only_act).attention.saved == none.attention.saved
    latent = Recompute("selective", "none", modules=("mla_up_proj",))
    dropped = layer_bytes(lite, moe_load(lite), moe=True, recompute=latent)
    assert layer_bytes(lite, moe_load(lite), moe=True).attention.saved - dropped.attention.saved == (
        T * 16 * (192 + 192 + 128) * 2
    )
    # What was dropped is there again while the backward runs.
    assert dropped.attention.backward > layer_bytes(lite, moe_load(lite), moe=True).attention.backward


def test_full_recompute_keeps_inputs_only() -> None:
    model = load_model("qwen3_30b")
    resend = layer_bytes(model, moe_load(model), moe=True, recompute=Recompute("full", "full"))
    keep = layer_bytes(model, moe_load(model), moe=True, recompute=Recompute("full", "full", tokens="keep"))
    assert resend.attention.kept == keep.attention.kept == T * 2048 * 2
    assert resend.ffn.kept == 0.0
    assert keep.ffn.kept == T * 8 * 2048 * 2
    assert resend.ffn.saved == layer_bytes(model, moe_load(model), moe=True).ffn.saved


def test_policies_say_what_a_program_repeats() -> None:
    assert Recompute.of({}).repeated(disaggregated=False) == frozenset()
    assert Recompute.of({"recompute": "selective"}).repeated(disaggregated=True) == frozenset()
    whole = Recompute.of({"recompute": "full"})
    # Megatron repeats the layer as one function, its combine included.
    assert whole.repeated(disaggregated=False) == {Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE}
    assert whole.repeated(disaggregated=True) == {Kind.ATTN, Kind.DISPATCH, Kind.FFN}
    keep = Recompute.of({"recompute": "full", "recompute_tokens": "keep"})
    assert keep.repeated(disaggregated=True) == {Kind.ATTN, Kind.FFN}
    mixed = Recompute.of({"recompute_attention": "none", "recompute_ffn": "full", "recompute_tokens": "keep"})
    assert mixed.repeated(disaggregated=True) == {Kind.FFN}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recompute": "some"}, "'some': allowed are none, selective, full"),
        ({"recompute_tokens": "twice"}, "'twice': allowed are resend, keep"),
    ],
)
def test_unknown_policies_are_refused_in_one_line(options: dict[str, str | int | float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recompute.of(options)
    with pytest.raises(ValueError, match="allowed are layernorm, moe_act, mla_up_proj"):
        Recompute("selective", modules=("core_attn",))
    with pytest.raises(ValueError, match="tp=0"):
        Shard(tp=0)


def test_a_frame_holds_the_exchange_until_the_combine_is_done() -> None:
    model = load_model("qwen3_30b")
    alone = layer_bytes(model, moe_load(model), moe=True)
    framed = layer_bytes(model, moe_load(model), moe=True, frames=True)
    one_buffer = T * 8 * 2048 * 2
    # Split: outputs and their unsorted copy. In a frame: unsorted outputs and what the combine brings back.
    assert (alone.ffn.forward, framed.ffn.forward) == (2 * one_buffer, 2 * one_buffer)
    # With one local expert nothing is sorted, and what arrived is the experts' input itself.
    single = layer_bytes(model, moe_load(model, experts=1), moe=True, frames=True)
    assert single.ffn.forward == one_buffer


def test_disaggregated_experts_keep_the_rows_before_their_norm() -> None:
    model = load_model("qwen3_30b")
    load = replace(moe_load(model), received=2.5 * T)
    here, there = (layer_bytes(model, load, moe=True, disaggregated=d) for d in (False, True))
    assert there.ffn.saved - here.ffn.saved == 2.5 * T * 2048 * 2
    # A dense layer's residual lives with the MLP, so attention does not keep the second norm's input.
    dense = layer_bytes(LLAMA, dense_load(), moe=False, disaggregated=True, dense_exchange=True)
    colocated = layer_bytes(LLAMA, dense_load(), moe=False)
    assert dense.attention.saved == colocated.attention.saved - T * 8192 * 2
    assert dense.ffn.saved == colocated.ffn.saved + T * 8192 * 2
    assert dense.sent == T * 8192 * 2


def test_logits_exist_one_chunk_at_a_time() -> None:
    model = load_model("gpt_oss")
    row = 201_088 * 2
    chunked, whole = head_bytes(model, 32_768), head_bytes(model, 32_768, chunk=None)
    assert whole.saved - chunked.saved == 32_768 * row
    assert chunked.forward == LOSS_CHUNK_TOKENS * row + 201_088 * 2880 * 2
    short = head_bytes(model, 100)
    assert short.forward == 100 * row + 201_088 * 2880 * 2
    # A spread head holds its part of the vocabulary and all rows.
    part = head_bytes(model, 32_768, parts=4)
    assert (part.saved, part.forward) == (chunked.saved, chunked.forward / 4)
    assert embed_bytes(model, 32_768).backward == 201_088 * 2880 * 2


def _all(layer_ops: tuple[OpBytes, ...]) -> None:
    for op in layer_ops:
        assert 0.0 <= op.kept <= op.saved
        assert min(op.weight_inputs, op.weight_grads, op.backward) >= 0.0


@given(
    tokens=st.integers(1, 10**6),
    experts=st.integers(1, 16),
    attention=st.sampled_from(MODES),
    ffn=st.sampled_from(MODES),
    tp=st.sampled_from((1, 2, 4)),
    disaggregated=st.booleans(),
    name=st.sampled_from(("qwen3_30b", "deepseek_v3", "gpt_oss", "deepseek_v2_lite")),
)
def test_bytes_are_proportional_to_tokens(
    tokens: int, experts: int, attention: str, ffn: str, tp: int, disaggregated: bool, name: str
) -> None:
    model = load_model(name)
    policy = Recompute(attention, ffn)

    def at(n: float) -> tuple[OpBytes, ...]:
        layer = layer_bytes(
            model,
            moe_load(model, n, experts),
            moe=True,
            disaggregated=disaggregated,
            recompute=policy,
            shard=Shard(tp=tp),
        )
        return layer.attention, layer.ffn

    one, three = at(tokens), at(3 * tokens)
    _all(one)
    for single, triple in zip(one, three, strict=True):
        assert triple.saved == pytest.approx(3 * single.saved)
        assert triple.backward == pytest.approx(3 * single.backward)
