"""The sharing rule: values worked out by hand, and equality with the compiled form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe import kernels
from disagmoe.cost.sharing import Load, Use, compute_rate, rate, transfer_rate

COMPUTE = Use(True, False, False, 0, 1.0, 1.0)


def going(link: int = 0, slows: float = 1.0, slowed: float = 1.0) -> Use:
    return Use(False, True, False, link, slows, slowed)


def coming(link: int = 0, slows: float = 1.0, slowed: float = 1.0) -> Use:
    return Use(False, False, True, link, slows, slowed)


def both(link: int = 0, slows: float = 1.0, slowed: float = 1.0) -> Use:
    return Use(False, True, True, link, slows, slowed)


IDLE = Load.of([])


def test_one_operation_alone_runs_at_full_speed() -> None:
    for use in (COMPUTE, going(), coming(), both()):
        alone = Load.of([use])
        assert rate(use, alone, alone if use.going and use.coming else IDLE) == 1.0


def test_two_compute_operations_halve_and_a_transfer_stretches_them() -> None:
    load = Load.of([COMPUTE, COMPUTE, going(slows=1.25), coming(slows=1.1)])
    assert load == Load(2, (1, 0), (1, 0), 1.25)
    assert rate(COMPUTE, load, load) == pytest.approx(1 / 2 / 1.25)


def test_the_busier_end_of_a_transfer_decides_and_the_links_are_apart() -> None:
    sender = Load.of([going(), going(link=1), coming(), coming()])
    receiver = Load.of([coming(), coming(), coming(), going()])
    assert rate(going(), sender, receiver) == pytest.approx(1 / 3)
    assert rate(coming(), receiver, sender) == pytest.approx(1 / 3)  # the same transfer from its other end
    assert rate(going(link=1), sender, receiver) == 1.0


def test_compute_on_either_end_stretches_a_transfer() -> None:
    quiet, busy = Load.of([going(slowed=1.5)]), Load.of([COMPUTE, coming(slowed=1.5)])
    assert rate(going(slowed=1.5), quiet, busy) == pytest.approx(1 / 1.5)
    assert rate(coming(slowed=1.5), busy, quiet) == pytest.approx(1 / 1.5)


def test_a_collective_shares_with_both_directions() -> None:
    load = Load.of([both(), going(), going(), coming()])
    assert rate(both(), load, load) == pytest.approx(1 / 3)


FACTORS = st.floats(1.0, 8.0)


@given(st.integers(1, 8), FACTORS)
def test_compute_as_compiled(computes: int, slows: float) -> None:
    assert compute_rate(computes, slows) == kernels.compute_rate(computes, slows)


@given(FACTORS, st.booleans(), st.integers(1, 8))
def test_transfers_as_compiled(slowed: float, beside: bool, share: int) -> None:
    assert transfer_rate(slowed, beside, share) == kernels.transfer_rate(slowed, beside, share)
