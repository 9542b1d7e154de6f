"""Step times: warm-up removed, the slowest rank counts, and no number where there is none."""

from __future__ import annotations

import math

import pytest

from bench.timing import step_times


def test_the_first_step_does_not_count() -> None:
    found = step_times([[30.0, 1.0, 1.0, 1.0]], warm_up=1)
    assert (found.mean_s, found.repeats, found.spread) == (1.0, 3, 0.0)


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    """Ranks are slow in different steps: the mean of the maxima, not the maximum of the means."""
    found = step_times([[9.0, 1.0, 3.0], [9.0, 2.0, 1.0]], warm_up=1)
    assert found.steps_s == (2.0, 3.0)
    assert found.mean_s == 2.5
    assert found.spread == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("times", "warm_up", "words"),
    [
        ([[30.0, 1.0, 1.0, 1.0]], 4, "no step is left of 4 after 4 of warm-up"),
        ([[]], 0, "no step is left of 0"),
        ([[1.0, math.nan, 1.0]], 1, "step 1 took nan s on rank 0"),
        ([[math.nan, 1.0]], 1, "step 0 took nan s"),
        ([[1.0], [math.inf]], 0, "step 0 took inf s on rank 1"),
        ([[1.0, 0.0]], 0, "must be finite and above 0"),
        ([[1.0, 1.0], [1.0]], 0, "rank 0 timed 2 steps, rank 1 1"),
        ([], 0, "of no rank"),
        ([[1.0]], -1, "warm_up=-1"),
    ],
)
def test_what_is_an_error(times: list[list[float]], warm_up: int, words: str) -> None:
    with pytest.raises(ValueError, match=r"step|warm_up|rank") as error:
        step_times(times, warm_up)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
