"""Verdicts on the published claims: inside, outside, or why not comparable."""

from __future__ import annotations

from typing import Any

import pytest

from bench.report.paper import compare, range_text, value_text

from .sample import ok_row, row_of, sample

DEEPSEEK = {"name": "deepseek_moe", "layers": 28, "hidden": 2048, "experts": 64, "top_k": 4, "expert_width": 1408}


def claim(results: dict[str, Any], start: str) -> dict[str, Any]:
    return next(row for row in compare(results) if row["claim"].startswith(start))


def deepseek(seq: int = 8192) -> dict[str, Any]:
    results = sample(depth={"used": 28, "of": 28})
    results["model"].update(DEEPSEEK)
    results["workload"]["seq"] = seq
    return results


def test_speedups_are_step_ratios_of_the_native_view() -> None:
    assert claim(sample(), "speed-up over Megatron-1F1B") == {
        "claim": "speed-up over Megatron-1F1B",
        "low": 1.59,
        "high": 1.81,
        "unit": "x",
        "ours": pytest.approx(16 / 10),
        "verdict": "inside",
        "note": "",
    }
    tutel = claim(sample(), "speed-up over Tutel")
    assert tutel["ours"] == pytest.approx(14 / 10)
    assert tutel["verdict"] == "inside"
    assert "1.34×" in tutel["note"]


@pytest.mark.parametrize(
    ("megatron_s", "verdict"), [(15.0, "outside"), (15.86, "inside"), (18.14, "inside"), (18.2, "outside")]
)
def test_a_range_is_met_up_to_its_printed_digits(megatron_s: float, verdict: str) -> None:
    results = sample()
    row_of(results, "megatron_1f1b")["step_time_s"] = megatron_s  # disagmoe takes 10 s
    assert claim(results, "speed-up over Megatron-1F1B")["verdict"] == verdict


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"workload": {"seq": 6000, "global_batch": 1408, "skew": 1.0, "stragglers": []}}, "this run has 6,000"),
        ({"workload": {"seq": 4096, "global_batch": 2048, "skew": 1.3, "stragglers": []}}, "neither routing skew"),
        ({"workload": {"seq": 4096, "global_batch": 2048, "skew": 1.0, "stragglers": [[0, 1.2]]}}, "nor stragglers"),
        ({"depth": {"used": 72, "of": 94}}, "72 of 94"),
        ({"cluster": {"name": "c", "device": "h800", "groups": [{"count": 8, "gpus": 8}]}}, "this run has 64 H800"),
        ({"cluster": {"name": "c", "device": "h100", "groups": [{"count": 16, "gpus": 8}]}}, "this run has 128 H100"),
    ],
)
def test_another_setting_is_not_comparable(changes: dict[str, Any], reason: str) -> None:
    row = claim(sample(**changes), "speed-up over Megatron-1F1B")
    assert (row["verdict"], row["ours"]) == ("not comparable", None)
    assert reason in row["note"]


def test_models_are_recognised_by_shape_not_by_name() -> None:
    results = sample()
    results["model"]["name"] = "my_config"
    assert claim(results, "speed-up over Megatron-1F1B")["verdict"] == "inside"
    results["model"]["top_k"] = 4
    row = claim(results, "speed-up over Megatron-1F1B")
    assert row["verdict"] == "not comparable"
    assert "this run has my_config" in row["note"]


def test_missing_and_failed_systems() -> None:
    results = sample()
    assert claim(results, "speed-up over DualPipe")["note"] == "dualpipe did not run here: oom"
    assert claim(results, "speed-up over Comet")["note"] == "comet did not run here: not applicable"
    results["rows"] = [row for row in results["rows"] if row["system"] != "dualpipe"]
    assert claim(results, "speed-up over DualPipe")["note"] == "dualpipe is not in this run"


def test_uniform_view_alone_is_not_the_papers_setting() -> None:
    results = sample()
    results["rows"] = [row for row in results["rows"] if row["view"] == "uniform"]
    assert "native view" in claim(results, "speed-up over Tutel")["note"]


def test_variants_compare_by_the_unmerged_one() -> None:
    results = sample()
    results["rows"].insert(0, ok_row("dualpipe", "native", (8.0, 5.0, 2.0, 1.0), variant="deepep"))
    assert claim(results, "speed-up over DualPipe")["ours"] == pytest.approx(1.1)
    results["rows"].insert(1, ok_row("dualpipe", "native", (8.0, 4.0, 3.0, 1.0)))
    assert claim(results, "speed-up over DualPipe")["ours"] == pytest.approx(1.2)
    assert claim(results, "speed-up over DualPipe")["verdict"] == "outside"


def test_exposed_communication_of_deepseek_at_8k() -> None:
    results = deepseek()
    row = claim(results, "exposed comm removed vs Tutel")
    assert row["ours"] == pytest.approx(1 - 0.5 / 4)  # 87.5 %: the paper prints 88 %, ours rounds to it
    assert row["verdict"] == "inside"
    row_of(results, "tutel")["exposed_comm_reduction"] = 0.84
    assert claim(results, "exposed comm removed vs Tutel")["verdict"] == "outside"
    share = claim(results, "exposed share of Megatron-1F1B's step")
    assert share["ours"] == pytest.approx(6 / 16)
    assert share["verdict"] == "inside"  # "about a third": 28 to 38 %
    other = claim(deepseek(4096), "exposed comm removed vs Tutel")
    assert other["note"] == "stated for sequence length 8,192; this run has 4,096"
    assert "stated for DeepSeek-MoE" in claim(sample(), "exposed comm removed vs Tutel")["note"]


def test_top_k_range_takes_any_of_its_top_ks() -> None:
    results = deepseek()
    results["model"]["top_k"] = 16
    row = claim(results, "speed-up over Megatron-1F1B, 64 experts")
    assert row["ours"] == pytest.approx(1.6)
    assert row["verdict"] == "inside"
    results["model"]["top_k"] = 6
    assert "top-k 6" in claim(results, "speed-up over Megatron-1F1B, 64 experts")["note"]


def test_gpu_ratio_at_4k() -> None:
    results = sample()
    assert claim(results, "best A:F")["verdict"] == "not comparable"
    results["workload"]["seq"] = 4096
    assert claim(results, "best A:F")["ours"] == 1.0
    row_of(results, "disagmoe")["plan"]["A:F"] = "16:8"
    assert (claim(results, "best A:F")["ours"], claim(results, "best A:F")["verdict"]) == (2.0, "outside")
    row_of(results, "disagmoe")["plan"]["nics"] = "own"
    assert "nics=own" in claim(results, "best A:F")["note"]
    row_of(results, "disagmoe")["plan"] = {}
    assert "does not say" in claim(results, "best A:F")["note"]


def test_the_ratio_claim_shows_why_it_cannot_be_compared() -> None:
    row = claim(sample(), "A:F 16:10 over 16:16")
    assert (row["verdict"], row["low"]) == ("not comparable", 1.29)
    assert "32/26 = 1.23×" in row["note"]
    assert pytest.approx(1.23, abs=0.005) == 32 / 26


def test_every_claim_is_answered_for_any_run() -> None:
    rows = compare(sample(depth={"used": 1, "of": 94}))
    assert len(rows) == 13
    for row in rows:
        assert row["verdict"] == "not comparable"
        assert row["note"]


def test_published_values_as_text() -> None:
    assert range_text({"low": 1.59, "high": 1.81, "unit": "x"}) == "1.59–1.81×"
    assert range_text({"low": 0.88, "high": 0.88, "unit": "%"}) == "88 %"
    assert range_text({"low": None, "high": 1.34, "unit": "x"}) == "≤ 1.34×"
    assert range_text({"low": 1.1, "high": None, "unit": "x"}) == "≥ 1.10×"
    assert value_text(None, "x") == "–"
    assert value_text(16.0, "stages") == "16"
