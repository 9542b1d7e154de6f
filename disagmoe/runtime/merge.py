"""Who owns which tokens, who holds which experts, and through whom copies travel.

An exchange joins two sides. *Owners* are the ranks that have the tokens (an
attention group, or what comes after a combine), *holders* those that have the
experts. Decides how copies of one token are merged on their way:

- `none`: every copy is a row of its own, owner to holder.
- `rank`: one row per (token, holder).
- `node`: one row per (token, node of holders), to a *gateway* there, which passes
  it on to the holders of its node; on the way back the gateway adds up the rows of
  its node. The gateway of an owner in its own node is the owner itself; in another
  node it is the holder of the owner's number, counted round.

A rank may be owner and holder (colocated systems). Tokens of a micro-batch have
one numbering per replica: owner after owner, in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

MERGES = ("none", "rank", "node")


def near_equal(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` contiguous blocks of `total`; the first ones are larger by one."""
    size, larger = divmod(total, parts)
    return tuple(size + (i < larger) for i in range(parts))


@dataclass(frozen=True)
class Blocks:
    """Contiguous blocks of things numbered 0, 1, ...: `ranks[i]` has the next `counts[i]` of them."""

    ranks: tuple[int, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.counts) or any(count < 0 for count in self.counts):
            raise ValueError(f"blocks need a size of at least 0 per rank: ranks {self.ranks}, sizes {self.counts}")

    @classmethod
    def each(cls, ranks: Sequence[int], count: int) -> Blocks:
        """The same number for every rank."""
        return cls(tuple(ranks), (count,) * len(ranks))

    @classmethod
    def split(cls, ranks: Sequence[int], total: int) -> Blocks:
        """`total` things in near-equal blocks."""
        return cls(tuple(ranks), near_equal(total, len(ranks)))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """First number after each block."""
        return tuple(accumulate(self.counts))

    @property
    def total(self) -> int:
        return self.ends[-1] if self.ends else 0

    def range_of(self, rank: int) -> range:
        """Numbers of `rank`'s block; empty for a rank without one."""
        if rank not in self.ranks:
            return range(0)
        index = self.ranks.index(rank)
        return range(self.ends[index] - self.counts[index], self.ends[index])

    def index_of(self, numbers: Tensor) -> Tensor:
        """Index of the block each of `numbers` [n] is in."""
        return torch.bucketize(numbers, torch.tensor(self.ends, dtype=torch.int64, device=numbers.device), right=True)


@dataclass(frozen=True)
class Sides:
    """The two sides of an exchange and how copies are merged between them.

    `nodes` gives the (logical) node of every rank in it. `only` limits the exchange
    to some pairs (owner, holder): one arrival of a layer that is exchanged source
    by source. None: everybody with everybody.
    """

    owners: tuple[int, ...]
    holders: tuple[int, ...]
    merge: str
    nodes: Mapping[int, int]
    only: frozenset[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.merge not in MERGES:
            raise ValueError(f"unknown merge {self.merge!r}; known: {', '.join(MERGES)}")
        if not self.owners or not self.holders:
            raise ValueError("an exchange needs at least one rank on either side")

    @cached_property
    def members(self) -> tuple[int, ...]:
        """All ranks, ascending: the order of their process group."""
        return tuple(sorted({*self.owners, *self.holders}))

    @cached_property
    def position(self) -> dict[int, int]:
        """Place of each rank among the members."""
        return {rank: i for i, rank in enumerate(self.members)}

    @property
    def stages(self) -> int:
        """Hops between an owner and a holder."""
        return 2 if self.merge == "node" else 1

    def gateway(self, owner: int, node: int) -> int:
        """The rank that passes on `owner`'s tokens in `node`, a node with holders."""
        if self.nodes[owner] == node:
            return owner
        there = self.holders_in(node)
        return there[self.owners.index(owner) % len(there)]

    def holders_in(self, node: int) -> tuple[int, ...]:
        """Holders of one node, in the order of the side."""
        return tuple(rank for rank in self.holders if self.nodes[rank] == node)

    @cached_property
    def served(self) -> frozenset[tuple[int, int]]:
        """The (owner, holder) pairs between which tokens travel."""
        if self.only is not None:
            return self.only
        return frozenset((owner, holder) for owner in self.owners for holder in self.holders)

    @cached_property
    def links(self) -> tuple[frozenset[tuple[int, int]], ...]:
        """Per hop, the (upper, lower) ranks that may pass rows; a rank may be linked to itself."""
        if self.stages == 1:
            return (self.served,)
        through = [(owner, self.gateway(owner, self.nodes[holder]), holder) for owner, holder in self.served]
        return frozenset((o, gateway) for o, gateway, _ in through), frozenset(
            (gateway, h) for _, gateway, h in through
        )

    def peers(self, rank: int, stage: int) -> tuple[int, ...]:
        """Other ranks that `rank` exchanges headers with in a hop, ascending."""
        linked = {b if a == rank else a for a, b in self.links[stage] if rank in (a, b)}
        return tuple(sorted(linked - {rank}))

    def reach(self, rank: int, stage: int) -> tuple[int, ...]:
        """Per holder, the position of the rank that `rank` hands its rows to in a hop; -1: not from here."""
        if stage == 0 and self.stages == 2:
            return tuple(
                self.position[self.gateway(rank, self.nodes[h])] if (rank, h) in self.served else -1
                for h in self.holders
            )
        return tuple(self.position[h] if (rank, h) in self.links[stage] else -1 for h in self.holders)
