"""FLOPs per token against published figures and closed forms; MFU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.cost.flops import (
    forward_flops,
    mean_keys,
    mfu,
    qkv_flops,
    score_flops,
    train_flops_per_token,
)
from disagmoe.specs import device, load_model, model_names, parameters

TRAINING = {
    # 6 x matmul weights, then scores: full square at 4096 and 32768, exact causal at 4096 and 32768
    "deepseek_moe_16b": (15_712_911_360, 2_818_572_288, 22_548_578_304, 1_409_630_208, 11_274_633_216),
    "deepseek_v2_lite": (14_707_851_264, 3_397_386_240, 27_179_089_920, 1_699_107_840, 13_589_959_680),
    "deepseek_v2": (125_104_619_520, 60_397_977_600, 483_183_820_800, 30_206_361_600, 241_599_283_200),
    "deepseek_v3": (219_747_581_952, 61_404_610_560, 491_236_884_480, 30_709_800_960, 245_625_937_920),
    "mixtral_8x7b": (76_491_522_048, 6_442_450_944, 51_539_607_552, 3_222_011_904, 25_770_590_208),
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_flops_to_the_digit(name: str) -> None:
    model = load_model(name)
    weights, *scores = TRAINING[name]
    cases = [(4096, False), (32768, False), (4096, True), (32768, True)]
    assert [3 * forward_flops(model, seq, causal).scores for seq, causal in cases] == scores
    for (seq, causal), score in zip(cases, scores, strict=True):
        assert train_flops_per_token(model, seq, causal) == weights + score


@pytest.mark.parametrize("name", model_names())
def test_matmul_weights_are_the_active_parameters_but_vectors(name: str) -> None:
    """6N of the active parameters without the look-up: what is left out are norms, biases and sinks only."""
    model = load_model(name)
    flops = forward_flops(model, 4096)
    active = 6 * parameters(model).active_no_input_embedding
    assert 3 * (flops.total - flops.scores) == pytest.approx(active, rel=0.005)
    assert 3 * (flops.total - flops.scores) < active


def test_reference_of_qwen3_30b_at_8192() -> None:
    model = load_model("qwen3_30b")
    assert train_flops_per_token(model, 8192, causal=False) == 37_577_293_824
    assert train_flops_per_token(model, 8192, causal=False) == pytest.approx(37_578_559_488, rel=5e-5)
    assert 3 * forward_flops(model, 8192, causal=False).scores == 19_327_352_832
    assert 3 * forward_flops(model, 8192, causal=True).scores == 9_664_856_064


def test_scores_cost_query_heads_times_head_width() -> None:
    model = load_model("qwen3")
    assert 3 * score_flops(model, 0, 4096, causal=False) == 402_653_184
    many = replace(model, kv_heads=64)
    assert score_flops(many, 0, 4096) == score_flops(model, 0, 4096)
    assert qkv_flops(many) - qkv_flops(model) == 2 * 4096 * 2 * 60 * 128


def test_latent_attention_has_two_head_widths() -> None:
    model = load_model("deepseek_v3")
    assert 3 * score_flops(model, 0, 4096, causal=False) == 1_006_632_960


@pytest.mark.parametrize(
    ("name", "published_gflops"),
    [("qwen3", 148.0), ("qwen3_30b", 23.0)],
)
def test_published_flops_per_token_at_4k(name: str, published_gflops: float) -> None:
    assert train_flops_per_token(load_model(name), 4096) / 1e9 == pytest.approx(published_gflops, rel=0.01)


def test_deepseek_v3_with_mtp_at_4k() -> None:
    """NVIDIA's published TFLOP/s over tokens/s for DeepSeek-V3 with its MTP module: 260.6 GF per token."""
    model = load_model("deepseek_v3")
    assert train_flops_per_token(model, 4096, mtp=True) / 1e9 == pytest.approx(260.6, rel=0.01)
    assert train_flops_per_token(model, 4096) / 1e9 == pytest.approx(250.5, rel=0.001)


def test_gpt_oss_differs_from_the_published_quotient_by_its_convention() -> None:
    """The published 27.2 GF per token counts less than head, windows and experts add up to: ours is 32.7."""
    model = load_model("gpt_oss")
    ours = train_flops_per_token(model, 4096) / 1e9
    assert ours == pytest.approx(32.7, rel=0.002)
    assert ours / 27.2 == pytest.approx(1.203, rel=0.005)
    assert 3 * forward_flops(model, 4096).head / 1e9 == pytest.approx(3.5, rel=0.01)


def test_windowed_layers_cost_their_window() -> None:
    model = load_model("gpt_oss")
    mean = (128 * 129 / 2 + (4096 - 128) * 128) / 4096
    assert score_flops(model, 0, 4096) == 2 * 64 * 128 * mean
    assert score_flops(model, 1, 4096) == 2 * 64 * 128 * 2048.5


@given(st.integers(1, 300), st.none() | st.integers(1, 400))
def test_mean_keys_is_the_mean_over_positions(seq: int, window: int | None) -> None:
    limit = seq if window is None else window
    counted = sum(min(position + 1, limit) for position in range(seq)) / seq
    assert mean_keys(seq, window) == pytest.approx(counted, rel=1e-12)
    assert mean_keys(seq, window, causal=False) == min(seq, limit)


def test_mean_keys_refuses_an_empty_sequence() -> None:
    with pytest.raises(ValueError, match="seq must be positive, got 0"):
        mean_keys(0, None)


@given(st.sampled_from(model_names()), st.integers(1, 65536))
def test_components_add_up(name: str, seq: int) -> None:
    flops = forward_flops(load_model(name), seq)
    parts = (flops.qkv, flops.scores, flops.output, flops.router)
    parts += (flops.routed_experts, flops.shared_experts, flops.dense_ffn, flops.head)
    assert flops.total == pytest.approx(sum(parts), rel=1e-12)
    assert min(parts) >= 0


def test_mfu_of_the_reference_run() -> None:
    flops = train_flops_per_token(load_model("qwen3_30b"), 8192, causal=False)
    assert mfu(10_000, flops, device("H800").peak_bf16_tflops) == pytest.approx(0.37997, abs=2e-5)


@pytest.mark.parametrize("tokens_per_s", [51_000.0, float("nan"), float("inf"), -1.0])
def test_an_impossible_mfu_is_an_error(tokens_per_s: float) -> None:
    with pytest.raises(ValueError, match="outside 0 to 1"):
        mfu(tokens_per_s, 19.4e9, 989.0)


@pytest.mark.parametrize("peak", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_peak_is_an_error(peak: float) -> None:
    with pytest.raises(ValueError, match="peak_tflops must be positive"):
        mfu(1.0, 1.0, peak)
