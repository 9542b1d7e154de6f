"""In-order queues on which exchanges run beside compute.

Decides what asynchronous means. A lane is one stream of a Program: a host thread
that runs one operation after the other, on a GPU under a CUDA stream of its own.
Whoever posts an operation gets a `Ticket`. gloo's sends wait for their receiver
even for 8 bytes, so nothing is ever sent from the compute thread itself.

After a failure a lane runs nothing more: everything posted fails with the first error.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

import torch

from disagmoe.runtime.errors import PeerLostError

T = TypeVar("T")


class Ticket(Generic[T]):
    """The result of a posted operation.

    `posted_s`, `started_s`, `finished_s` are `time.perf_counter()` values (0.0 = not yet).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.posted_s = time.perf_counter()
        self.started_s = 0.0
        self.finished_s = 0.0
        self._done = threading.Event()
        self._result: T
        self._error: BaseException | None = None
        self._event: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        """The host part is over; on a GPU the device may still be at work."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> T:
        """The result; raises what the operation raised, PeerLostError after `timeout_s`.

        On a GPU the current stream waits for the operation, the host does not.
        """
        if not self._done.wait(timeout_s):
            raise PeerLostError(f"{self.name} was not through after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        if self._event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._event)
            keep_for(self._result, stream)
        return self._result

    def run(self, work: Callable[[], T], stream: torch.cuda.Stream | None) -> BaseException | None:
        """Do the work and settle the ticket. For lanes."""
        self.started_s = time.perf_counter()
        try:
            if stream is None:
                self._result = work()
            else:
                with torch.cuda.stream(stream):
                    self._result = work()
                    self._event = stream.record_event()
        except BaseException as error:
            self._error = error
        self.finished_s = time.perf_counter()
        self._done.set()
        return self._error

    def fail(self, error: BaseException) -> None:
        """Settle the ticket without running it. For lanes."""
        self._error = error
        self._done.set()


class Lane:
    """One in-order queue with a thread of its own."""

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self.name = name
        cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._queue: queue.SimpleQueue[tuple[Ticket[Any], Callable[[], Any], torch.cuda.Event | None] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def post(self, name: str, work: Callable[..., T], *args: Any, **kwargs: Any) -> Ticket[T]:
        """Queue `work(*args, **kwargs)`. What the current CUDA stream has queued by now comes before it."""
        ticket: Ticket[T] = Ticket(name)
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream().record_event()
            keep_for((args, kwargs), self._stream)
        self._queue.put((ticket, lambda: work(*args, **kwargs), ready))
        return ticket

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread after what is queued; a lane that hangs is left behind."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        failed: BaseException | None = None
        while (item := self._queue.get()) is not None:
            ticket, work, ready = item
            if failed is not None:
                ticket.fail(failed)
                continue
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            failed = ticket.run(work, self._stream)
            del item, ticket, work


def keep_for(value: object, stream: torch.cuda.Stream) -> None:
    """Memory of the tensors in `value` is not given to others before `stream` is done with them."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            value.record_stream(stream)
    elif isinstance(value, (tuple, list)):
        for item in value:
            keep_for(item, stream)
    elif isinstance(value, dict):
        keep_for(list(value.values()), stream)
    elif is_dataclass(value) and not isinstance(value, type):
        keep_for([getattr(value, f.name) for f in fields(value)], stream)
