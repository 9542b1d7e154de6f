"""Timeline: what ran when, wherever it ran.

The simulator, the emulator and a measured run all produce this one record, so
metrics, traces and pictures are computed by the same code for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagmoe.plan.program import Program

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every row of a Program, in seconds from the step's start.

    `post_s` is when this worker was ready for the row (head of its stream and
    its own dependencies met); a transfer starts when both ends are posted, so
    start - post is the wait for the peer. Arrays have shape [rows]. `origin` is
    "simulated", "emulated" or "measured". `until_s` is when an executed step was over
    on every rank, its host work included, where that is after the last row.
    """

    program: Program
    start_s: FloatArray
    end_s: FloatArray
    post_s: FloatArray
    origin: str = "simulated"
    until_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The step time: the latest end of any row (0 for an empty Program), or `until_s`."""
        return max(self.until_s, float(self.end_s.max())) if len(self.program) else 0.0
