"""How the helper threads of process groups are scheduled.

Decides that gloo's event threads do not push others aside. Such a thread skips a
connection that is locked and asks for its events again at once. If waking up it
takes the core of the very thread that holds the lock, in the midst of a send, it
spins until its time slice ends: swapping two headers of 104 bytes then takes
milliseconds instead of 70 microseconds (two ranks on two busy cores).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def patient_threads() -> Iterator[None]:
    """Threads started inside wait for a core when they wake up, instead of taking one (Linux; elsewhere nothing)."""
    usual = getattr(os, "SCHED_OTHER", None)
    if usual is None or os.sched_getscheduler(0) != usual:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread, inherited by those it starts
    try:
        yield
    finally:
        os.sched_setscheduler(0, usual, os.sched_param(0))
