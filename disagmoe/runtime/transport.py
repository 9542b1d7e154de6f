"""How slabs of rows get from rank to rank.

A slab is a tensor whose rows are cut into one piece per member of a process group,
in the group's order. A message hands piece i of the sent slab to member i. Two
ways, equal in their result: one message per pair of ranks (`pairs`), and one
all-to-all over everybody (`union`). A rank's piece for itself never touches the
network: gloo has no self-send.

Sizes are known on both sides beforehand (`wire.py` sees to it), with one
exception: a *letter*, a header with what rides along, may be shorter than its
receiver allows for (`letter_bytes`), which gloo's point-to-point messages permit.

On NCCL rows go over the NCCL group, letters over a gloo group at its side, so that
the host knows sizes without waiting for the device (written so, not run).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.ops import Op
from disagmoe.runtime.errors import PeerLostError, first_line
from disagmoe.runtime.header import HEADER_BYTES

TRANSPORTS = ("pairs", "union")
LETTER_BYTES = 64 << 10
"""Most bytes of a letter between a pair of ranks: copying so much costs less than a message of its own."""

Sending = list[tuple[dist.Work, str]]
"""Works under way, each with what it is, as in "send to rank 3"."""


class Channel(IntEnum):
    """What a message is; messages of one channel between two ranks keep their order."""

    LETTER = 0
    WORDS = 1
    ROWS = 2


@dataclass(frozen=True)
class Slab:
    """Rows on their way: row `order[i]` of `data` [n, ...] (None: row i) is row i on the wire.

    `splits[j]` of the wire rows belong to member j.
    """

    data: Tensor
    splits: tuple[int, ...]
    order: Tensor | None = None
    _made: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rows(self) -> int:
        """Rows on the wire."""
        return int((self.data if self.order is None else self.order).shape[0])

    @cached_property
    def packed(self) -> Tensor:
        """All wire rows, contiguous."""
        return self.data.contiguous() if self.order is None else self.data.index_select(0, self.order)

    def piece(self, member: int) -> Tensor:
        """The wire rows of one member, contiguous; rows that lie side by side are not copied."""
        if member not in self._made:
            start = self._starts[member]
            self._made[member] = self._cut(start, start + self.splits[member])
        return self._made[member]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.splits))

    def _cut(self, start: int, stop: int) -> Tensor:
        if self.order is None:
            return self.data[start:stop].contiguous()
        order = self.order[start:stop]
        if stop - start > 1 and order.is_cpu:  # on a GPU the host would have to wait for the answer
            first, last = int(order[0]), int(order[-1])
            if last - first == stop - start - 1 and bool((order[1:] > order[:-1]).all()):
                return self.data[first : last + 1].contiguous()
        return self.data.index_select(0, order)


class Clock(Protocol):
    """The logical clock of a paced run (`pacing.py`)."""

    def posted_ns(self, op: Op) -> int:
        """When this rank was ready for an operation."""
        ...

    def heard_ns(self, op: Op, posted_ns: int) -> None:
        """When others were."""
        ...


@dataclass(frozen=True)
class Link:
    """The process groups of one direction between some ranks.

    `members` ascending, `me` one of them. `control` carries letters (CPU tensors),
    `data` rows; both None where `me` is alone. `clock` gives headers their logical
    times where the run is paced.
    """

    members: tuple[int, ...]
    me: int
    control: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    timeout_s: float
    clock: Clock | None = None

    @cached_property
    def position(self) -> int:
        return self.members.index(self.me)

    @cached_property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    @cached_property
    def on_gpu(self) -> bool:
        """Whether rows go over NCCL."""
        return self.data is not None and dist.get_backend(self.data) == "nccl"


class Posted:
    """Messages under way. Waiting raises PeerLostError when a peer is gone or does not answer in time."""

    def __init__(self, link: Link, receives: Sending | None = None, sends: Sending | None = None) -> None:
        self._link = link
        self._receives = receives or []
        self._sends = sends or []

    def received(self) -> None:
        """Until what comes is here."""
        self._wait(self._receives)

    def through(self) -> None:
        """Until everything is through; what was sent may be written to again."""
        self._wait(self._receives)
        self._wait(self._sends)

    def _wait(self, works: Sending) -> None:
        for work, what in works:
            try:
                work.wait(self._link.timeout)
            except RuntimeError as reason:
                raise PeerLostError(f"rank {self._link.me} could not {what}: {first_line(reason)}") from None
        works.clear()


class Transport(Protocol):
    """One direction between the members of `link`."""

    @property
    def link(self) -> Link: ...

    @property
    def collective(self) -> bool:
        """Every member must take part in every message, even with nothing to send."""
        ...

    @property
    def letter_bytes(self) -> int:
        """Most bytes of a letter, its header included; the same on all members."""
        ...

    def pack(self, slab: Slab, ridden: Container[int]) -> None:
        """Lay the rows of `slab` ready to be sent, but for those of members in `ridden`."""
        ...

    def start(
        self, channel: Channel, sent: Slab, received: Slab, ridden: Container[int] = (), rode: Container[int] = ()
    ) -> Posted:
        """Begin to fill `received` from what the members send; a rank's own piece is there at once.

        Nothing is sent to members in `ridden` and nothing comes from those in `rode`.
        """
        ...


@dataclass(frozen=True)
class Pairs:
    """Point to point: one message per pair of ranks and channel, empty ones left out."""

    link: Link

    @property
    def collective(self) -> bool:
        return False

    @property
    def letter_bytes(self) -> int:
        return HEADER_BYTES if self.link.on_gpu else LETTER_BYTES

    def pack(self, slab: Slab, ridden: Container[int]) -> None:
        self._pieces(slab, ridden)

    def start(
        self, channel: Channel, sent: Slab, received: Slab, ridden: Container[int] = (), rode: Container[int] = ()
    ) -> Posted:
        link, me = self.link, self.link.position
        incoming, outgoing = self._pieces(received, rode), self._pieces(sent, ridden)
        posted = Posted(link)
        if link.on_gpu and channel is not Channel.LETTER:
            posted = Posted(link, self._batched(incoming, outgoing))
        elif incoming or outgoing:
            group = link.control if channel is Channel.LETTER else link.data
            assert group is not None
            receives = [(group.recv([t], i, channel), f"receive from rank {link.members[i]}") for i, t in incoming]
            sends = [(group.send([t], i, channel), f"send to rank {link.members[i]}") for i, t in outgoing]
            posted = Posted(link, receives, sends)
        if received.splits[me]:
            received.piece(me).copy_(sent.piece(me))
        return posted

    def _pieces(self, slab: Slab, but: Container[int]) -> list[tuple[int, Tensor]]:
        """Pieces that are neither empty nor this rank's own nor of members in `but`."""
        me = self.link.position
        return [(i, slab.piece(i)) for i, count in enumerate(slab.splits) if count and i != me and i not in but]

    def _batched(self, incoming: Sequence[tuple[int, Tensor]], outgoing: Sequence[tuple[int, Tensor]]) -> Sending:
        """NCCL knows no tags: one batch per channel; both ends go through the channels in the same order."""
        members, group = self.link.members, self.link.data
        batch = [dist.P2POp(dist.irecv, t, members[i], group) for i, t in incoming]
        batch += [dist.P2POp(dist.isend, t, members[i], group) for i, t in outgoing]
        return [(work, _name_all(self.link)) for work in dist.batch_isend_irecv(batch)] if batch else []


@dataclass(frozen=True)
class Union:
    """One all-to-all over all members per channel. Its sizes must be exact, so nothing rides with a header."""

    link: Link

    @property
    def collective(self) -> bool:
        return True

    @property
    def letter_bytes(self) -> int:
        return HEADER_BYTES

    def pack(self, slab: Slab, ridden: Container[int]) -> None:
        _ = slab.packed  # the slab keeps it

    def start(
        self, channel: Channel, sent: Slab, received: Slab, ridden: Container[int] = (), rode: Container[int] = ()
    ) -> Posted:
        group = self.link.control if channel is Channel.LETTER else self.link.data
        if group is None:
            received.data.copy_(sent.packed)
            return Posted(self.link)
        work = dist.all_to_all_single(
            received.data, sent.packed, list(received.splits), list(sent.splits), group=group, async_op=True
        )
        assert work is not None
        return Posted(self.link, [(work, _name_all(self.link))])


def make_transport(name: str, link: Link) -> Transport:
    """The transport called `name` over `link`."""
    if name not in TRANSPORTS:
        raise ValueError(f"unknown transport {name!r}; known: {', '.join(TRANSPORTS)}")
    return Pairs(link) if name == "pairs" else Union(link)


def _name_all(link: Link) -> str:
    return f"exchange with ranks {', '.join(str(m) for m in link.members if m != link.me)}"


def empty_rows(rows: int, like: Tensor) -> Tensor:
    """Uninitialised [rows, ...] of the other dimensions, type and device of `like`."""
    return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
