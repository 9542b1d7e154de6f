"""How a run becomes a directory in results/: whole or not at all, and once.

A run is built in `.tmp-<id>-<pid>` and published by rename while a lock on its id
is held, so an equal run at the same time waits and then finds it done. Whatever
ends a build (an error, Ctrl-C) leaves nothing behind; what a killed process left
is removed by the next run.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_TIMEOUT_S = 3600.0
_POLL_S = 0.1
_TEMPORARY = re.compile(r"\.tmp-(?P<id>[0-9a-f]+)-[0-9]+(?P<old>-old)?")


class LockTimeout(RuntimeError):
    """An equal run held the lock for longer than we wait."""


@contextmanager
def locked(
    results_dir: Path,
    run_id: str,
    *,
    timeout_s: float = LOCK_TIMEOUT_S,
    on_wait: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Hold the lock of `run_id`; the lock file is removed with it.

    Raises LockTimeout after `timeout_s` seconds; `on_wait` is called once if the
    lock is not free at once.
    """
    path = results_dir / f".lock-{run_id}"
    deadline = time.monotonic() + timeout_s
    descriptor = _acquire(path)
    if descriptor is None and on_wait is not None:
        on_wait()
    while descriptor is None:
        if time.monotonic() > deadline:
            raise LockTimeout(f"an equal run has held {path} for {timeout_s:g} s; remove the file if none is running")
        time.sleep(_POLL_S)
        descriptor = _acquire(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path) -> int | None:
    """A descriptor that holds the lock, or None where another run holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before us may have removed the file: then this lock is on nothing others can see.
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def publish(target: Path, run_id: str, build: Callable[[Path], None]) -> None:
    """Build a run and put it at `target`, replacing what is there. The lock of `run_id` is held by the caller."""
    temporary = target.parent / f".tmp-{run_id}-{os.getpid()}"
    old = temporary.with_name(f"{temporary.name}-old")
    try:
        temporary.mkdir()
        build(temporary)
        if target.exists():
            target.rename(old)
        try:
            temporary.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def remove_stale(results_dir: Path, held: str) -> None:
    """Remove builds nobody works on: those of `held`, whose lock we hold, and of ids whose lock is free."""
    for path in sorted(results_dir.glob(".tmp-*")):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None:
            continue
        if match["id"] == held:
            shutil.rmtree(path, ignore_errors=True)
            continue
        lock = results_dir / f".lock-{match['id']}"
        descriptor = _acquire(lock)
        if descriptor is not None:
            shutil.rmtree(path, ignore_errors=True)
            lock.unlink(missing_ok=True)
            os.close(descriptor)
