"""The look-ahead list schedule the slow way: after every change each stream is asked again.

Written from the rules in `disagmoe/window_kernels.py` with plain lists; it keeps no
account of which streams can have changed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagmoe.window_kernels import PENDING

Longs = NDArray[np.int64]


class SlowWindow:
    """State of one run; arguments as those of `record_window`."""

    def __init__(self, *arguments: NDArray[np.generic]) -> None:
        (
            self.slot_ptr, self.slot_worker, self.row_node, self.row_slot, self.first_row, self.second_row,
            self.succ_ptr, self.succ, indegree, self.duration, self.takes, self.gives, self.window, self.limits,
        ) = (argument.tolist() for argument in arguments)  # fmt: skip
        self.waiting = list(indegree)
        self.left = [list(range(a, b)) for a, b in zip(self.slot_ptr[:-1], self.slot_ptr[1:], strict=True)]
        self.running: dict[int, tuple[float, int]] = {}
        self.counts = [[0] * len(self.limits[0]) for _ in self.limits]

    def visible(self, row: int) -> bool:
        slot = self.row_slot[row]
        return row in self.left[slot][: self.window[slot]]

    def startable(self, row: int, slot: int) -> bool:
        node = self.row_node[row]
        if self.first_row[node] != row or self.waiting[node]:
            return False
        second = self.second_row[node]
        return second < 0 or (self.row_slot[second] not in self.running and self.visible(second))

    def pick(self, slot: int) -> int:
        worker, seen, filler = self.slot_worker[slot], 0, -1
        counts, limits = self.counts[worker], self.limits[worker]
        for row in self.left[slot]:
            if seen == self.window[slot]:
                break
            node = self.row_node[row]
            fills = self.gives[node][PENDING] > 0
            seen += not fills
            takes = self.takes[node]
            room = all(t == 0 or c + t <= most for t, c, most in zip(takes, counts, limits, strict=True))
            if (seen > 1 and not room) or not self.startable(row, slot):
                continue
            if not fills:
                return int(row)
            filler = row if filler < 0 else filler
            if counts[PENDING] >= limits[PENDING]:
                return int(filler)
        return int(filler)

    def run(self) -> tuple[Longs, int]:
        sequence, started, ended, now = np.full(len(self.row_node), -1, np.int64), 0, 0, 0.0
        while True:
            moved = True
            while moved:
                moved = False
                for slot in range(len(self.left)):
                    row = -1 if slot in self.running else self.pick(slot)
                    if row < 0:
                        continue
                    node, moved = self.row_node[row], True
                    for one in {row, self.second_row[node]} - {-1}:
                        self.left[self.row_slot[one]].remove(one)
                        self.running[self.row_slot[one]] = (now + self.duration[node], node)
                        sequence[one] = started
                    self.count(node, self.takes, 1)
                    started += 1
            if not self.running:
                return sequence, ended
            now = min(until for until, _ in self.running.values())
            over = {node for until, node in self.running.values() if until <= now}
            self.running = {slot: held for slot, held in self.running.items() if held[1] not in over}
            for node in over:
                ended += 1
                self.count(node, self.gives, -1)
                for edge in range(self.succ_ptr[node], self.succ_ptr[node + 1]):
                    self.waiting[self.succ[edge]] -= 1

    def count(self, node: int, amounts: list[list[int]], sign: int) -> None:
        worker = self.slot_worker[self.row_slot[self.first_row[node]]]
        self.counts[worker] = [c + sign * a for c, a in zip(self.counts[worker], amounts[node], strict=True)]


def slow_window(*arguments: NDArray[np.generic]) -> tuple[Longs, int]:
    """As `record_window`."""
    return SlowWindow(*arguments).run()
