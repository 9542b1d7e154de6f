"""What a forked rank does: join the others, do its work, report, leave.

Decides what a rank inherits from its launcher (memory, nothing that runs) and how
it ends: always by `os._exit`, so that nothing of the launcher is run twice.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # public, but not in its __all__

from disagmoe.runtime.errors import LaunchError, PeerLostError, first_line
from disagmoe.runtime.scheduling import patient_threads

BEAT, RESULT, FAILURE = "beat", "result", "failure"
_DIE_WITH_PARENT = 1  # prctl PR_SET_PDEATHSIG
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # mallopt
_MOST_MMAP_THRESHOLD = 32 << 20


@dataclass(frozen=True)
class Context:
    """Where a rank is. `group_timeout_s` bounds the wait for a peer inside one operation.

    `local_rank` and `local_size` count the ranks of this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    device: torch.device
    group_timeout_s: float
    channel: Connection | None = field(default=None, repr=False)

    def beat(self) -> None:
        """Tell the launcher that this rank is alive and getting on."""
        self._send(BEAT, None)

    def report(self, result: object) -> None:
        """Hand a result to the launcher."""
        self._send(RESULT, result)

    def _send(self, kind: str, value: object) -> None:
        if self.channel is not None:
            # Plain pickle: torch's own would pass shared memory, which dies with this process.
            self.channel.send_bytes(pickle.dumps((kind, value)))


@dataclass(frozen=True)
class Failure:
    """How a rank failed. `secondary`: it only lost a peer."""

    reason: str
    details: str
    secondary: bool


@dataclass(frozen=True)
class Start:
    """What the launcher tells a rank it forks."""

    rank: int
    world_size: int
    folder: Path
    group_timeout_s: float
    threads: int
    device: str
    parent: int


def child_main(start: Start, body: Callable[[Context], None], channel: Connection) -> None:
    """The life of a forked rank. Does not return."""
    code = 1
    try:
        _settle(start)
        context = Context(
            start.rank, start.world_size, start.rank, start.world_size, own_device(start.device, start.rank),
            start.group_timeout_s, channel,
        )  # fmt: skip
        join(FileStore(str(start.folder / "store"), start.world_size), context)
        body(context)
        dist.destroy_process_group()
        code = 0
    except BaseException as error:
        _report_failure(channel, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def loaded_call(context: Context) -> None:
    """The body of a rank in a pool: do what comes until nothing comes any more."""
    context.report(None)
    assert context.channel is not None
    while True:
        try:
            fn, args = pickle.loads(context.channel.recv_bytes())
        except EOFError:
            return
        result = fn(context, *args)
        gc.collect()  # destroyed groups keep their threads for as long as a cycle of references holds them
        context.report(result)


def join(store: Store, context: Context) -> None:
    """Make the world group; a rank that does not arrive in time is named."""
    timeout = timedelta(seconds=context.group_timeout_s)
    with patient_threads():
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size, timeout=timeout)
    _await_arrival(store, context)
    try:
        dist.monitored_barrier(timeout=timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise PeerLostError(f"not every rank arrived: {first_line(error)}") from None


def _await_arrival(store: Store, context: Context) -> None:
    """Wait until every rank is there; without a connection no barrier could say who is missing."""
    keys = [f"arrived/{rank}" for rank in range(context.world_size)]
    store.set(keys[context.rank], "1")
    try:
        store.wait(keys, timedelta(seconds=context.group_timeout_s))
        return
    except RuntimeError as error:
        reason = first_line(error)
    with suppress(RuntimeError):  # the store leaves with rank 0, which says the same
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        reason = f"rank {', '.join(missing)} did not arrive in {context.group_timeout_s:g} s"
    raise PeerLostError(reason)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next tensor instead of giving it back to the system.

    Otherwise every tensor from 128 KiB up is mapped anew, and its page faults cost
    about ten times what copying a row buffer into it does. Elsewhere: nothing.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        libc.mallopt(_TRIM_THRESHOLD, 1 << 30)


def own_device(kind: str, local_rank: int) -> torch.device:
    """The device of a rank; on GPUs each rank of a machine has its own."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("device=cuda, but torch finds no CUDA device here; device=cpu runs without one")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(f"rank {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _settle(start: Start) -> None:
    """Cut what was inherited and die with the launcher, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which ends its ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != start.parent:
            os._exit(1)
    hidden = start.folder / f".stack-{start.rank}"
    faulthandler.register(signal.SIGUSR1, file=hidden.open("w"), all_threads=False)
    hidden.rename(start.folder / f"stack-{start.rank}")  # the launcher asks for a stack only where it finds the file
    keep_freed_memory()
    torch.set_num_threads(start.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if start.device == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise LaunchError("device=cuda: start the ranks before anything uses CUDA in the launching process")


def _report_failure(channel: Connection, error: BaseException) -> None:
    lost = isinstance(error, PeerLostError) or (isinstance(error, RuntimeError) and _lost_a_peer(str(error)))
    failure = Failure(
        f"failed: {type(error).__name__}: {first_line(error)}", "".join(traceback.format_exception(error)), lost
    )
    with suppress(OSError):  # the launcher may be gone as well
        channel.send_bytes(pickle.dumps((FAILURE, failure)))


def _lost_a_peer(message: str) -> bool:
    """Whether gloo says that somebody else is gone or does not answer."""
    said = ("closed by peer", "reset by peer", "Timed out waiting", "Broken pipe", "Connection refused", "timed out")
    return any(words in message for words in said)
