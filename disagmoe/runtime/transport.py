"""How slabs of rows get from rank to rank.

A slab is a tensor whose first dimension is cut into one piece per member of a
process group, in the group's order. A swap hands piece i of the sent slab to
member i. Sizes are known on both sides beforehand (`wire.py` sees to it). Two
ways, equal in their result: one message per pair of ranks (`pairs`), and one
all-to-all over everybody (`union`). A rank's piece for itself never touches the
network: gloo has no self-send.

On NCCL rows go over the NCCL group, headers over a gloo group at its side, so
that the host knows sizes without waiting for the device (written so, not run).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.ops import Op
from disagmoe.runtime.errors import PeerLostError, first_line

TRANSPORTS = ("pairs", "union")


@dataclass(frozen=True)
class Slab:
    """`data` [n, ...], contiguous; `splits[i]` of the n belong to member i."""

    data: Tensor
    splits: tuple[int, ...]

    def pieces(self) -> tuple[Tensor, ...]:
        """One view per member."""
        return tuple(torch.split(self.data, list(self.splits)))


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

    `members` ascending, `me` one of them. `control` carries headers (CPU tensors),
    `data` rows; both None where `me` is alone. `clock` gives headers their logical
    times where the run is paced.
    """

    members: tuple[int, ...]
    me: int
    control: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    timeout_s: float
    clock: Clock | None = None

    @property
    def position(self) -> int:
        return self.members.index(self.me)


class Transport(Protocol):
    """One direction between the members of `link`."""

    @property
    def link(self) -> Link: ...

    @property
    def collective(self) -> bool:
        """Every member must take part in every swap, even with nothing to send."""
        ...

    def swap(self, parts: Sequence[tuple[Slab, Slab]], *, control: bool = False) -> None:
        """Fill the second slab of each part from the first slabs of the members; returns when all are through.

        `control`: these are headers. Raises PeerLostError when a peer is gone or
        does not answer in time.
        """
        ...


@dataclass(frozen=True)
class Pairs:
    """Point to point: one message per pair of ranks and part, empty ones left out."""

    link: Link

    @property
    def collective(self) -> bool:
        return False

    def swap(self, parts: Sequence[tuple[Slab, Slab]], *, control: bool = False) -> None:
        link = self.link
        group = link.control if control else link.data
        outgoing = [(part, *piece) for part, (sent, _) in enumerate(parts) for piece in self._others(sent)]
        incoming = [(part, *piece) for part, (_, received) in enumerate(parts) for piece in self._others(received)]
        if group is not None and not control and dist.get_backend(group) == "nccl":
            works = self._batched(group, incoming, outgoing)
        else:
            first_tag = 0 if control else 1
            works = [(dist.irecv(t, m, group, first_tag + part), f"receive from rank {m}") for part, m, t in incoming]
            works += [(dist.isend(t, m, group, first_tag + part), f"send to rank {m}") for part, m, t in outgoing]
        for sent, received in parts:
            received.pieces()[link.position].copy_(sent.pieces()[link.position])
        for work, what in works:
            _wait(work, link, what)

    def _others(self, slab: Slab) -> list[tuple[int, Tensor]]:
        """Pieces that are not empty and not this rank's own."""
        return [
            (member, piece)
            for member, piece, count in zip(self.link.members, slab.pieces(), slab.splits, strict=True)
            if count and member != self.link.me
        ]

    def _batched(
        self, group: dist.ProcessGroup, incoming: list[tuple[int, int, Tensor]], outgoing: list[tuple[int, int, Tensor]]
    ) -> list[tuple[dist.Work | None, str]]:
        """NCCL knows no tags: one batch, in the same order (by part) on both ends."""
        batch = [dist.P2POp(dist.irecv, t, m, group) for _, m, t in incoming]
        batch += [dist.P2POp(dist.isend, t, m, group) for _, m, t in outgoing]
        what = _name_all(self.link)
        return [(work, what) for work in dist.batch_isend_irecv(batch)] if batch else []


@dataclass(frozen=True)
class Union:
    """One all-to-all over all members per part."""

    link: Link

    @property
    def collective(self) -> bool:
        return True

    def swap(self, parts: Sequence[tuple[Slab, Slab]], *, control: bool = False) -> None:
        group = self.link.control if control else self.link.data
        if group is None:
            for sent, received in parts:
                received.data.copy_(sent.data)
            return
        works = [
            dist.all_to_all_single(
                received.data, sent.data, list(received.splits), list(sent.splits), group=group, async_op=True
            )
            for sent, received in parts
        ]
        for work in works:
            _wait(work, self.link, _name_all(self.link))


def make_transport(name: str, link: Link) -> Transport:
    """The transport called `name` over `link`."""
    if name not in TRANSPORTS:
        raise ValueError(f"unknown transport {name!r}; known: {', '.join(TRANSPORTS)}")
    return Pairs(link) if name == "pairs" else Union(link)


def _name_all(link: Link) -> str:
    return f"exchange with ranks {', '.join(str(m) for m in link.members if m != link.me)}"


def _wait(work: dist.Work | None, link: Link, what: str) -> None:
    if work is None:
        return
    try:
        work.wait(timedelta(seconds=link.timeout_s))
    except RuntimeError as reason:
        raise PeerLostError(f"rank {link.me} could not {what}: {first_line(reason)}") from None


def empty_rows(rows: int, like: Tensor) -> Tensor:
    """Uninitialised [rows, ...] of the other dimensions, type and device of `like`."""
    return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
