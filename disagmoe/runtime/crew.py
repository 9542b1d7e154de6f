"""Ranks to call functions on, however they were started.

Decides who starts them. On one machine every call forks fresh ranks, so one that
dies takes no other call with it. Under torchrun or Slurm the processes are there
already: rank 0 calls, the others serve. A call that fails on some rank fails for
all, and ranks that are still there serve on; a rank that is killed there ends the
whole run, its launcher sees to that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from disagmoe.runtime.child import Context, own_device
from disagmoe.runtime.environment import init_from_environment, read_environment
from disagmoe.runtime.errors import RankError, first_line
from disagmoe.runtime.launch import spawn

T = TypeVar("T")

PLANNING_TIMEOUT_S = 1800.0
"""How long serving ranks wait for rank 0 to plan, and rank 0 for a call to end."""


class Crew(Protocol):
    """Some ranks."""

    @property
    def size(self) -> int: ...

    def call(self, fn: Callable[..., T], *args: object, timeout_s: float) -> list[T]:
        """`fn(context, *args)` on every rank; the results by rank. Raises RankError."""
        ...


@dataclass(frozen=True)
class Forked:
    """Ranks of this machine, forked for every call; `threads` CPU threads each."""

    size: int
    device: str = "cpu"
    threads: int = 1

    def call(self, fn: Callable[..., T], *args: object, timeout_s: float) -> list[T]:
        """As `Crew.call`; a rank may wait for a peer as long as it likes, `timeout_s` bounds the whole."""
        return spawn(self.size, fn, args, timeout_s=timeout_s, threads=self.threads, device=self.device)


@dataclass(frozen=True)
class Launched:
    """The ranks that torchrun or Slurm started, seen from rank 0."""

    context: Context

    @property
    def size(self) -> int:
        return self.context.world_size

    def call(self, fn: Callable[..., T], *args: object, timeout_s: float) -> list[T]:
        """As `Crew.call`; waits inside the function have limits of their own, the launcher ends what hangs."""
        dist.broadcast_object_list([(fn, args)], src=0)
        return _everywhere(self.context, fn, args)


def device_kind() -> str:
    """ "cuda" where torch finds a GPU (without initialising it: ranks may still be forked)."""
    return "cuda" if torch.cuda.device_count() else "cpu"


def joined() -> Context | None:
    """This rank's place among processes that were started together, once `under_launcher` has joined them."""
    if not dist.is_initialized():
        return None
    meeting = read_environment(os.environ)
    return Context(
        meeting.rank, meeting.world_size, meeting.local_rank, meeting.local_size,
        own_device(device_kind(), meeting.local_rank), PLANNING_TIMEOUT_S,
    )  # fmt: skip


def under_launcher(lead: Callable[[Launched], int]) -> int:
    """Join the processes that were started together; the first one leads, the others serve it. The exit status."""
    context = init_from_environment(device=device_kind(), group_timeout_s=PLANNING_TIMEOUT_S)
    if context.rank:
        _serve(context)
        return 0
    try:
        return lead(Launched(context))
    finally:
        dist.broadcast_object_list([None], src=0)
        dist.destroy_process_group()


def _serve(context: Context) -> None:
    """Do what rank 0 calls for, until it leaves."""
    while True:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            dist.destroy_process_group()
            return
        fn, args = box[0]
        try:
            _everywhere(context, fn, args)
        except RankError:
            continue  # rank 0 tells


@dataclass(frozen=True)
class _Failure:
    """Why a call failed on a rank; `secondary`: it only lost a peer."""

    reason: str
    secondary: bool


def _everywhere(context: Context, fn: Callable[..., T], args: tuple[object, ...]) -> list[T]:
    """Call on this rank, and hear from all."""
    try:
        found: T | _Failure = fn(context, *args)
    except Exception as error:
        lost = type(error).__name__ == "PeerLostError"
        found = _Failure(f"failed: {type(error).__name__}: {first_line(error)}", lost)
    heard: list[Any] = [None] * context.world_size
    dist.all_gather_object(heard, found)
    failures = [(r.secondary, rank, r.reason) for rank, r in enumerate(heard) if isinstance(r, _Failure)]
    if failures:
        _, rank, reason = min(failures)
        raise RankError(rank, context.world_size, reason)
    return heard
