"""The forked children of one launcher: watched, and ended by process id.

Decides which rank is at fault. After the first sign of trouble the others get a
short while to tell what they know; then everything is killed.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from disagmoe.runtime.child import BEAT, FAILURE, Failure
from disagmoe.runtime.errors import RankError

GRACE_S = 1.0
"""How long the others may take to report once one rank has failed."""
_POLL_S = 0.25


@dataclass
class _Rank:
    """One child and what is known of it."""

    rank: int
    pid: int
    channel: Connection
    heard: float
    result: Any = None
    answered: bool = False
    failure: Failure | None = None
    exit: int | None = None  # wait status, once it is gone


class Team:
    """The children of this process that make up one group of ranks."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self._folder = folder
        self._ranks: list[_Rank] = []

    def fork(self, body: Callable[[Connection], None]) -> None:
        """Start the next rank; `body(channel)` runs in the child and does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            gc.freeze()  # garbage of the parent must not be finalised in a child
            ours.close()
            for other in self._ranks:
                other.channel.close()
            body(theirs)
            os._exit(1)
        theirs.close()
        self._ranks.append(_Rank(len(self._ranks), pid, ours, time.monotonic()))

    def send(self, message: object) -> None:
        """Give every rank its next work."""
        packed = pickle.dumps(message)
        for rank in self._ranks:
            rank.answered, rank.heard = False, time.monotonic()
            try:
                rank.channel.send_bytes(packed)
            except OSError:  # it is gone; collect finds out how
                self._reap(rank)

    def collect(self, deadline: float | None, silence_s: float | None) -> list[Any]:
        """One result per rank. `deadline` on the monotonic clock. Raises RankError."""
        while True:
            waiting = [r for r in self._ranks if not r.answered]
            if not waiting:
                return [r.result for r in self._ranks]
            self._listen(waiting, _POLL_S)
            if any(r.failure or (r.exit is not None and not r.answered) for r in self._ranks):
                self._hear_out()
                raise self._verdict("failed")
            now = time.monotonic()
            if deadline is not None and now > deadline:
                raise self._verdict("did not finish before the deadline")
            if silence_s is not None and any(not r.answered and now - r.heard > silence_s for r in self._ranks):
                raise self._verdict(f"gave no sign of life for {silence_s:g} s")

    def dismiss(self, patience_s: float = 5.0) -> None:
        """Let idle ranks leave by themselves, then make sure."""
        for rank in self._ranks:
            rank.channel.close()
        until = time.monotonic() + patience_s
        while time.monotonic() < until and not all(self._reap(rank) for rank in self._ranks):
            time.sleep(0.005)
        self.kill()

    def kill(self) -> None:
        """End every child that is still there, stopped ones too."""
        for rank in self._ranks:
            if not self._reap(rank):
                os.kill(rank.pid, signal.SIGKILL)  # ours and not yet waited for, so the number is not reused
        for rank in self._ranks:
            if rank.exit is None:
                rank.exit = os.waitpid(rank.pid, 0)[1]
            rank.channel.close()

    def _listen(self, ranks: list[_Rank], timeout_s: float) -> None:
        """Take in messages and deaths for at most `timeout_s`."""
        ready = wait([r.channel for r in ranks if not r.channel.closed], timeout_s)
        for rank in ranks:
            if rank.channel not in ready:
                continue
            try:
                kind, value = pickle.loads(rank.channel.recv_bytes())
            except (EOFError, OSError):
                self._reap(rank, patience_s=GRACE_S)
                rank.channel.close()
                continue
            rank.heard = time.monotonic()
            if kind == FAILURE:
                rank.failure = value
            elif kind != BEAT:
                rank.answered, rank.result = True, value

    def _hear_out(self) -> None:
        """Let the others say what they know."""
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            open_ = [r for r in self._ranks if not (r.answered or r.failure or r.exit is not None)]
            if not open_:
                return
            self._listen(open_, 0.05)

    def _reap(self, rank: _Rank, patience_s: float = 0.0) -> bool:
        """Whether a child is gone; waits a little for one that is about to go."""
        until = time.monotonic() + patience_s
        while rank.exit is None:
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid:
                rank.exit = status
            elif time.monotonic() >= until:
                return False
            else:
                time.sleep(0.005)
        return True

    def _verdict(self, silent: str) -> RankError:
        """The error that names the rank at fault; `silent` says what a rank did that never answered."""
        for rank in self._ranks:
            if rank.exit is not None and rank.failure is None and not rank.answered:
                return RankError(rank.rank, self.world_size, _how_it_ended(rank.exit))
        failures = [(r, r.failure) for r in self._ranks if r.failure]
        for rank, failure in failures:
            if not failure.secondary:
                return RankError(rank.rank, self.world_size, failure.reason, failure.details)
        quiet = [r for r in self._ranks if not (r.answered or r.failure)]
        if quiet:
            return self._silent(quiet, "does not answer" if failures else silent, failures)
        rank, failure = failures[0]
        return RankError(rank.rank, self.world_size, failure.reason, failure.details)

    def _silent(self, quiet: list[_Rank], what: str, failures: list[tuple[_Rank, Failure]]) -> RankError:
        """The likeliest of several silent ranks: a stopped one, then one that is not just waiting for the others."""
        stopped = {r.rank for r in quiet if _is_stopped(r.pid)}
        stacks = self._stacks_of([r for r in quiet if r.rank not in stopped])
        rank = min(quiet, key=lambda r: (r.rank not in stopped, _only_waits(stacks.get(r.rank, "")), r.heard, r.rank))
        stack = stacks.get(rank.rank, "")
        reason = what + (" (the process is stopped)" if rank.rank in stopped else "")
        if stack:
            reason += f", it is in {stack.splitlines()[0]}"
        if others := [str(r.rank) for r in quiet if r is not rank]:
            reason += f"; no answer from rank {', '.join(others)} either"
        if failures:
            lost, failure = failures[0]
            reason += f"; rank {lost.rank} {failure.reason}"
        return RankError(rank.rank, self.world_size, reason, stack)

    def _stacks_of(self, ranks: list[_Rank]) -> dict[int, str]:
        """The Python stacks of running ranks, innermost call first; "" where one cannot tell any more."""
        files = {r.rank: self._folder / f"stack-{r.rank}" for r in ranks}
        for rank in ranks:
            if files[rank.rank].exists():  # before that the signal would end the rank
                os.kill(rank.pid, signal.SIGUSR1)
        until = time.monotonic() + 0.5
        while time.monotonic() < until and not all(f.exists() and f.stat().st_size for f in files.values()):
            time.sleep(0.01)
        found = {}
        for number, file in files.items():
            stack = file.read_text(errors="replace") if file.exists() else ""
            own = [x for x in stack.partition(" in child_main")[0].splitlines() if x.startswith("  File")]
            found[number] = "\n".join(x.strip().removeprefix("File ") for x in own)
        return found


_WAITING = ("distributed_c10d.py", "runtime/transport.py", "runtime/lane.py", "/threading.py", "runtime/child.py")


def _only_waits(stack: str) -> bool:
    """Whether the innermost call of a stack is one that waits for other ranks."""
    innermost = stack.splitlines()[0] if stack else ""
    return any(place in innermost for place in _WAITING)


def _is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal (Linux; elsewhere unknown, False)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else "?"
        return f"was killed by signal {number} ({name})"
    return f"ended with exit code {os.WEXITSTATUS(status)} and no word"
