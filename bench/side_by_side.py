"""Independent pieces of work on the machine's cores, with results in the order asked for.

Processes are forked, so a piece of work may refer to anything that exists when it
is handed over, and whatever ends the caller (an error, Ctrl-C, SIGTERM) ends them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar, cast

Result = TypeVar("Result")
MOST = 4
"""More processes than this gain little: the slowest system sets the time."""
GC_THRESHOLDS = (200_000, 50, 50)
"""Planning makes millions of small objects and next to no cycles: looked for as often as by default they cost a tenth
of its time."""

_work: Sequence[Callable[[], object]] = ()


def in_order(
    work: Sequence[Callable[[], Result]],
    processes: int | None = None,
    *,
    start: Sequence[int] | None = None,
    report: Callable[[int], None] | None = None,
) -> Iterator[Result]:
    """Results of `work`, in order, as they become known; in this process where only one is of use.

    `start` numbers the pieces in the order in which processes take them (the longest first, so that none
    waits for it at the end). `report` is told of a piece when this process begins it or another has done it.
    """
    tell = report or (lambda index: None)
    wanted = min(processes or _cores(), len(work), MOST)
    if wanted <= 1 or multiprocessing.parent_process() is not None or "fork" not in _methods():
        for index, piece in enumerate(work):
            tell(index)
            yield piece()
        return
    global _work
    _work = work
    started, known = list(range(len(work)) if start is None else start), dict[int, Result]()
    with ExitStack() as leaving:  # which ends the processes
        with _put_off(signal.SIGINT, signal.SIGTERM):
            pool = leaving.enter_context(multiprocessing.get_context("fork").Pool(wanted, initializer=_begin))
        results = zip(started, pool.imap(_do, started), strict=True)
        for index in range(len(work)):
            while index not in known:
                number, result = next(results)
                known[number] = cast(Result, result)
                tell(number)
            yield known.pop(index)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _methods() -> list[str]:
    return multiprocessing.get_all_start_methods()


@contextmanager
def _put_off(*numbers: signal.Signals) -> Iterator[None]:
    """Keep signals for afterwards: what their handlers raise while a process forks is lost in other modules' hooks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    kept = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if came:
        signal.raise_signal(came[0])


def _begin() -> None:
    """Leave Ctrl-C and SIGTERM to the parent's own handling: it ends this process. Look for garbage less often."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _do(index: int) -> object:
    return _work[index]()
