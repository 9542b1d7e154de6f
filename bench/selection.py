"""Which part of a schedule the pictures and traces of a run show.

Without a choice a Gantt shows the excerpt where forward and backward are most
mixed, and workers spread over the pipeline; a trace holds the whole step. The
choice changes no number, so it is no part of a run's identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """A part of a schedule; nothing chosen by default.

    `window_ms` is (start, stop) from the start of the step, `workers` are numbers
    or names ("0", "A1").
    """

    window_ms: tuple[float, float] | None = None
    workers: tuple[str, ...] = ()

    @property
    def window_s(self) -> tuple[float, float] | None:
        """The window in seconds."""
        return None if self.window_ms is None else (self.window_ms[0] / 1e3, self.window_ms[1] / 1e3)

    def indices(self, names: Sequence[str]) -> list[int]:
        """Chosen workers among those called `names`, in their order; the ones a system does not have are left out."""
        return [index for index, name in enumerate(names) if {name, str(index)} & set(self.workers)]


WHOLE = Selection()
"""No choice made."""


def read_selection(window: object, workers: object) -> Selection:
    """From the values of `gantt_window` and `gantt_workers`. Raises ValueError."""
    return Selection(_window(window), _workers(workers))


def _window(value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    try:
        start, stop = (float(part) for part in str(value).split(":"))
    except ValueError:
        start = stop = math.nan
    if not (0.0 <= start < stop < math.inf):
        raise ValueError(f"gantt_window={value}: allowed: start:stop in ms with 0 <= start < stop, e.g. 120:180.5")
    return start, stop


def _workers(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    names = tuple(str(item).strip() for item in items)
    if not names or not all(name.isalnum() for name in names):
        raise ValueError(f"gantt_workers={value}: allowed: worker numbers or names, e.g. [0,1,2] or [A0,F0]")
    return names
