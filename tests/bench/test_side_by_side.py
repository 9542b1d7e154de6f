"""Work in several processes: order, errors, one process where that is all there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from bench import side_by_side
from bench.side_by_side import in_order

ROOT = Path(__file__).resolve().parents[2]


def square(x: int) -> tuple[int, int]:
    time.sleep(0.02 * (5 - x % 5))
    return x * x, os.getpid()


def fail() -> tuple[int, int]:
    raise ValueError("this one cannot be done")


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_results_come_in_the_order_asked_for(processes: int) -> None:
    found = list(in_order([partial(square, x) for x in range(7)], processes))
    assert [value for value, _ in found] == [x * x for x in range(7)]
    pids = {pid for _, pid in found}
    assert pids == {os.getpid()} if processes == 1 else os.getpid() not in pids


@pytest.mark.parametrize("processes", [1, 2])
def test_pieces_are_started_as_asked_and_told_of_once(processes: int) -> None:
    told: list[int] = []
    found = in_order([partial(square, x) for x in range(5)], processes, start=[4, 2, 0, 1, 3], report=told.append)
    assert [value for value, _ in found] == [x * x for x in range(5)]
    assert told == (list(range(5)) if processes == 1 else [4, 2, 0, 1, 3])


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_reaches_the_caller(processes: int) -> None:
    results = in_order([partial(square, 1), fail, partial(square, 2)], processes)
    assert next(results)[0] == 1
    with pytest.raises(ValueError, match="this one cannot be done"):
        list(results)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_the_caller_ends_the_work(number: signal.Signals, tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys, time\n"
        "from bench.side_by_side import in_order\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(143))\n"
        "def work():\n"
        f"    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        "    time.sleep(60)\n"
        "list(in_order([work, work], 2))\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 2
    caller.send_signal(number)
    assert caller.wait(timeout=30) != 0
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_a_signal_while_processes_start_is_put_off_not_lost() -> None:
    reached: list[str] = []

    def start() -> None:
        with side_by_side._put_off(signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
            reached.append("the end of the block")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert reached == ["the end of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
