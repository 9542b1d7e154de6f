"""One hop of an exchange on the wire: headers, check, then rows and metadata.

Decides the protocol. A rank that finds its own side wrong before it has sent its
header says so in the header (`refuse`), so that its peers raise at once instead of
waiting for rows. A rank that finds a peer's header wrong raises; ranks that had
nothing to do with the two notice when their own message to one of them fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagmoe.ops import Op
from disagmoe.runtime.errors import ExchangeError
from disagmoe.runtime.header import (
    HEADER_BYTES,
    HEADER_WORDS,
    MAGIC,
    UNKNOWN,
    Header,
    check_headers,
    dtype_code,
    name_op,
    pack_op,
)
from disagmoe.runtime.ledger import Ledger, WireBytes
from disagmoe.runtime.merge import Sides
from disagmoe.runtime.transport import Link, Slab, Transport, empty_rows

WORD_BYTES = 4

Splits = tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """What rows look like on both ends: `width` values of `dtype`; gate weights are at least fp32."""

    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def sum_dtype(self) -> torch.dtype:
        """Type in which rows are added and gate weights travel."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def copy_words(self) -> int:
        """Words of one gate weight or its gradient."""
        return self.sum_dtype.itemsize // WORD_BYTES

    def no_rows(self) -> Tensor:
        return torch.empty(0, self.width, dtype=self.dtype, device=self.device)

    def no_words(self) -> Tensor:
        return torch.empty(0, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class Cargo:
    """Rows [n, width] and metadata words [m] (int32), each split by member."""

    rows: Slab
    words: Slab


@dataclass(frozen=True)
class Hop:
    """Which hop of which exchange, and how many tokens the whole micro-batch has."""

    op: Op
    stage: int
    tokens: int


class Wire:
    """One direction of an exchange, on one rank."""

    def __init__(self, sides: Sides, transport: Transport, form: Format, ledger: Ledger) -> None:
        link = transport.link
        if link.members != sides.members:
            raise ValueError(f"a transport of ranks {link.members} cannot serve an exchange of ranks {sides.members}")
        self.form = form
        self.ledger = ledger
        self.me = link.me
        self._members = sides.members
        self._transport = transport
        self._peers = tuple(sides.peers(self.me, stage) for stage in range(sides.stages))
        self._linked = tuple(
            {*peers} | ({self.me} if (self.me, self.me) in sides.links[stage] else set())
            for stage, peers in enumerate(self._peers)
        )
        self._inter = tuple(sides.nodes[rank] != sides.nodes[self.me] for rank in sides.members)
        self.position = link.position
        self._clock = link.clock
        self._dtype = dtype_code(form.dtype)

    @property
    def link(self) -> Link:
        return self._transport.link

    def swap(self, hop: Hop, cargo: Cargo, expected: tuple[Splits, Splits] | None) -> Cargo:
        """Hand every member its piece of `cargo`; returns what they have for this rank.

        `expected` are the row and word splits of what comes, None where senders decide.
        """
        problem = self._problem(hop, cargo)
        if problem:
            self.refuse(hop)
            others = ", ".join(str(p) for p in self._peers[hop.stage])
            raise ExchangeError(f"{name_op(hop.op)}: rank {self.me} cannot exchange with rank {others}: {problem}")
        peers = self._peers[hop.stage]
        rows, words = [0] * len(self._members), [0] * len(self._members)
        for position, theirs in self._swap_headers(hop, cargo, expected):
            rows[position], words[position] = theirs.rows, theirs.words
        rows[self.position] = cargo.rows.splits[self.position]
        words[self.position] = cargo.words.splits[self.position]
        got = Cargo(
            Slab(empty_rows(sum(rows), cargo.rows.data), tuple(rows)),
            Slab(empty_rows(sum(words), cargo.words.data), tuple(words)),
        )
        if peers or self._transport.collective:
            self._transport.swap([(cargo.words, got.words), (cargo.rows, got.rows)])
        else:
            got.rows.data.copy_(cargo.rows.data)
            got.words.data.copy_(cargo.words.data)
        self._count(hop.op, cargo, peers)
        return got

    def refuse(self, hop: Hop) -> None:
        """Tell the peers of a hop that this rank cannot take part."""
        nothing = (0,) * len(self._members)
        cargo = Cargo(Slab(self.form.no_rows(), nothing), Slab(self.form.no_words(), nothing))
        self._send_headers(hop, cargo, None, refused=1)

    def _problem(self, hop: Hop, cargo: Cargo) -> str | None:
        """What is wrong with the rank's own cargo, if anything."""
        form, rows, words = self.form, cargo.rows, cargo.words
        if rows.data.dim() != 2 or rows.data.shape[1] != form.width or rows.data.dtype != form.dtype:
            has = f"{rows.data.dtype} {list(rows.data.shape)}"
            return f"rows must be {form.dtype} [rows, {form.width}], not {has}"
        for slab, label in ((rows, "rows"), (words, "words of metadata")):
            if sum(slab.splits) != slab.data.shape[0] or min(slab.splits) < 0:
                return f"{slab.data.shape[0]} {label} cannot be split into {list(slab.splits)}"
        linked = self._linked[hop.stage]
        for member, count in zip(self._members, rows.splits, strict=True):
            if count and member not in linked:
                return f"{count} rows for rank {member}, which hop {hop.stage} does not lead to"
        return None

    def _swap_headers(self, hop: Hop, cargo: Cargo, expected: tuple[Splits, Splits] | None) -> list[tuple[int, Header]]:
        """Headers of the peers by position, checked against this rank's own."""
        mine, theirs = self._send_headers(hop, cargo, expected, refused=0)
        for position, header in theirs:
            check_headers(self.me, mine[position], self._members[position], header)
        if self._clock is not None and theirs:
            self._clock.heard_ns(hop.op, max(header.posted_ns for _, header in theirs))
        return theirs

    def _send_headers(
        self, hop: Hop, cargo: Cargo, expected: tuple[Splits, Splits] | None, *, refused: int
    ) -> tuple[dict[int, Header], list[tuple[int, Header]]]:
        peers = self._peers[hop.stage]
        if not peers and not self._transport.collective:
            return {}, []
        code = pack_op(hop.op)
        posted = 0 if self._clock is None else self._clock.posted_ns(hop.op)
        mine: dict[int, Header] = {}
        for position, member in enumerate(self._members):
            if member in peers:
                want = (UNKNOWN, UNKNOWN) if expected is None else (expected[0][position], expected[1][position])
                mine[position] = Header(
                    MAGIC, refused, code, hop.stage, hop.tokens, self._dtype, self.form.width,
                    self.form.sum_dtype.itemsize, cargo.rows.splits[position], cargo.words.splits[position],
                    *want, posted,
                )  # fmt: skip
        splits = tuple(int(position in mine) for position in range(len(self._members)))
        sent = torch.tensor([*mine.values()], dtype=torch.int64).view(-1, HEADER_WORDS)
        received = torch.zeros_like(sent)
        self._transport.swap([(Slab(sent, splits), Slab(received, splits))], control=True)
        return mine, [(p, Header(*values)) for p, values in zip(mine, received.tolist(), strict=True)]

    def _count(self, op: Op, cargo: Cargo, peers: Sequence[int]) -> None:
        rows, words, headers = [0, 0], [0, 0], [0, 0]  # inside the node, to other nodes
        for position, inter in enumerate(self._inter):
            if position != self.position:
                rows[inter] += cargo.rows.splits[position] * self.form.row_bytes
                words[inter] += cargo.words.splits[position] * WORD_BYTES
                headers[inter] += HEADER_BYTES * (self._members[position] in peers)
        local = cargo.rows.splits[self.position] * self.form.row_bytes
        sent = (rows[0], rows[1], words[0], words[1], headers[0], headers[1], local)
        self.ledger.add(op, WireBytes(*sent))
