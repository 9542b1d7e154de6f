from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.cost import CostModel, flops, load_calibration
from disagmoe.cost.compute import Compute, Gemm, mlp, projections
from disagmoe.ops import Phase
from disagmoe.specs import Workload, device, load_cluster, load_model
from tests.cost.reference import costs

H800 = device("H800")
RATES = load_calibration("h800").rates
COMPUTE = Compute(RATES, H800)
HBM = 3350e9 * RATES.hbm_efficiency
LAUNCH = RATES.launch_us * 1e-6
MODELS = ["qwen3", "gpt_oss", "deepseek_moe", "deepseek_moe_16b", "deepseek_v3", "mixtral_8x7b", "tiny"]
LAYER_TYPES = [("qwen3", 0), ("gpt_oss", 0), ("gpt_oss", 1), ("deepseek_v3", 0), ("deepseek_v3", 60), ("tiny", 0)]
TOKENS = 4096


def flops_of(gemms: list[Gemm], phase: Phase = Phase.F) -> float:
    return sum(COMPUTE.gemm(gemm, phase).flops for gemm in gemms)


@pytest.mark.parametrize("name", MODELS)
def test_gemms_do_the_flops_that_are_counted(name: str) -> None:
    model = load_model(name)
    moe = flops.qkv_flops(model) + flops.output_flops(model) + flops.router_flops(model)
    for phase in (Phase.F, Phase.I, Phase.W):
        assert flops_of(projections(model, True, TOKENS), phase) == pytest.approx(TOKENS * moe)
    dense = flops.qkv_flops(model) + flops.output_flops(model)
    assert flops_of(projections(model, False, TOKENS)) == pytest.approx(TOKENS * dense)
    experts = mlp(model.hidden, model.expert_width, TOKENS, groups=8, use="grouped")
    assert flops_of(experts) == pytest.approx(TOKENS * flops.expert_flops(model))
    shared = mlp(model.hidden, model.shared_width, TOKENS)
    assert flops_of(shared) == pytest.approx(TOKENS * flops.shared_flops(model))


@pytest.mark.parametrize(("name", "layer"), LAYER_TYPES)
@pytest.mark.parametrize("seq", [64, 4096, 32768])
def test_scores_use_causal_flops_and_the_padded_tiles(name: str, layer: int, seq: int) -> None:
    """The attention time uses the causal half, once, and both head widths of MLA."""
    model = load_model(name)
    exact = Compute(replace(RATES, attention_pad_keys=0.0), H800)
    kernel = exact.scores(model, model.window(layer), seq, 3.0, Phase.F)
    assert kernel.flops == pytest.approx(3 * seq * flops.score_flops(model, layer, seq))
    backward = exact.scores(model, model.window(layer), seq, 3.0, Phase.I)
    assert backward.flops == pytest.approx(2.5 * kernel.flops)
    assert backward.efficiency == pytest.approx(kernel.efficiency * RATES.attention_backward_ratio)
    padded = COMPUTE.scores(model, model.window(layer), seq, 3.0, Phase.F)
    per_key = 2 * (model.qk_dim + model.v_dim) * model.heads
    tiles = per_key * RATES.attention_pad_keys * 3 * seq
    full_square = per_key * seq * 3 * seq
    assert padded.flops == pytest.approx(min(kernel.flops + tiles, full_square))
    assert (padded.flops == pytest.approx(full_square)) == (seq == 64)


def test_scores_cost_published_flops() -> None:
    # Full square, training (x3): 402,653,184 for Qwen3-235B, 1,006,632,960 for DeepSeek-V3 at 4096.
    exact = Compute(replace(RATES, attention_pad_keys=0.0), H800)
    for name, full_square in (("qwen3", 402_653_184), ("deepseek_v3", 1_006_632_960)):
        kernel = exact.scores(load_model(name), None, 4096, 1.0, Phase.F)
        assert 3 * kernel.flops / 4096 == pytest.approx(full_square * 4097 / (2 * 4096))


def test_kernel_is_bound_by_arithmetic_or_memory() -> None:
    wide = Gemm(16384, 4096, 8192)
    expected = 2 * 16384 * 4096 * 8192 / (989e12 * RATES.dense_efficiency) * (1 + RATES.dense_rows_half / 16384)
    assert COMPUTE.seconds([COMPUTE.gemm(wide, Phase.F)]) == pytest.approx(expected + LAUNCH)
    # One row: the weights have to be read, 2 bytes each; their gradient is read and written in fp32.
    narrow = Gemm(1, 4096, 8192)
    weights = 4096 * 8192
    read = COMPUTE.seconds([COMPUTE.gemm(narrow, Phase.I)]) - LAUNCH
    assert read == pytest.approx(2 * weights / HBM, rel=1e-3)
    gradient = COMPUTE.seconds([COMPUTE.gemm(narrow, Phase.W)]) - LAUNCH
    assert gradient == pytest.approx(8 * weights / HBM, rel=1e-3)


def test_grouped_efficiency_falls_with_few_rows_per_expert() -> None:
    few, many = Gemm(8192, 4096, 3072, 64, "grouped"), Gemm(8192, 4096, 3072, 1, "grouped")
    ratio = COMPUTE.gemm(few, Phase.F).efficiency / COMPUTE.gemm(many, Phase.F).efficiency
    half = RATES.grouped_rows_half
    assert ratio == pytest.approx(128 / (128 + half) * (8192 + half) / 8192)


def test_optimizer_is_bound_by_hbm() -> None:
    # fp32 gradient read (4); master, m and v read and written (24); bf16 weight written (2).
    assert costs("h800").optimizer(1e9) == pytest.approx(30e9 / HBM + LAUNCH)


def test_head() -> None:
    model = costs("h800")
    gemm = COMPUTE.seconds([COMPUTE.gemm(Gemm(TOKENS, 4096, 151936), Phase.F)])
    logits = 2 * TOKENS * 151936
    forward = model.head(Phase.F, TOKENS)
    assert forward == pytest.approx(gemm + (logits + 4 * 4096 * TOKENS) / HBM + 2 * LAUNCH)
    backward = model.head(Phase.I, TOKENS)
    assert backward == pytest.approx(gemm + (2 * logits + 6 * 4096 * TOKENS) / HBM + 2 * LAUNCH)
    # The head is worth two to four layers of this model.
    layer = model.attention(0, Phase.F, 1) + model.ffn(0, Phase.F, home_tokens=TOKENS, rows=8 * TOKENS, local_experts=8)
    assert 1.0 < forward / layer < 4.0
    assert model.head(Phase.F, TOKENS, vocab_shards=8) == pytest.approx(forward / 8, rel=0.05)
    with pytest.raises(ValueError, match="vocab_shards must be at least 1, got 0"):
        model.head(Phase.F, TOKENS, vocab_shards=0)


def test_embedding() -> None:
    model = costs("h800")
    assert model.embed(Phase.F, TOKENS) == pytest.approx(4 * 4096 * TOKENS / HBM + LAUNCH)
    assert model.embed(Phase.I, TOKENS) == 0.0
    assert model.embed(Phase.B, TOKENS) == model.embed(Phase.W, TOKENS) > 0.0


@pytest.mark.parametrize("calibration", ["h800", "h100", "paper-profile", "laptop"])
@pytest.mark.parametrize("name", MODELS)
def test_backward_is_input_plus_weight_and_recompute_is_forward(name: str, calibration: str) -> None:
    model = costs(calibration, model=name)
    for layer in (0, model.model.layers - 1):
        rows = 8192.0 if model.model.is_moe(layer) else 0.0
        for times in (
            {phase: model.attention(layer, phase, 2.0) for phase in Phase},
            {phase: model.ffn(layer, phase, home_tokens=512.0, rows=rows, local_experts=4.0) for phase in Phase},
            {phase: model.head(phase, 512.0) for phase in Phase},
        ):
            assert times[Phase.B] == pytest.approx(times[Phase.I] + times[Phase.W], rel=1e-12)
            assert times[Phase.R] == times[Phase.F]
            assert min(times.values()) > 0.0
            assert times[Phase.F] < times[Phase.B] < 4.0 * times[Phase.F]


def test_ffn_of_a_dense_layer_and_of_idle_ranks() -> None:
    model = costs("h800", model="deepseek_v3")
    dense = model.ffn(0, Phase.F, home_tokens=TOKENS, rows=0.0, local_experts=0.0)
    gemms = COMPUTE.seconds([COMPUTE.gemm(gemm, Phase.F) for gemm in mlp(7168, 18432, TOKENS)])
    assert gemms < dense < 1.2 * gemms
    assert model.ffn(60, Phase.F, home_tokens=0.0, rows=0.0, local_experts=16.0) == 0.0
    with pytest.raises(ValueError, match="8 expert rows need a MoE layer"):
        model.ffn(0, Phase.F, home_tokens=1.0, rows=8.0, local_experts=1.0)


def test_windowed_layers_stay_linear_in_the_sequence() -> None:
    short, long = (costs("h800", model="gpt_oss", seq=seq) for seq in (8192, 32768))
    # Same number of tokens; layer 0 has a window of 128, layer 1 attends to everything.
    assert long.attention(0, Phase.F, 1.0) == pytest.approx(short.attention(0, Phase.F, 4.0), rel=0.02)
    assert long.attention(1, Phase.F, 1.0) > 1.8 * short.attention(1, Phase.F, 4.0)


@given(
    phase=st.sampled_from(list(Phase)),
    tokens=st.floats(1.0, 1e6),
    more=st.floats(1.0, 3.0),
    experts=st.sampled_from([1.0, 8.0, 64.0]),
    sequences=st.floats(0.01, 64.0),
)
def test_more_work_takes_longer(phase: Phase, tokens: float, more: float, experts: float, sequences: float) -> None:
    model = costs("h800")
    pairs = [
        (model.attention(3, phase, sequences), model.attention(3, phase, sequences * more)),
        (model.embed(phase, tokens), model.embed(phase, tokens * more)),
        (model.head(phase, tokens), model.head(phase, tokens * more)),
        (
            model.ffn(3, phase, home_tokens=tokens, rows=8 * tokens, local_experts=experts),
            model.ffn(3, phase, home_tokens=tokens, rows=8 * tokens * more, local_experts=experts),
        ),
    ]
    for less, greater in pairs:
        assert 0.0 <= less <= greater * (1 + 1e-12)


def test_layers_of_one_kind_share_their_price() -> None:
    model = CostModel(load_model("gpt_oss"), load_cluster("h800_128"), load_calibration("h800"), Workload(4096, 128))
    assert model.attention(0, Phase.F, 1.0) == model.attention(34, Phase.F, 1.0) < model.attention(1, Phase.F, 1.0)


def test_copies_and_norm_cost_their_bytes() -> None:
    """A packed copy is written (2 bytes x hidden), a returned one read; a norm reads and writes its rows."""
    model, row_s = costs("h800"), 2 * 4096 / HBM
    packed = [model.attention(0, Phase.F, 1.0, packed=copies) for copies in (0.0, 2.0, 8.0)]
    assert packed[1] - packed[0] == pytest.approx(3 * 4096 * row_s + LAUNCH)
    assert packed[2] - packed[1] == pytest.approx(6 * 4096 * row_s)
    assert packed[2] == model.attention(0, Phase.F, 1.0)

    def experts(phase: Phase, **more: float) -> float:
        return model.ffn(0, phase, home_tokens=TOKENS, rows=8 * TOKENS, local_experts=8.0, **more)

    assert experts(Phase.F) - experts(Phase.F, returned=1.0) == pytest.approx(7 * TOKENS * row_s)
    assert experts(Phase.F, normed=100.0) - experts(Phase.F) == pytest.approx(200 * row_s + LAUNCH)
    assert experts(Phase.I, normed=100.0) - experts(Phase.I) == pytest.approx(300 * row_s + LAUNCH)
    assert experts(Phase.W, normed=100.0) == experts(Phase.W)
