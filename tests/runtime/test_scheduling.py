"""Threads that do not push others aside."""

import os
import sys
import threading
from pathlib import Path

import pytest

from disagmoe.runtime.scheduling import patient_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")


def policy_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_started_inside_are_patient_and_the_starter_is_not() -> None:
    before = os.sched_getscheduler(0)
    with patient_threads():
        inside = policy_of_a_new_thread()
    assert inside == (os.SCHED_BATCH if before == os.SCHED_OTHER else before)
    assert os.sched_getscheduler(0) == before == policy_of_a_new_thread()


def _policies(context: object) -> list[int]:
    """Policies of the threads of a rank."""
    return [os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()]


def test_event_threads_of_groups_are_patient(pools) -> None:
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("this process runs under another policy")
    for policies in pools(2).run(_policies):
        assert os.SCHED_BATCH in policies and os.SCHED_OTHER in policies


def test_another_policy_is_left_alone() -> None:
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("this process runs under another policy")

    def batch() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with patient_threads():
            pass
        found.append(os.sched_getscheduler(0))

    found: list[int] = []
    thread = threading.Thread(target=batch)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH]
