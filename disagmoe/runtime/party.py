"""One rank's part in an exchange: what it owns, what it holds, and whether what it was given fits.

Decides where a token is at home (where the residual and what is not routed are
computed): `first_expert`, the holder of its first expert; `blocks`, near-equal
blocks of tokens over the holders (dense layers); `source`, the owner itself
(colocated); `nowhere`, where what is not routed does not travel. And where experts
lie: in near-equal contiguous blocks on the holders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from disagmoe.runtime.errors import ExchangeError
from disagmoe.runtime.merge import Blocks, Sides
from disagmoe.runtime.route import End, Load
from disagmoe.runtime.wire import Format, Hop

HOMES = ("first_expert", "blocks", "source", "nowhere")


@dataclass(frozen=True)
class Experts:
    """How many experts a layer has and how many of them a token takes."""

    number: int
    top_k: int


@dataclass(frozen=True)
class Arrived:
    """What a holder got: the arguments of `ExpertPart`.

    `rows` [r, width]; `ids` [r, s] global expert ids, all of them held here, -1 in
    empty places; `weights` [r, s]; both None in a dense layer. `home` [h] indices of
    the rows whose home this is. `tokens` [r] numbers in the micro-batch.
    """

    rows: Tensor
    ids: Tensor | None
    weights: Tensor | None
    home: Tensor
    tokens: Tensor

    def without_rows(self) -> Arrived:
        """All but the rows, which will come again."""
        return replace(self, rows=self.rows[:0].clone())

    def with_rows(self, rows: Tensor) -> Arrived:
        """The same with other rows."""
        return replace(self, rows=rows)


@dataclass(frozen=True)
class Party:
    """Rank `me` in an exchange between `sides`; `experts` None in a dense layer."""

    sides: Sides
    me: int
    form: Format
    experts: Experts | None
    home: str

    def __post_init__(self) -> None:
        if self.home not in HOMES:
            raise ValueError(f"unknown home {self.home!r}; known: {', '.join(HOMES)}")
        if (self.home == "blocks") != (self.experts is None):
            raise ValueError(f"home {self.home!r} does not go with {'experts' if self.experts else 'a dense layer'}")
        holders = len(self.sides.holders)
        if self.experts is not None and self.experts.number < holders:
            raise ValueError(f"{self.experts.number} experts on {holders} ranks: each rank needs at least one")
        if self.home == "source" and not set(self.sides.owners) <= set(self.sides.holders):
            raise ValueError("home 'source' needs owners that are holders themselves")

    @property
    def is_owner(self) -> bool:
        return self.me in self.sides.owners

    @property
    def is_holder(self) -> bool:
        return self.me in self.sides.holders

    @cached_property
    def placed(self) -> Blocks:
        """Experts by holder."""
        return Blocks.split(self.sides.holders, self.experts.number if self.experts else 0)

    @cached_property
    def expert_holder(self) -> Tensor:
        """Index of the holder of each expert, [experts]."""
        return self.placed.index_of(torch.arange(self.placed.total)).to(self.form.device)

    @cached_property
    def reach(self) -> tuple[Tensor, ...]:
        """Per hop, the member through which each holder is reached, [holders]."""
        stages = range(self.sides.stages)
        return tuple(torch.tensor(self.sides.reach(self.me, stage), device=self.form.device) for stage in stages)

    @cached_property
    def serves(self) -> Tensor:
        """Whether own tokens travel to each holder, [holders]."""
        served = [(self.me, holder) in self.sides.served for holder in self.sides.holders]
        return torch.tensor(served, device=self.form.device)

    @cached_property
    def slots(self) -> int:
        """Most copies a row can have here."""
        if self.experts is None:
            return 0
        return 1 if self.sides.merge == "none" else min(self.experts.top_k, len(self.placed.range_of(self.me)))

    def load(self, tokens: Blocks, x: Tensor | None, ids: Tensor | None, weights: Tensor | None) -> Load:
        """The tokens this rank owns, every copy at its row; nothing for a mere holder."""
        self.check_owners(tokens)
        mine, device = tokens.range_of(self.me), self.form.device
        count = 0 if x is None else x.shape[0]
        if count != len(mine):
            raise ExchangeError(f"rank {self.me} has {count} rows of the {len(mine)} tokens it owns")
        ids, weights = self._checked_routing(count, ids, weights)
        if not count:
            return Load.nothing(self.form)
        numbers = torch.arange(mine.start, mine.stop, device=device)
        home = self._home_of(tokens, numbers, ids)
        row = torch.arange(count, device=device).repeat_interleave(ids.shape[1])
        expert, weight = ids.flatten(), weights.flatten()
        if self.sides.only is not None:
            home = torch.where(self.serves[home.clamp(min=0)], home, -1)
            kept = self.kept(ids)
            row, expert, weight = row[kept], expert[kept], weight[kept]
        return Load(tokens=numbers, home=home, row=row, expert=expert, weight=weight)

    def kept(self, ids: Tensor) -> Tensor:
        """Which of the flattened expert ids [t, k] of own tokens travel in this exchange."""
        return torch.nonzero(self.serves[self.expert_holder[ids.flatten()]]).flatten()

    def arrived(self, load: Load, rows: Tensor) -> tuple[Tensor, Arrived | None]:
        """What a holder computes on, and the cell of each copy in the flattened ids."""
        if not (rows.shape[0] or self.is_holder):
            return load.row, None
        per_row = torch.bincount(load.row, minlength=rows.shape[0])
        slot = torch.arange(load.row.shape[0], device=rows.device) - (per_row.cumsum(0) - per_row)[load.row]
        cells = load.row * self.slots + slot
        if not self.is_holder:
            return cells, None
        local = self.placed.range_of(self.me)
        if not _within(load.expert, local):
            raise ExchangeError(f"rank {self.me} holds experts {local.start} to {local.stop - 1} and got others")
        home = torch.nonzero(load.home == self.sides.holders.index(self.me)).flatten()
        if self.experts is None:
            return cells, Arrived(rows, None, None, home, load.tokens)
        shape = rows.shape[0], self.slots
        ids = torch.full((shape[0] * shape[1],), -1, device=rows.device).index_copy_(0, cells, load.expert)
        weights = load.weight.new_zeros(shape[0] * shape[1]).index_copy_(0, cells, load.weight)
        return cells, Arrived(rows, ids.view(shape), weights.view(shape), home, load.tokens)

    def return_member(self, tokens: Blocks, numbers: Tensor, stage: int) -> Tensor:
        """Position of the member that rows of these tokens go to on their way up."""
        sides = self.sides
        to = list(sides.owners)
        if stage == 1:
            to = [sides.gateway(owner, sides.nodes[self.me]) for owner in to] if self.is_holder else []
        member = torch.tensor([sides.position[rank] for rank in to], device=numbers.device, dtype=torch.int64)
        return member[tokens.index_of(numbers)] if numbers.numel() else numbers

    def collected(self, hop: Hop, tokens: Blocks, numbers: Tensor, splits: tuple[int, ...]) -> tuple[End, Tensor]:
        """The upper end of rows that came up, and the token of each of its rows."""
        if hop.stage == 1:
            numbers, order = torch.unique(numbers, return_inverse=True)
            return End(numbers.shape[0], splits, order), numbers
        mine = tokens.range_of(self.me)
        order = numbers - mine.start
        if not _within(order, range(len(mine))):
            raise ExchangeError(f"rank {self.me} got rows of tokens that it does not own")
        answered = torch.zeros(len(mine), dtype=torch.bool, device=numbers.device)
        answered[order] = True
        if not bool(answered.all()):
            missing = (torch.nonzero(~answered).flatten() + mine.start).tolist()
            raise ExchangeError(f"rank {self.me} got no row of {len(missing)} of its tokens, the first is {missing[0]}")
        return End(len(mine), splits, order), numbers

    def check_owners(self, tokens: Blocks) -> None:
        """Tokens must be given to the owners of this exchange, and to nobody else."""
        if tokens.ranks != self.sides.owners:
            raise ExchangeError(f"tokens are given to ranks {tokens.ranks}, the exchange has {self.sides.owners}")

    def _checked_routing(self, count: int, ids: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Expert ids and gate weights [count, k] as they travel; k = 0 in a dense layer."""
        k = self.experts.top_k if self.experts and self.is_owner else 0
        for given, label in ((ids, "expert ids"), (weights, "gate weights")):
            shape = [count, 0] if given is None else list(given.shape)
            if shape != [count, k] and not (given is None and count * k == 0):
                raise ExchangeError(f"rank {self.me}: {label} must be [{count}, {k}], not {shape}")
        if ids is None or weights is None:
            ids = torch.empty(count, k, dtype=torch.int64, device=self.form.device)
            return ids, torch.empty(count, k, dtype=self.form.sum_dtype, device=self.form.device)
        if not _within(ids, range(self.placed.total)):
            found = f"{int(ids.min())} to {int(ids.max())}"
            raise ExchangeError(f"rank {self.me}: expert ids {found}, allowed 0 to {self.placed.total - 1}")
        return ids.detach().long(), weights.detach().to(self.form.sum_dtype)

    def _home_of(self, tokens: Blocks, numbers: Tensor, ids: Tensor) -> Tensor:
        """Index of the holder at home of each own token."""
        if self.home == "first_expert":
            return self.expert_holder[ids[:, 0]] if ids.numel() else numbers
        if self.home == "blocks":
            return Blocks.split(self.sides.holders, tokens.total).index_of(numbers)
        at_source = self.home == "source" and self.is_holder
        return torch.full_like(numbers, self.sides.holders.index(self.me) if at_source else -1)


def _within(numbers: Tensor, allowed: range) -> bool:
    """Whether all numbers are in a contiguous range."""
    if not numbers.numel():
        return True
    least, most = torch.aminmax(numbers)
    return allowed.start <= int(least) and int(most) < allowed.stop
