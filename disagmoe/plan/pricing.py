"""What every row of a Program costs: seconds, bytes and contention factors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pricing:
    """Costs of the rows of one Program; all arrays have shape [rows].

    `duration_s` is the time of the row when nothing disturbs it (both rows of a
    transfer carry the same value). `link` is 0 where the row's bytes cross NICs
    and 1 where they stay on NVLink: transfers that use one link of one worker in
    one direction at the same time share it. `slows_compute` >= 1 is the factor
    by which a communication row stretches compute running beside it on the same
    worker, `slowed_by_compute` >= 1 the factor by which it is stretched itself.
    `wire_bytes` are the bytes one GPU of the worker sends over its NIC.
    """

    duration_s: FloatArray
    link: NDArray[np.int8]
    slows_compute: FloatArray
    slowed_by_compute: FloatArray
    wire_bytes: FloatArray

    @classmethod
    def ideal(cls, duration_s: FloatArray) -> Pricing:
        """Given durations, no contention, no wire bytes: for closed forms and tests."""
        n = duration_s.shape[0]
        return cls(
            duration_s=duration_s.astype(np.float64),
            link=np.zeros(n, dtype=np.int8),
            slows_compute=np.ones(n),
            slowed_by_compute=np.ones(n),
            wire_bytes=np.zeros(n),
        )
