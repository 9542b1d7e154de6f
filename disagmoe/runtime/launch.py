"""Starts the ranks of a run and ends them, whatever happens.

Decides how processes come and go. On one machine the launcher forks them itself:
torch is imported once, a file store takes the place of a port, and gloo is bound
to the loopback interface, so nothing collides with another run and nothing listens
to the outside. On many machines `torchrun` or Slurm starts the processes and
`init_from_environment` joins them.

The launcher has deadlines of its own. A rank that dies takes its peers along
within moments; a rank that hangs makes its peers time out, and is then killed here
(a hung process never leaves by itself). One error names the rank at fault: a rank
that was killed before one that raised, one that raised its own error before those
that only lost a peer, and a silent rank where everybody else lost a peer.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from disagmoe.runtime.child import Context, Start, child_main, loaded_call
from disagmoe.runtime.errors import LaunchError
from disagmoe.runtime.team import Team

T = TypeVar("T")

GROUP_TIMEOUT_S = 25.0
"""Longest wait for a peer inside one operation, unless told otherwise."""


class Pool:
    """Forked ranks that stay: calls functions on all of them, one after the other.

    Functions and arguments are pickled. A failed call ends the pool. Use it as a
    context manager, from one thread, and on the thread that lives longest: ranks
    die with the thread that started them.
    """

    def __init__(
        self,
        world_size: int,
        *,
        group_timeout_s: float = GROUP_TIMEOUT_S,
        threads: int = 1,
        device: str = "cpu",
        start_timeout_s: float = 60.0,
    ) -> None:
        self.world_size = _checked_size(world_size)
        self._team, self._folder = _fork(world_size, loaded_call, group_timeout_s, threads, device)
        self._open = True
        self._collect(time.monotonic() + start_timeout_s, None)  # every rank says that it has joined

    @property
    def is_open(self) -> bool:
        """Whether the ranks are still there."""
        return self._open

    def run(
        self,
        fn: Callable[..., T],
        *args: object,
        timeout_s: float | None = 120.0,
        silence_s: float | None = None,
    ) -> list[T]:
        """`fn(context, *args)` on every rank; the results by rank. Raises RankError."""
        if not self._open:
            raise LaunchError("this pool has ended; start another one")
        self._team.send((fn, args))
        return self._collect(None if timeout_s is None else time.monotonic() + timeout_s, silence_s)

    def close(self) -> None:
        """End every rank; nothing of them is left afterwards."""
        if self._open:
            self._open = False
            self._team.dismiss()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, deadline: float | None, silence_s: float | None) -> list[Any]:
        try:
            return self._team.collect(deadline, silence_s)
        except BaseException:
            self._open = False
            self._team.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def spawn(
    world_size: int,
    fn: Callable[..., T],
    args: Sequence[object] = (),
    *,
    timeout_s: float | None = 120.0,
    silence_s: float | None = None,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    threads: int = 1,
    device: str = "cpu",
) -> list[T]:
    """Run `fn(context, *args)` on `world_size` forked ranks of one machine; the results by rank.

    `timeout_s` bounds the whole call, `silence_s` the time a rank may take between
    two `context.beat()` calls; None = no bound. `group_timeout_s` bounds the wait
    for a peer inside one operation. `threads` per rank. `device` "cuda" gives rank
    r GPU r. Raises RankError; no process is left, however it ends.
    """

    def once(context: Context) -> None:
        context.report(fn(context, *args))

    team, folder = _fork(_checked_size(world_size), once, group_timeout_s, threads, device)
    try:
        return cast("list[T]", team.collect(None if timeout_s is None else time.monotonic() + timeout_s, silence_s))
    finally:
        team.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _checked_size(world_size: int) -> int:
    if world_size < 1:
        raise LaunchError(f"{world_size} processes cannot be started; at least 1")
    return world_size


def _fork(
    world_size: int, body: Callable[[Context], None], group_timeout_s: float, threads: int, device: str
) -> tuple[Team, Path]:
    if device not in ("cpu", "cuda"):
        raise LaunchError(f"device {device!r} is unknown; allowed: cpu, cuda")
    _import_ahead()
    folder = Path(tempfile.mkdtemp(prefix="disagmoe-"))
    team = Team(world_size, folder)
    try:
        for rank in range(world_size):
            start = Start(rank, world_size, folder, group_timeout_s, threads, device, os.getpid())
            team.fork(partial(child_main, start, body))
    except BaseException:
        team.kill()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return team, folder


def _import_ahead() -> None:
    """Import once, before forking, what every rank's first backward imports.

    It pulls in sympy: a third of a second of CPU time per rank, in the midst of the
    first step, when the other ranks are already waiting.
    """
    with suppress(ImportError):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
