"""What runs beside an operation of an emulated step, and how far the operation therefore is.

Decides how contention reaches real processes. Every rank writes the logical start
and end of its rows into one file that all ranks of the machine have mapped, so both
ends of a transfer see what the other end is busy with. How far an operation has got
by some moment is integrated over what ran beside it on its two ends, at the rates
of `cost/sharing.py`: an entry that comes a little late still counts in full for
every operation that has not ended yet. Of a transfer every participant enters when
it was ready, at once; it has begun when all have.

All times are logical seconds of the step.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from disagmoe.cost.sharing import Load, Use, rate
from disagmoe.ops import COMPUTE_KINDS, RECV_STREAMS, SEND_STREAMS, Stream
from disagmoe.plan.dependencies import build_graph
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.runtime.groups import RankMap

NEVER = math.inf
_ITEM = 8


class Times(Protocol):
    """Start and end of every row on every rank; NEVER where it has not started or not ended."""

    def start(self, rank: int, row: int) -> float: ...

    def end(self, rank: int, row: int) -> float: ...


class Logbook:
    """Times of all ranks in one file of 16 bytes per rank and row; a rank writes its own rows only."""

    def __init__(self, path: Path, ranks: int, rows: int) -> None:
        """Map the file `path`, made by `Logbook.create`."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 2 * ranks * rows * _ITEM)
        self._rows = rows
        self._values = memoryview(self._map).cast("d")
        self._ends = ranks * rows

    @classmethod
    def create(cls, path: Path, ranks: int, rows: int) -> Path:
        """Write an empty logbook."""
        path.write_bytes(np.full(2 * ranks * rows, NEVER).tobytes())
        return path

    def clear(self, rank: int) -> None:
        """Forget the times of one rank."""
        nothing = np.full(self._rows, NEVER).tobytes()
        for first in (rank * self._rows, self._ends + rank * self._rows):
            self._map[first * _ITEM : (first + self._rows) * _ITEM] = nothing

    def begin(self, rank: int, row: int, at_s: float) -> None:
        self._values[rank * self._rows + row] = at_s

    def finish(self, rank: int, row: int, at_s: float) -> None:
        self._values[self._ends + rank * self._rows + row] = at_s

    def start(self, rank: int, row: int) -> float:
        return self._values[rank * self._rows + row]

    def end(self, rank: int, row: int) -> float:
        return self._values[self._ends + rank * self._rows + row]


@dataclass(frozen=True)
class Progress:
    """How an operation got on: it ended at `end_s`, or (NEVER) `left_s` seconds are left when nothing disturbs it."""

    end_s: float
    left_s: float


class Traffic:
    """The rows of a priced Program on the ranks of a placement, and what they do to each other."""

    def __init__(self, program: Program, pricing: Pricing, ranks: RankMap, times: Times) -> None:
        self.duration_s: list[float] = pricing.duration_s.tolist()
        self._place = [ranks.place(rank) for rank in range(ranks.world_size)]
        self._members = cache(lambda worker, rank: ranks.ranks(worker, self._place[rank].replica))
        self._times = times
        self._uses = _uses(program, pricing)
        self._partner = partners(program)
        self._worker: list[int] = program.worker.tolist()
        self._joint = np.isin(program.stream, [int(s) for s in (*SEND_STREAMS, *RECV_STREAMS, Stream.COLL)]).tolist()
        self._peer: list[int] = program.peer.tolist()
        self._lanes = [_lanes(program, pricing, worker) for worker in range(program.n_workers)]
        self._seen: dict[tuple[int, int], list[int]] = {}
        self._stream: list[int] = program.stream.tolist()

    def progress(self, row: int, rank: int, start_s: float, until_s: float) -> Progress:
        """How far `row`, running on `rank` since `start_s`, is at `until_s`.

        Rows of one stream of one rank must be asked about in their order.
        """
        left = self.duration_s[row]
        far_rank = self._far_rank(row, rank)
        near = self._beside(row, rank, rank, start_s, until_s)
        far = near if far_rank == rank else self._beside(row, rank, far_rank, start_s, until_s)
        moments = {start_s, until_s}
        for begin, end, _ in (*near, *far):
            moments.update(t for t in (begin, end) if start_s < t < until_s)
        for a, b in pairwise(sorted(moments)):
            now = self._rate(row, near, far, a)
            if left <= (b - a) * now:
                return Progress(a + left / now, 0.0)
            left -= (b - a) * now
        return Progress(NEVER, left)

    def _rate(self, row: int, near: list[_Entry], far: list[_Entry], at_s: float) -> float:
        own = self._uses[row]
        here = Load.of([own, *(use for begin, end, use in near if begin <= at_s < end)])
        if far is near:
            return rate(own, here, here)
        other = own._replace(going=own.coming, coming=own.going)
        return rate(own, here, Load.of([other, *(use for begin, end, use in far if begin <= at_s < end)]))

    def _far_rank(self, row: int, rank: int) -> int:
        """The rank at the other end of a transfer that stands for its worker; `rank` itself where there is none."""
        if self._partner[row] < 0:
            return rank
        others = self._members(self._peer[row], rank)
        return others[self._place[rank].local % len(others)]

    def _beside(self, row: int, rank: int, of_rank: int, start_s: float, until_s: float) -> list[_Entry]:
        """What runs on `of_rank` besides the operation itself at some time between `start_s` and `until_s`."""
        lanes = self._lanes[self._place[of_rank].worker]
        skip = (row, self._partner[row])
        seen = self._seen.setdefault((self._stream[row] + len(Stream) * rank, of_rank), [0] * len(lanes))
        found = []
        for lane, rows in enumerate(lanes):
            first = seen[lane]
            while first < len(rows) and self._times.end(of_rank, rows[first]) <= start_s:
                first += 1
            seen[lane] = first
            for other in rows[first:]:
                begin = self._begun(other, of_rank)
                if begin >= until_s:
                    break
                if other not in skip:
                    found.append((begin, self._times.end(of_rank, other), self._uses[other]))
        return found

    def _begun(self, row: int, rank: int) -> float:
        """When a row began: where several ranks take part, when the last of them was ready."""
        begin = self._times.start(rank, row)
        if begin == NEVER or not self._joint[row]:
            return begin
        partner = self._partner[row]
        other = row if partner < 0 else partner
        return max(begin, max(self._times.start(peer, other) for peer in self._members(self._worker[other], rank)))

    def restart(self) -> None:
        """A new step begins."""
        self._seen.clear()


_Entry = tuple[float, float, Use]
"""Start, end and use of something that ran."""


def partners(program: Program) -> list[int]:
    """Row at the other end of every transfer, -1 for other rows."""
    graph = build_graph(program)
    pairs = np.flatnonzero(graph.second_row >= 0)
    first, second = graph.first_row[pairs], graph.second_row[pairs]
    partner = np.full(len(program), -1, dtype=np.int64)
    partner[first], partner[second] = second, first
    found: list[int] = partner.tolist()
    return found


def _uses(program: Program, pricing: Pricing) -> list[Use]:
    """What each row takes of its worker."""
    columns = (program.kind, program.stream, pricing.link, pricing.slows_compute, pricing.slowed_by_compute)
    return [
        Use(
            computes=kind in COMPUTE_KINDS,
            going=kind not in COMPUTE_KINDS and stream not in RECV_STREAMS,
            coming=kind not in COMPUTE_KINDS and stream not in SEND_STREAMS,
            link=link,
            slows=slows,
            slowed=slowed,
        )
        for kind, stream, link, slows, slowed in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _lanes(program: Program, pricing: Pricing, worker: int) -> list[list[int]]:
    """Rows of every stream of a worker that take any time, in order."""
    lanes = []
    for stream in Stream:
        rows = program.stream_rows(worker, stream)
        lanes.append(rows[pricing.duration_s[rows] > 0.0].tolist())
    return [lane for lane in lanes if lane]
