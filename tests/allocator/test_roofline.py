"""The roofline formula against hand arithmetic, and the seed against every other split."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.allocator.roofline import (
    Machine,
    Work,
    machine,
    paper_intensity,
    ratio_table,
    seed,
    split,
    turning_point,
    work,
)
from disagmoe.specs import load_cluster, load_model
from tests.problems import small_cluster

works = st.builds(
    Work,
    attention_flops=st.floats(1e9, 1e13),
    expert_flops=st.floats(1e9, 1e13),
    wire_bytes=st.floats(1e4, 1e8),
)
machines = st.builds(
    Machine,
    gpus=st.integers(2, 40),
    nics=st.integers(1, 40),
    peak_flops=st.floats(1e13, 1e15),
    nic_bytes_per_s=st.floats(1e9, 1e11),
)


def test_turning_points_of_the_paper() -> None:
    # H800: 989e12 FLOP/s over one 400 Gbit/s NIC (50e9 bytes/s) per GPU.
    where = machine(load_cluster("h800_128"))
    assert where.turning_point == pytest.approx(19780.0)
    need = work(load_model("qwen3"), 4096)
    s = split(need, where, 80, 48)
    # Halves of the NICs: 2m/(m+n) and 2n/(m+n) times the even turning point.
    assert s.attention_point == pytest.approx(2 * 80 / 128 * 19780.0)
    assert s.expert_point == pytest.approx(2 * 48 / 128 * 19780.0)
    # NICs in proportion to GPUs: every pool has the even turning point again.
    follow = split(need, where, 80, 48, 80, 48)
    assert (follow.attention_point, follow.expert_point) == pytest.approx((19780.0, 19780.0))


@pytest.mark.parametrize(
    ("model", "seq", "attention", "expert"),
    [
        # Qwen3: H = 4096, 64 / 4 heads, k = 8, D_e = 1536: (4096 (2 + 2/16) + 4 s) / 16.
        ("qwen3", 4096, (4096 * 2.125 + 4 * 4096) / 16, 3072),
        ("qwen3", 32768, (4096 * 2.125 + 4 * 32768) / 16, 3072),
        # GPT-OSS: H = 2880, 64 / 8 heads, k = 4, D_e = 2880.
        ("gpt_oss", 8192, (2880 * 2.25 + 4 * 8192) / 8, 5760),
    ],
)
def test_intensity_by_the_formula_of_the_paper(model: str, seq: int, attention: float, expert: float) -> None:
    found = paper_intensity(load_model(model), seq)
    assert found is not None
    assert (found.attention, found.expert) == pytest.approx((attention, expert))


def test_the_formula_of_the_paper_does_not_cover_latent_attention() -> None:
    assert paper_intensity(load_model("deepseek_v3"), 4096) is None


def test_own_count_of_one_token() -> None:
    # Qwen3, unmerged, by hand. Forward per layer: QKV 2 x 4096 x (64 + 8) x 128, output 2 x 8192 x 4096, router
    # 2 x 4096 x 128, scores 4 x 64 x 128 x (s + 1) / 2; experts 8 x 3 x 2 x 4096 x 1536. All three times in training.
    model = load_model("qwen3")
    layer_a = 2 * 4096 * 72 * 128 + 2 * 8192 * 4096 + 2 * 4096 * 128 + 4 * 64 * 128 * (4096 + 1) / 2
    layer_f = 8 * 6 * 4096 * 1536
    need = work(model, 4096, merge="none")
    assert need.attention_flops == pytest.approx(3 * 94 * layer_a)
    assert need.expert_flops == pytest.approx(3 * 94 * layer_f)
    # 8 copies of 8,192 bytes out, and 8 gradient copies out in the backward pass.
    assert need.wire_bytes == pytest.approx(94 * 2 * 8 * 8192)
    assert need.expert_intensity == pytest.approx(3 * layer_f / (2 * 8 * 8192))


def test_merging_divides_the_bytes_by_the_distinct_units() -> None:
    model = load_model("qwen3")
    none, rank, node = (work(model, 4096, merge=merge).wire_bytes for merge in ("none", "rank", "node"))
    # Uniform top-8 of 128, 16 ranks of 8 experts or 2 nodes of 64: a unit is missed with C(128 - own, 8) / C(128, 8).
    assert rank / none == pytest.approx(16 * (1 - comb(120, 8) / comb(128, 8)) / 8)
    assert node / none == pytest.approx(2 * (1 - comb(64, 8) / comb(128, 8)) / 8)
    with pytest.raises(ValueError, match="merge 'all'"):
        work(model, 4096, merge="all")


def test_dense_layers_cross_once() -> None:
    # DeepSeek-MoE 16B: 28 layers of which the first is dense, top-6.
    model = load_model("deepseek_moe_16b")
    assert len(model.dense_layers) == 1
    assert work(model, 4096, merge="none").wire_bytes == 2 * 2 * 2048 * (27 * model.top_k + 1)


@given(works, machines)
def test_seed_is_the_best_of_all_splits_and_nic_shares(need: Work, where: Machine) -> None:
    best = seed(need, where)
    everywhere = [
        max(
            need.attention_flops / (m * where.peak_flops),
            need.expert_flops / ((where.gpus - m) * where.peak_flops),
            need.wire_bytes / (share * where.nics * where.nic_bytes_per_s),
            need.wire_bytes / ((1 - share) * where.nics * where.nic_bytes_per_s),
        )
        for m in range(1, where.gpus)
        for share in (0.1, 0.25, 0.4, 0.5, 0.6, 0.9)
    ]
    assert best.bottleneck_s <= min(everywhere) * (1 + 1e-12)
    assert best.attention_gpus + best.expert_gpus == where.gpus


@given(works, st.integers(1, 16), st.integers(1, 16))
def test_fewer_gpus_at_fixed_nics_never_shorten_the_step(need: Work, m: int, n: int) -> None:
    where = Machine(gpus=32, nics=32, peak_flops=989e12, nic_bytes_per_s=50e9)
    even, row = ratio_table(need, where, [(16, 16), (m, n)], (16, 16))
    assert (even.speedup, even.per_gpu) == (1.0, 1.0)
    assert row.speedup <= 1.0
    assert row.per_gpu <= 32 / (m + n) * (1 + 1e-12)


def test_sixteen_to_ten_of_the_paper() -> None:
    # Per GPU 32/26 = 1.23 at most, so the 1.29x reported for 16:10 over 16:16 cannot come from this formula.
    where = Machine(gpus=32, nics=32, peak_flops=989e12, nic_bytes_per_s=50e9)
    need = work(load_model("qwen3"), 16384)
    table = ratio_table(need, where, [(16, 16), (16, 10), (16, 8), (8, 16)], (16, 16))
    for row, bound in zip(table, (1.0, 32 / 26, 32 / 24, 32 / 24), strict=True):
        assert row.per_gpu <= bound
    assert max(row.per_gpu for row in table[:2]) < 1.29
    # Half of the attention GPUs doubles T_a where compute binds it: 8:16 is no gain even per GPU.
    assert table[3].split.attention_compute_s == pytest.approx(2 * table[0].split.attention_compute_s)


def test_more_sequence_moves_the_seed_to_attention() -> None:
    where = machine(load_cluster("h800_128"))
    model = load_model("qwen3")
    shares = [seed(work(model, s), where).attention_gpus for s in (4096, 8192, 16384, 32768)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_mixed_nics_count_as_their_mean() -> None:
    cluster = small_cluster(nodes=3, gpus=4, nics=2)
    assert machine(cluster) == Machine(gpus=12, nics=6, peak_flops=989e12, nic_bytes_per_s=50e9)


def test_what_cannot_be_split_is_refused() -> None:
    need = work(load_model("tiny"), 128)
    where = Machine(gpus=4, nics=4, peak_flops=1e12, nic_bytes_per_s=1e9)
    with pytest.raises(ValueError, match="at least 2 GPUs for disaggregation, the cluster has 1"):
        seed(need, Machine(gpus=1, nics=1, peak_flops=1e12, nic_bytes_per_s=1e9))
    with pytest.raises(ValueError, match="3:2 GPUs"):
        split(need, where, 3, 2)
    with pytest.raises(ValueError, match="NICs"):
        split(need, where, 2, 2, 3, 2)
    with pytest.raises(ValueError, match="at least one A:F split"):
        ratio_table(need, where, [], (2, 2))
    with pytest.raises(ValueError, match="NIC bandwidth"):
        turning_point(1e12, 0.0)
