"""How many bytes a rank puts on the wire.

Counted where they are sent, from the sizes of the messages themselves: rows
(payload), metadata and headers, inside a node and between nodes. Rows that a rank
passes to itself are no wire bytes and stand apart (`local`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from disagmoe.ops import Op


@dataclass(frozen=True)
class WireBytes:
    """Bytes sent by one rank."""

    payload_intra: int = 0
    payload_inter: int = 0
    metadata_intra: int = 0
    metadata_inter: int = 0
    header_intra: int = 0
    header_inter: int = 0
    local: int = 0

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(
            self.payload_intra + other.payload_intra,
            self.payload_inter + other.payload_inter,
            self.metadata_intra + other.metadata_intra,
            self.metadata_inter + other.metadata_inter,
            self.header_intra + other.header_intra,
            self.header_inter + other.header_inter,
            self.local + other.local,
        )

    @property
    def payload(self) -> int:
        return self.payload_intra + self.payload_inter

    @property
    def total(self) -> int:
        """Everything but what stayed on the rank."""
        metadata = self.metadata_intra + self.metadata_inter
        return self.payload + metadata + self.header_intra + self.header_inter


class Ledger:
    """Wire bytes per operation. Lanes of one rank may write at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[Op, WireBytes] = {}

    def add(self, op: Op, sent: WireBytes) -> None:
        with self._lock:
            before = self._bytes.get(op)
            self._bytes[op] = sent if before is None else before + sent

    def total(self, which: Callable[[Op], bool] = lambda op: True) -> WireBytes:
        """Sum over the operations `which` is true of."""
        with self._lock:
            return sum((sent for op, sent in self._bytes.items() if which(op)), WireBytes())

    def by_op(self) -> dict[Op, WireBytes]:
        """A copy, in the order in which operations were first seen."""
        with self._lock:
            return dict(self._bytes)

    def clear(self) -> None:
        with self._lock:
            self._bytes.clear()
