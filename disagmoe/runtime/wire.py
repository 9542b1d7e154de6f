"""One hop of an exchange on the wire: letters, check, then what did not ride with the letters.

Decides the protocol. A rank that finds its own side wrong before it has sent its
header says so in the header (`refuse`), so that its peers raise at once instead of
waiting for rows. A rank that finds a peer's header wrong raises; ranks that had
nothing to do with the two notice when their own message to one of them fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from disagmoe.ops import Op
from disagmoe.runtime.errors import ExchangeError
from disagmoe.runtime.header import (
    HEADER_BYTES,
    MAGIC,
    UNKNOWN,
    Header,
    check_headers,
    dtype_code,
    name_op,
    pack_op,
)
from disagmoe.runtime.ledger import Ledger, WireBytes
from disagmoe.runtime.mail import WORD_BYTES, Mail
from disagmoe.runtime.merge import Sides
from disagmoe.runtime.transport import Channel, Link, Posted, Slab, Transport, empty_rows

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


class Delivery:
    """What came of one hop: `words` are here, `rows` once the `with` block is left without an error.

    In between their sizes are known, and there is time to look at the words.
    """

    def __init__(self, words: Slab, rows: Slab, posted: Sequence[Posted]) -> None:
        self.words = words
        self.splits = rows.splits
        self.rows = rows.data
        self._posted = posted

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for posted in self._posted:
                posted.through()


class Wire:
    """One direction of an exchange, on one rank."""

    def __init__(self, sides: Sides, transport: Transport, form: Format, ledger: Ledger) -> None:
        link = transport.link
        if link.members != sides.members:
            raise ValueError(f"a transport of ranks {link.members} cannot serve an exchange of ranks {sides.members}")
        self.form = form
        self.ledger = ledger
        self.me = link.me
        self.position = link.position
        self._members = sides.members
        self._transport = transport
        peers = [set(sides.peers(self.me, stage)) for stage in range(sides.stages)]
        self._peers = [tuple(i for i, rank in enumerate(sides.members) if rank in found) for found in peers]
        self._linked = [
            {*found, self.position} if (self.me, self.me) in links else {*found}
            for found, links in zip(self._peers, sides.links, strict=True)
        ]
        self._inter = tuple(sides.nodes[rank] != sides.nodes[self.me] for rank in sides.members)
        self._clock = link.clock
        self._dtype = dtype_code(form.dtype)
        self.nothing = (0,) * len(sides.members)

    @property
    def link(self) -> Link:
        return self._transport.link

    def swap(self, hop: Hop, cargo: Cargo, expected: tuple[Splits, Splits] | None) -> Delivery:
        """Hand every member its piece of `cargo`; returns what they have for this rank.

        `expected` are the row and word splits of what comes, None where senders decide.
        """
        problem = self._problem(hop, cargo)
        if problem:
            self.refuse(hop)
            others = ", ".join(str(self._members[i]) for i in self._peers[hop.stage])
            raise ExchangeError(f"{name_op(hop.op)}: rank {self.me} cannot exchange with rank {others}: {problem}")
        mail = self._mail(hop, cargo, expected, refused=0)
        letters = mail.post()
        self._transport.pack(cargo.words, mail.words_ride)  # while the letters are under way
        self._transport.pack(cargo.rows, mail.rows_ride)
        letters.received()
        theirs = mail.read()
        for position, header in theirs.items():
            check_headers(self.me, mail.headers[position], self._members[position], header)
        if self._clock is not None and theirs:
            self._clock.heard_ns(hop.op, max(header.posted_ns for header in theirs.values()))
        self._count(hop, cargo)
        return self._fetch(cargo, mail, theirs, letters)

    def refuse(self, hop: Hop) -> None:
        """Tell the peers of a hop that this rank cannot take part."""
        cargo = Cargo(Slab(self.form.no_rows(), self.nothing), Slab(self.form.no_words(), self.nothing))
        self._mail(hop, cargo, None, refused=1).post().through()

    def _fetch(self, cargo: Cargo, mail: Mail, theirs: dict[int, Header], letters: Posted) -> Delivery:
        """Send what did not ride with the letters, and take in what comes."""
        rows, words = [0] * len(self._members), [0] * len(self._members)
        for position, header in theirs.items():
            rows[position], words[position] = header.rows, header.words
        rows[self.position] = cargo.rows.splits[self.position]
        words[self.position] = cargo.words.splits[self.position]
        got_words = Slab(empty_rows(sum(words), cargo.words.data), tuple(words))
        got_rows = Slab(empty_rows(sum(rows), cargo.rows.data), tuple(rows))
        words_rode, rows_rode = mail.unpack(theirs, got_words, got_rows)
        of_words = self._transport.start(Channel.WORDS, cargo.words, got_words, mail.words_ride, words_rode)
        of_rows = self._transport.start(Channel.ROWS, cargo.rows, got_rows, mail.rows_ride, rows_rode)
        of_words.received()
        return Delivery(got_words, got_rows, (of_words, of_rows, letters))

    def _problem(self, hop: Hop, cargo: Cargo) -> str | None:
        """What is wrong with the rank's own cargo, if anything."""
        form, rows, words = self.form, cargo.rows, cargo.words
        if rows.data.dim() != 2 or rows.data.shape[1] != form.width or rows.data.dtype != form.dtype:
            has = f"{rows.data.dtype} {list(rows.data.shape)}"
            return f"rows must be {form.dtype} [rows, {form.width}], not {has}"
        for slab, label in ((rows, "rows"), (words, "words of metadata")):
            if sum(slab.splits) != slab.rows or min(slab.splits) < 0:
                return f"{slab.rows} {label} cannot be split into {list(slab.splits)}"
        linked = self._linked[hop.stage]
        for position, count in enumerate(rows.splits):
            if count and position not in linked:
                return f"{count} rows for rank {self._members[position]}, which hop {hop.stage} does not lead to"
        return None

    def _mail(self, hop: Hop, cargo: Cargo, expected: tuple[Splits, Splits] | None, *, refused: int) -> Mail:
        """The letters to the peers of a hop."""
        code, form = pack_op(hop.op), self.form
        posted = 0 if self._clock is None else self._clock.posted_ns(hop.op)
        headers = {}
        for i in self._peers[hop.stage]:
            want = (UNKNOWN, UNKNOWN) if expected is None else (expected[0][i], expected[1][i])
            headers[i] = Header(
                MAGIC, refused, code, hop.stage, hop.tokens, self._dtype, form.width, form.sum_dtype.itemsize,
                cargo.rows.splits[i], cargo.words.splits[i], *want, posted,
            )  # fmt: skip
        return Mail(headers, cargo.words, cargo.rows, form.row_bytes, self._transport)

    def _count(self, hop: Hop, cargo: Cargo) -> None:
        rows, words, headers = [0, 0], [0, 0], [0, 0]  # inside the node, to other nodes
        for position in self._peers[hop.stage]:
            inter = self._inter[position]
            rows[inter] += cargo.rows.splits[position] * self.form.row_bytes
            words[inter] += cargo.words.splits[position] * WORD_BYTES
            headers[inter] += HEADER_BYTES
        local = cargo.rows.splits[self.position] * self.form.row_bytes
        sent = WireBytes(rows[0], rows[1], words[0], words[1], headers[0], headers[1], local)
        self.ledger.add(hop.op, sent)
