"""Fits of rates: what was put in comes out, and nothing negative does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.cost.rate_fit import fit_attention, fit_link, fit_multiply, relative, search

PEAK = 1e12


@given(st.floats(0.01, 1.0), st.floats(0.0, 200.0), st.floats(0.0, 1e-4))
def test_a_multiply_that_saturates_with_its_rows(efficiency: float, half: float, launch_s: float) -> None:
    rows, wide = (x.ravel() for x in np.meshgrid([8.0, 64.0, 512.0, 4096.0], [1e4, 1e6]))
    flops = 2.0 * rows * wide
    seconds = flops / (PEAK * efficiency) * (1.0 + half / rows) + launch_s
    found = fit_multiply(rows, flops, seconds, PEAK)
    assert found.efficiency == pytest.approx(efficiency, rel=1e-6)
    assert found.rows_half == pytest.approx(half, rel=1e-4, abs=1e-4)
    assert found.error < 1e-6


def test_an_attention_kernel() -> None:
    seq, width = (x.ravel() for x in np.meshgrid([128.0, 512.0, 2048.0], [16.0, 64.0, 128.0]))
    heads = np.full_like(seq, 4.0)
    # keys s / 2 per query, efficiency 0.5 d / (d + 16), whole tiles of 40 keys at the full rate
    flops = 4.0 * heads * seq * (width * seq / 2 + 16.0 * seq / 2 + 40.0 * width)
    forward = flops / (PEAK * 0.5)
    found = fit_attention(seq, heads, width, forward, 2.5 * forward / 0.8, PEAK)
    assert found.efficiency == pytest.approx(0.5) and found.dim_half == pytest.approx(16.0)
    assert found.pad_keys == pytest.approx(40.0) and found.backward_ratio == pytest.approx(0.8)


def test_a_link() -> None:
    nbytes = np.array([1e3, 1e5, 1e7])
    found = fit_link(nbytes, 2e-3 + nbytes / 3e9, 1e11)
    assert found.alpha_s == pytest.approx(2e-3) and found.bytes_per_s == pytest.approx(3e9)
    assert fit_link(nbytes, np.full(3, 5e-3), 1e11).bytes_per_s == 1e11  # bytes cost nothing: the line rate, no more


@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.floats(0.1, 10.0)), min_size=3, max_size=8))
def test_no_coefficient_is_negative(rows: list[tuple[float, float, float]]) -> None:
    a, b, seconds = (np.array(column) for column in zip(*rows, strict=True))
    x, error = relative([a, b, np.ones_like(a)], seconds)
    assert (x >= 0.0).all() and error >= 0.0


def test_the_search_finds_what_a_maximum_of_terms_was_made_with() -> None:
    sizes = np.array([1.0, 10.0, 100.0, 1000.0])

    def price(launch: float, rate: float) -> np.ndarray:
        return np.maximum(sizes / 100.0, sizes / (500.0 * rate)) + launch

    launch, rate, error = search(price, price(0.3, 0.05), np.ones(4), np.array([1e-3, 1e-3]), np.array([10.0, 1.0]))
    assert launch == pytest.approx(0.3, rel=0.05) and rate == pytest.approx(0.05, rel=0.05)
    assert error < 0.03
