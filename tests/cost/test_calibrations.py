from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from math import comb, log, sqrt
from typing import Any

import pytest

from disagmoe.cost import TRANSPORTS, Calibration, Rates, calibration_names, load_calibration
from disagmoe.cost.calibration import Contention, calibration_from_mapping
from disagmoe.cost.compute import Compute, Gemm
from disagmoe.ops import Phase
from disagmoe.specs import device
from disagmoe.specs.fields import CONF, read_file
from tests.cost.reference import VALIDATION, Row, all_rows, rows_of
from tests.cost.shapes import model_with

SHIPPED = ["h100", "h800", "laptop", "paper-profile"]
MEASURED = ["h100", "h800"]


def test_shipped_names() -> None:
    assert list(calibration_names()) == SHIPPED
    assert set(VALIDATION) == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_names_its_source_and_use(name: str) -> None:
    calibration = load_calibration(name)
    assert len(calibration.numbers) == len(fields(Rates)) + 2 * len(TRANSPORTS)
    for number in calibration.numbers:
        assert number.use in ("calibrate", "assumption"), number.name
        assert number.source, number.name
        if number.use == "calibrate":
            assert "https://" in number.source, number.name
    assert asdict(calibration.rates).items() <= {n.name: n.value for n in calibration.numbers}.items()


@pytest.mark.parametrize("name", SHIPPED)
def test_no_row_both_calibrates_and_validates(name: str) -> None:
    calibrated = set(load_calibration(name).calibrated_on)
    assert calibrated <= all_rows().keys()
    assert set(VALIDATION[name]) <= all_rows().keys()
    assert calibrated.isdisjoint(VALIDATION[name])


def test_laptop_is_all_assumptions() -> None:
    laptop = load_calibration("laptop")
    assert {number.use for number in laptop.numbers} == {"assumption"}
    assert laptop.calibrated_on == ()


def test_nothing_is_calibrated_on_a_headline_result() -> None:
    """From DisagMoE's paper only the time ratios of its profiling figure enter, and only in one calibration."""
    for name in SHIPPED:
        from_paper = [n.name for n in load_calibration(name).numbers if "2605.11005" in n.source]
        expected = ["projection_efficiency", "grouped_efficiency", "attention_efficiency"]
        assert from_paper == (expected if name == "paper-profile" else [])


def rms(calibration: Calibration, rows: Sequence[Row], seconds: Callable[[Rates, Row], float], **rates: float) -> float:
    """Root mean square of log(model / measured) over reference rows, with some rates replaced."""
    trial = calibration.with_rates("trial", **rates).rates
    measured = [float(row.get("latency_ms") or float(row["latency_us"]) * 1e-3) * 1e-3 for row in rows]
    return sqrt(sum(log(seconds(trial, row) / m) ** 2 for row, m in zip(rows, measured, strict=True)) / len(rows))


def assert_optimal(
    calibration: Calibration, rows: Sequence[Row], seconds: Callable[[Rates, Row], float], limit: float, *names: str
) -> None:
    """The named rates fit the rows within `limit`, and no step away from them fits better."""
    best = rms(calibration, rows, seconds)
    assert best < limit
    for name in names:
        value = getattr(calibration.rates, name)
        for factor in (0.97, 1.03):
            assert rms(calibration, rows, seconds, **{name: value * factor}) > best, (name, factor)


def gemm_s(rates: Rates, row: Row) -> float:
    compute = Compute(rates, device("H100"))
    kernel = compute.gemm(Gemm(int(row["m"]), int(row["k"]), int(row["n"])), Phase.F)
    return compute.seconds([kernel]) - compute.launch_s


def attention_s(rates: Rates, row: Row) -> float:
    compute = Compute(rates, device("H100"))
    model = model_with(heads=int(row["heads"]), kv_heads=int(row["kv_heads"]), head_dim=int(row["qk_dim"]))
    window = int(row["window"]) or None
    kernel = compute.scores(model, window, int(row["seq"]), float(row["sequences"]), Phase.F)
    return compute.seconds([kernel]) - compute.launch_s


def fitted(name: str, stem: str) -> list[Row]:
    """Rows of one file that the calibration was fitted to."""
    return [row for row in rows_of(stem) if row["id"] in load_calibration(name).calibrated_on]


@pytest.mark.parametrize("name", MEASURED)
def test_dense_gemms_are_fitted_to_published_latencies(name: str) -> None:
    calibration, rows = load_calibration(name), fitted(name, "gemm_h100")
    assert len(rows) == 30
    assert_optimal(calibration, rows, gemm_s, 0.07, "dense_efficiency")
    rates = calibration.rates
    assert rates.projection_efficiency == rates.grouped_efficiency == rates.dense_efficiency
    assert rates.projection_rows_half == rates.dense_rows_half


@pytest.mark.parametrize("name", MEASURED)
def test_attention_is_fitted_to_published_latencies(name: str) -> None:
    rows = [row for row in fitted(name, "attention") if row["id"].startswith("AIC")]
    assert len(rows) == 16
    names = ("attention_efficiency", "attention_dim_half", "attention_pad_keys")
    assert_optimal(load_calibration(name), rows, attention_s, 0.045, *names)


@pytest.mark.parametrize("name", SHIPPED[:2])
def test_attention_backward_is_the_ratio_in_one_trace(name: str) -> None:
    forward, backward = (float(all_rows()[row][1]["latency_ms"]) for row in ("V0194", "V0195"))
    assert load_calibration(name).rates.attention_backward_ratio == pytest.approx(2.5 * forward / backward, abs=1e-4)


@pytest.mark.parametrize("name", MEASURED)
def test_grouped_rows_half_is_the_shape_of_deepgemm(name: str) -> None:
    """One asymptote per weight shape, one `rows_half` for all: the least squares of the logarithms."""
    rows = fitted(name, "grouped_gemm_h800")
    assert len(rows) == 10

    def spread(half: float) -> float:
        total = 0.0
        for shape in ("4096", "7168"):
            of_shape = [row for row in rows if row["n"] == shape]
            levels = [log(float(r["tflops_fp8"]) * (1 + half / int(r["rows_per_group"]))) for r in of_shape]
            mean = sum(levels) / len(levels)
            total += sum((level - mean) ** 2 for level in levels)
        return total

    half = load_calibration(name).rates.grouped_rows_half
    assert spread(half) < min(spread(half * 0.97), spread(half * 1.03))


def test_nvlink_of_h100_is_fitted_to_nccl() -> None:
    def seconds(rates: Rates, row: Row) -> float:
        return float(row["nbytes"]) * 7 / 8 / (450e9 * rates.nvlink_efficiency) + rates.nvlink_alpha_us * 1e-6

    calibration = load_calibration("h100")
    rows = [row for row in fitted("h100", "collective_h100") if row["op"] == "alltoall"]
    assert len(rows) == 5
    assert_optimal(calibration, rows, seconds, 0.01, "nvlink_efficiency", "nvlink_alpha_us")
    rings = [all_rows()[row][1] for row in ("V0239", "V0240")]
    alpha = calibration.rates.nvlink_alpha_us
    rates = [float(row["nbytes"]) * 7 / 8 / (float(row["latency_us"]) - alpha) * 1e6 / 450e9 for row in rings]
    assert calibration.rates.ring_nvlink_efficiency == pytest.approx(sum(rates) / 2, abs=1e-3)


def test_nvlink_of_h800_is_deepep_inside_a_node() -> None:
    row = all_rows()["V0201"][1]
    rows_per_token = 8 * (1 - comb(256 - 32, 8) / comb(256, 8))
    nbytes = rows_per_token * 4096 * 7168 * 2
    assert nbytes / float(row["latency_us"]) * 1e-3 == pytest.approx(158.0, rel=1e-3)
    rates = load_calibration("h800").rates
    modelled = nbytes / (200e9 * rates.nvlink_efficiency) + rates.nvlink_alpha_us * 1e-6
    assert modelled * 1e6 == pytest.approx(float(row["latency_us"]), rel=1e-3)


@pytest.mark.parametrize("name", MEASURED)
def test_nic_is_fitted_to_ep64_alone(name: str) -> None:
    rows = [row for row in fitted(name, "exchange") if row["id"].startswith("T7")]
    assert {row["ep"] for row in rows} == {"64"}
    assert len(rows) == 4

    def seconds(rates: Rates, row: Row) -> float:
        copies = 8.0 if row["merge"] == "none" else 4.0
        nbytes = copies * 7 / 8 * 4096 * 7168 * 2
        return nbytes / (50e9 * rates.nic_efficiency) + rates.nic_alpha_us * 1e-6

    assert_optimal(load_calibration(name), rows, seconds, 0.025, "nic_efficiency", "nic_alpha_us")


@pytest.mark.parametrize("name", ["h100", "h800", "paper-profile"])
def test_contention_factors(name: str) -> None:
    contention = load_calibration(name).contention
    value = {row: float(all_rows()[row][1]["value"]) for row in ("V0193", "V0296", "V0297", "V0298")}
    hidden_on = float(all_rows()["MB-overlap-hidden-pct-on"][1]["value"])
    alone, beside = value["V0296"] / value["V0298"], value["V0297"] / hidden_on
    assert contention["nccl"].comm == pytest.approx(beside / alone, abs=0.01)
    assert contention["nccl"].compute == pytest.approx(132 / 116, abs=1e-3)
    standalone_ms = float(all_rows()["V0207"][1]["latency_us"]) * 1e-3
    assert contention["deepep"].comm == pytest.approx(value["V0193"] / standalone_ms, abs=1e-3)
    assert contention["deepep"].compute == pytest.approx(132 / 112, abs=1e-3)
    assert contention["m2n_rdma"] == Contention(compute=1.0, comm=1.0)


def test_changed_copies() -> None:
    base = load_calibration("h800")
    ideal = base.with_contention({"nccl": Contention(1.0, 1.0)})
    assert ideal.contention["nccl"].compute == 1.0
    assert ideal.contention["deepep"] == base.contention["deepep"]
    assert base.contention["nccl"].compute > 1.0
    faster = base.with_rates("fast", launch_us=0.0)
    assert (faster.name, faster.rates.launch_us, base.rates.launch_us) == ("fast", 0.0, 5.0)


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    mapping: dict[str, Any] = dict(read_file(CONF / "calibration" / "laptop.yaml", "calibration"))
    for key in ("rates", "contention"):
        mapping[key] = {name: dict(entry) for name, entry in mapping[key].items()}
    change(mapping)
    with pytest.raises(ValueError) as error:
        calibration_from_mapping(mapping, "broken")
    message = str(error.value)
    assert message.startswith("calibration broken")
    assert "\n" not in message
    return message


def test_broken_files_are_refused_in_one_line() -> None:
    assert "missing key launch_us" in broken(lambda m: m["rates"].pop("launch_us"))
    assert "unknown key speed" in broken(lambda m: m["rates"].update(speed={}))
    assert "missing key source" in broken(lambda m: m["rates"]["launch_us"].pop("source"))
    assert "unknown use 'guess'; known: calibrate, assumption" in broken(
        lambda m: m["rates"]["launch_us"].update(use="guess")
    )
    assert "at most 1, got 1.2" in broken(lambda m: m["rates"]["nic_efficiency"].update(value=1.2))
    assert "must be positive, got 0.0" in broken(lambda m: m["rates"]["hbm_efficiency"].update(value=0.0))
    assert "must be a finite number, got 'fast'" in broken(lambda m: m["rates"]["launch_us"].update(value="fast"))
    assert "nccl compute must be at least 1, got 0.9" in broken(
        lambda m: m["contention"]["nccl"].update(compute={**m["contention"]["nccl"]["compute"], "value": 0.9})
    )
    assert "names a row twice" in broken(lambda m: m.update(calibrated_on=["a", "a"]))


def test_unknown_calibration_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown calibration 'h900'; known: h100, h800, laptop, paper-profile"):
        load_calibration("h900")
