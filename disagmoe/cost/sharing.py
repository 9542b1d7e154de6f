"""The rule by which running operations slow each other: who shares what, and at which rate each then gets on.

Decides contention. Compute operations of one worker share its GPU equally;
transfers that use one link of one worker in one direction at the same time share
that link equally; and while communication and compute run on one worker, both are
stretched by the factors of their transport. A transfer is held up by the busier of
its two ends. Rates are progress per second, 1 for an operation that is alone.

The simulator applies this rule event by event (its compiled form is in
`disagmoe/kernels.py`, which may import nothing; a test holds the two together), and
the pacer of emulated runs applies it to what really runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Use(NamedTuple):
    """What one running operation takes of one worker.

    Either it `computes`, or its bytes leave (`going`) or arrive (`coming`) over
    `link`; a collective does both. `slows` >= 1 is how much it stretches compute
    beside it, `slowed` >= 1 how much compute beside it stretches the operation.
    """

    computes: bool
    going: bool
    coming: bool
    link: int
    slows: float
    slowed: float


@dataclass(frozen=True)
class Load:
    """What runs on one worker: compute operations, transfers per direction and link, the largest slow-down."""

    computes: int
    going: tuple[int, ...]
    coming: tuple[int, ...]
    slows: float

    @classmethod
    def of(cls, running: Iterable[Use], links: int = 2) -> Load:
        """The load of some running operations."""
        computes, slows = 0, 1.0
        going, coming = [0] * links, [0] * links
        for use in running:
            if use.computes:
                computes += 1
                continue
            slows = max(slows, use.slows)
            going[use.link] += use.going
            coming[use.link] += use.coming
        return cls(computes, tuple(going), tuple(coming), slows)


def compute_rate(computes: int, slows: float) -> float:
    """Progress per second of one of `computes` compute operations on a worker.

    `slows` is the largest slow-down factor (>= 1) of the transfers beside them.
    """
    return 1.0 / computes / slows


def transfer_rate(slowed: float, beside_compute: bool, share: int) -> float:
    """Progress per second of one transfer.

    `slowed` >= 1 applies where compute runs on one of its ends; `share` is the
    largest number of transfers that use the same link in the same direction at one
    of its ends, itself included.
    """
    return 1.0 / (slowed if beside_compute else 1.0) / share


def rate(use: Use, near: Load, far: Load) -> float:
    """The rate of a running operation from the loads of its ends, itself included in both.

    `near` is the worker it runs on, for a transfer the one that `use` describes;
    `far` the other end, the same as `near` where there is none.
    """
    if use.computes:
        return compute_rate(near.computes, near.slows)
    sender, receiver = (near, far) if use.going else (far, near)
    share = max(sender.going[use.link], receiver.coming[use.link])
    return transfer_rate(use.slowed, near.computes + far.computes > 0, share)
