"""What is through and what is not: how the streams of one worker wait for each other, and when things happened.

Decides what it means that a row needs another. A row is through when its work is
done on the host and, on a GPU, queued on its stream with an event behind it: then
the stream that needs it waits for that event, the host does not. On a CPU there
are no events, and through means done. (The GPU half is written so and has not
been run.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

Stamp = float | torch.cuda.Event
"""A moment: seconds of `time.perf_counter`, or an event that will have happened then."""


class Moment(NamedTuple):
    """When one row was ready, when it started and when it was through, in seconds of `time.perf_counter`."""

    post_s: float
    start_s: float
    end_s: float


class Board:
    """The rows of one step that are through. One per step; used by all threads of a rank.

    The first error is everybody's: whoever waits gets it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._through: dict[int, torch.cuda.Event | None] = {}
        self._waiting: dict[int, list[threading.Event]] = {}
        self._error: BaseException | None = None

    def settle(self, row: int, event: torch.cuda.Event | None = None) -> None:
        """Say that `row` is through (on a GPU: once `event` has happened)."""
        with self._lock:
            self._through[row] = event
            waiting = self._waiting.pop(row, ())
        for bell in waiting:
            bell.set()

    def fail(self, error: BaseException) -> None:
        """Nothing more will be through."""
        with self._lock:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, {}
        for bells in waiting.values():
            for bell in bells:
                bell.set()

    def missing(self, rows: Iterable[int]) -> int | None:
        """The first of these rows that is not through."""
        with self._lock:
            return self._missing(rows)

    def wait_any(self, rows: Sequence[int], timeout_s: float) -> bool:
        """Wait until one of these rows is through; False where none was after `timeout_s`."""
        bell = threading.Event()
        with self._lock:
            if self._missing(rows) is None or any(row in self._through for row in rows):
                return True
            for row in rows:
                self._waiting.setdefault(row, []).append(bell)
        came = bell.wait(timeout_s)
        self.missing(())
        return came

    def wait_all(self, rows: Sequence[int], timeout_s: float) -> int | None:
        """Wait until all of these rows are through; the first that was not after `timeout_s`, None where all are.

        On a GPU what the current stream does next comes after them.
        """
        until = time.monotonic() + timeout_s
        while (row := self.missing(rows)) is not None:
            if not self.wait_any((row,), max(0.0, until - time.monotonic())):
                return row
        for row in rows:
            event = self._through[row]
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
        return None

    def _missing(self, rows: Iterable[int]) -> int | None:
        if self._error is not None:
            raise self._error
        return next((row for row in rows if row not in self._through), None)


class Stamps:
    """The clock of one step on one device: host time on a CPU, events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._timed = device.type == "cuda"
        self.begin_s = time.perf_counter()
        self._begin = self._recorded() if self._timed else None

    def now(self) -> Stamp:
        """This moment of the current stream."""
        return self._recorded() if self._timed else time.perf_counter()

    def event(self) -> torch.cuda.Event | None:
        """An event behind what the current stream has queued; None on a CPU."""
        return torch.cuda.current_stream().record_event() if self._timed else None

    def resolve(self, stamps: Mapping[int, tuple[Stamp, Stamp, Stamp]]) -> dict[int, Moment]:
        """Seconds for all stamps; on a GPU waits until the device is through."""
        if self._timed:
            torch.cuda.synchronize()
        return {row: Moment(*(self._seconds(stamp) for stamp in three)) for row, three in stamps.items()}

    def _seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp
        assert self._begin is not None
        return self.begin_s + float(self._begin.elapsed_time(stamp)) * 1e-3

    @staticmethod
    def _recorded() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return event
