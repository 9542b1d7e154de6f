"""Scaled contention: 1 + s (f - 1) for every transport, nothing else changed, and into every number of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.evaluate import cost_model, run_system
from bench.identity import identify
from disagmoe.cost.calibration import TRANSPORTS, calibration_names, load_calibration
from tests.bench.helpers import config


@pytest.mark.parametrize("name", calibration_names())
def test_no_scale_no_change_and_nothing_but_contention_changes(name: str) -> None:
    calibration = load_calibration(name)
    assert calibration.with_contention_scale(1.0) is calibration
    ideal = calibration.with_contention_scale(0.0)
    assert {(pair.compute, pair.comm) for pair in ideal.contention.values()} == {(1.0, 1.0)}
    assert replace(ideal, contention=calibration.contention) == calibration


@given(scale=st.floats(0.0, 10.0))
def test_every_factor_follows_the_formula(scale: float) -> None:
    calibration = load_calibration("h800")
    scaled = calibration.with_contention_scale(scale)
    for transport in TRANSPORTS:
        before, after = calibration.contention[transport], scaled.contention[transport]
        assert after.compute - 1.0 == pytest.approx(scale * (before.compute - 1.0))
        assert after.comm - 1.0 == pytest.approx(scale * (before.comm - 1.0))
        assert min(after.compute, after.comm) >= 1.0


@pytest.mark.parametrize("scale", [-0.1, float("nan"), float("inf")])
def test_refusals(scale: float) -> None:
    with pytest.raises(ValueError, match="contention_scale"):
        load_calibration("h800").with_contention_scale(scale)
    with pytest.raises(ValueError, match="contention_scale"):
        config(contention_scale=scale)


def test_rows_print_the_scaled_factors_and_runs_tell_apart() -> None:
    plain, twice = config(transport="native"), config(transport="native", contention_scale=2)
    assert identify(plain).config_id != identify(twice).config_id
    ((one, _),) = run_system(plain, cost_model(plain), "megatron_1f1b", "native")
    ((other, _),) = run_system(twice, cost_model(twice), "megatron_1f1b", "native")
    for key in ("compute", "comm"):
        assert other["contention"][key] - 1.0 == pytest.approx(2 * (one["contention"][key] - 1.0))
        assert one["contention"][key] > 1.0
