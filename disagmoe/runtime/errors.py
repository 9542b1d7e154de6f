"""What can go wrong between ranks, by who is at fault.

A launcher that sees several ranks fail shows the one whose error is its own: an
`ExchangeError` or any other exception before a `PeerLostError`, which only says
that somebody else is gone.
"""

from __future__ import annotations

import re

_CPP_PLACE = re.compile(r"^\[[^\]]*\.(cc|cpp|h|hpp):\d+\] ")


class ExchangeError(RuntimeError):
    """Two ranks disagree about an exchange. Names the operation, both ranks and both values."""


class PeerLostError(RuntimeError):
    """Another rank died, hung, or refused an operation."""


class LaunchError(ValueError):
    """Processes cannot be started as asked: one line with the value and what is allowed."""


class RankError(RuntimeError):
    """A rank of a launched group failed.

    `rank` is the one at fault, `reason` the last line of its traceback or how it
    ended, `details` its traceback or stack ("" where there is none).
    """

    def __init__(self, rank: int, world_size: int, reason: str, details: str = "") -> None:
        super().__init__(f"rank {rank} of {world_size} {reason}")
        self.rank = rank
        self.reason = reason
        self.details = details
        if details:
            self.add_note(details)


def first_line(error: BaseException) -> str:
    """What an error says, without the C++ place before it and the backtrace behind it."""
    lines = str(error).strip().splitlines()
    return _CPP_PLACE.sub("", lines[0]) if lines else type(error).__name__
