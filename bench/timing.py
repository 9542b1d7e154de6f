"""What a step took, from the times that every rank measured: warm-up left out, the slowest rank counts.

Decides what is an error rather than a number: no step left after the warm-up, a time
that is not finite and positive, ranks that timed different numbers of steps. Each
rank must synchronise its device before it reads the clock; that is the caller's part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the counted steps, in order, each the slowest rank's."""

    steps_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """Mean over the counted steps."""
        return math.fsum(self.steps_s) / len(self.steps_s)

    @property
    def repeats(self) -> int:
        """Steps that count."""
        return len(self.steps_s)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / fastest of the counted steps."""
        return (max(self.steps_s) - min(self.steps_s)) / min(self.steps_s)


def step_times(ranks_s: Sequence[Sequence[float]], warm_up: int) -> StepTimes:
    """Step times from `ranks_s[rank][step]` in seconds, without the first `warm_up` steps. Raises ValueError."""
    if not ranks_s:
        raise ValueError("step times of no rank: at least one rank must have timed its steps")
    if warm_up < 0:
        raise ValueError(f"warm_up={warm_up}: allowed: 0 or more steps")
    counts = [len(times) for times in ranks_s]
    if len(set(counts)) > 1:
        odd = next(rank for rank, count in enumerate(counts) if count != counts[0])
        raise ValueError(
            f"rank 0 timed {counts[0]} steps, rank {odd} {counts[odd]}: all ranks must time the same steps"
        )
    if counts[0] <= warm_up:
        raise ValueError(f"no step is left of {counts[0]} after {warm_up} of warm-up: time more than {warm_up} steps")
    for rank, times in enumerate(ranks_s):
        for step, seconds in enumerate(times):
            if not 0.0 < seconds < math.inf:
                raise ValueError(f"step {step} took {seconds} s on rank {rank}: a time must be finite and above 0")
    return StepTimes(tuple(max(float(times[step]) for times in ranks_s) for step in range(warm_up, counts[0])))
