"""Which row goes where: the routing of a micro-batch turned into index lists.

Decides the order of everything. Rows for one member are sorted by token; rows that
arrive are kept member after member; copies (token-expert pairs) go with their row,
in slot order. A *leg* holds one hop's lists for one rank. Rows run down a leg
(owner to holder: copied) or up (holder to owner: summed); the two are each other's
transpose, so dispatch and the backward of combine use the one, combine and the
backward of dispatch the other.

Sums are taken in a fixed order, member after member, in at least fp32: the same
bits every time, on any device.

Metadata of a dispatch, in 4-byte words, per member: (token, copies << 16 | home + 1)
of each row, then (expert, gate weight) of each copy. `home` is the index of the
token's home among the holders, 0 where it is not told with this row. A combine
sends one word per row, its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from disagmoe.runtime.errors import ExchangeError
from disagmoe.runtime.mail import WORD_BYTES
from disagmoe.runtime.transport import Slab
from disagmoe.runtime.wire import Format, Splits

ROW_WORDS = 2
_COPIES_SHIFT = 16
_HOME_MASK = (1 << _COPIES_SHIFT) - 1


@dataclass(frozen=True)
class End:
    """One end of a leg: a tensor of `size` rows, and the row of each wire row by member.

    `order` [sum(splits)] may name a row several times at the upper end; None =
    all rows, in order.
    """

    size: int
    splits: Splits
    order: Tensor | None = None

    def pack(self, rows: Tensor) -> Slab:
        """Wire rows of `rows` [size, ...]; they are put together when they are sent."""
        return Slab(rows, self.splits, self.order)

    def place(self, wire: Tensor) -> Tensor:
        """Wire rows back to rows [size, ...]; every row has exactly one."""
        if self.order is None:
            return wire
        return wire.index_select(0, self._wire_row)

    def add_up(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [size, ...], each the sum of its wire rows, added in `dtype` in wire order."""
        if self.order is None:
            return wire
        (rows, first), *more = self._layers
        total = wire.index_select(0, first)
        if rows.shape[0] != self.size:  # rows that got nothing are zero
            total = wire.new_zeros((self.size, *wire.shape[1:])).index_copy_(0, rows, total)
        if not more:
            return total
        total = total.to(dtype)
        for rows, nth in more:
            # Within one layer every row appears once, so even atomic adds have only one order.
            total.index_add_(0, rows, wire.index_select(0, nth).to(dtype))
        return total.to(wire.dtype)

    @cached_property
    def _wire_row(self) -> Tensor:
        """The wire row of each row, where every row has exactly one."""
        assert self.order is not None
        return self.order.argsort()

    @cached_property
    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """(rows, ascending; wire rows) of the first, second, ... contribution to each row."""
        assert self.order is not None
        by_row, wire = self.order.sort(stable=True)
        counts = torch.bincount(by_row, minlength=self.size)
        nth = torch.arange(by_row.shape[0], device=by_row.device) - (counts.cumsum(0) - counts)[by_row]
        deepest = int(counts.max()) if self.size else 0
        return [(by_row[nth == depth], wire[nth == depth]) for depth in range(max(deepest, 1))]


@dataclass(frozen=True)
class Leg:
    """One hop of a route on one rank: rows at the upper (owner) and the lower (holder) end, copies likewise."""

    upper: End
    lower: End
    upper_copies: End
    lower_copies: End


@dataclass(frozen=True)
class Load:
    """Tokens on one rank, on their way to the experts.

    `tokens` [n] numbers in the micro-batch; `home` [n] index of the holder at
    home, -1 = not known here. Copies, sorted by row: `row` [c], `expert` [c]
    (global), `weight` [c].
    """

    tokens: Tensor
    home: Tensor
    row: Tensor
    expert: Tensor
    weight: Tensor

    @classmethod
    def nothing(cls, form: Format) -> Load:
        """No token, no copy."""
        numbers = torch.empty(0, dtype=torch.int64, device=form.device)
        return cls(numbers, numbers, numbers, numbers, numbers.to(form.sum_dtype))


@dataclass(frozen=True)
class Departure:
    """What one rank sends down one leg: the upper ends and the metadata."""

    rows: End
    copies: End
    words: Slab


def depart(
    load: Load, reach: Tensor, expert_holder: Tensor, members: int, *, merged: bool, everywhere: bool = False
) -> Departure:
    """Plan the next hop of `load`.

    `reach` [holders]: position of the member each holder is reached through, -1 =
    not from here. `expert_holder` [experts]: holder of each expert. `merged`:
    one row per (token, member), otherwise one per copy. `everywhere`: every token
    goes to every member within reach, whether it has an expert there or not.
    """
    size = load.tokens.shape[0]
    if not size:
        nothing = End(0, (0,) * members)
        return Departure(nothing, nothing, Slab(load.tokens.to(torch.int32), nothing.splits))
    member = reach.index_select(0, expert_holder).index_select(0, load.expert)
    if member.numel() and int(member.amin()) < 0:
        raise ExchangeError(f"experts {sorted(set(load.expert[member < 0].tolist()))} cannot be reached from here")
    home_member = torch.cat((reach, reach.new_tensor([-1])))[load.home]
    if merged:
        anyway = reach[reach >= 0] if everywhere else reach[:0]
        sources, splits, row_of_copy, home = _merged_rows(load, member, home_member, anyway, members)
    else:
        sources, splits, row_of_copy, home = _single_rows(load, member, home_member, expert_holder, members)
    copies = row_of_copy.argsort(stable=True)
    per_row = torch.bincount(row_of_copy, minlength=sources.shape[0])
    rows, copy_end = End(size, splits, sources), End(load.row.shape[0], _splits(member, members), copies)
    row_words = torch.stack((load.tokens[sources], per_row << _COPIES_SHIFT | (home + 1)), 1).to(torch.int32)
    weights = load.weight[copies].view(torch.int32).view(copies.shape[0], load.weight.element_size() // WORD_BYTES)
    copy_words = torch.cat((load.expert[copies].to(torch.int32).unsqueeze(1), weights), 1)
    return Departure(rows, copy_end, _join_words(row_words, rows.splits, copy_words, copy_end.splits))


def arrive(words: Slab, row_splits: Splits, form: Format, members: Sequence[int], me: int) -> tuple[Load, Splits]:
    """The load of `row_splits` rows that came to rank `me` with `words`, and the copies per member."""
    per_copy = 1 + form.copy_words
    copy_splits = tuple((w - ROW_WORDS * r) // per_copy for w, r in zip(words.splits, row_splits, strict=True))
    for sender, w, r, c in zip(members, words.splits, row_splits, copy_splits, strict=True):
        if c < 0 or ROW_WORDS * r + per_copy * c != w:
            raise ExchangeError(f"rank {sender} sent rank {me} {r} rows with {w} words of metadata that do not fit")
    if not words.rows:
        return Load.nothing(form), copy_splits
    row_words, copy_words = _part_words(words, row_splits, copy_splits, per_copy)
    flags = row_words[:, 1].long()
    per_row = flags >> _COPIES_SHIFT
    count, first = per_row.shape[0], 0
    for sender, rows, copies in zip(members, row_splits, copy_splits, strict=True):
        told = int(per_row[first : first + rows].sum()) if rows else 0
        if told != copies:
            raise ExchangeError(f"rank {sender} sent rank {me} {copies} expert ids for {told} copies of rows")
        first += rows
    load = Load(
        tokens=row_words[:, 0].long(),
        home=(flags & _HOME_MASK) - 1,
        row=torch.repeat_interleave(torch.arange(count, device=per_row.device), per_row),
        expert=copy_words[:, 0].long(),
        weight=copy_words[:, 1:].clone(memory_format=torch.contiguous_format).view(form.sum_dtype).flatten(),
    )
    return load, copy_splits


def return_end(tokens: Tensor, member: Tensor, members: int) -> tuple[End, Slab]:
    """The lower end for rows with numbers `tokens` [n] that go back to `member` [n], and its metadata."""
    order = member.argsort(stable=True)
    ordered = bool((member[1:] >= member[:-1]).all())
    end = End(tokens.shape[0], _splits(member, members), None if ordered else order)
    return end, Slab(tokens[order].to(torch.int32), end.splits)


def _merged_rows(
    load: Load, member: Tensor, home_member: Tensor, anyway: Tensor, members: int
) -> tuple[Tensor, Splits, Tensor, Tensor]:
    """One row per (member, token) with a copy or the home there, and for all tokens of the members `anyway`."""
    size, device = load.tokens.shape[0], load.tokens.device
    cell = member * size + load.row
    # One more line than members: there lie the homes of member -1, that is nowhere.
    there = torch.zeros((members + 1) * size, dtype=torch.bool, device=device)
    there.index_fill_(0, cell, True)
    there.index_fill_(0, home_member * size + torch.arange(size, device=device), True)
    there.view(members + 1, size).index_fill_(0, anyway, True)
    there = there[: members * size]
    source = there.nonzero().view(-1).remainder(size)
    splits = tuple(there.view(members, size).sum(1).tolist())
    return source, splits, there.cumsum(0).index_select(0, cell) - 1, load.home.index_select(0, source)


def _single_rows(
    load: Load, member: Tensor, home_member: Tensor, expert_holder: Tensor, members: int
) -> tuple[Tensor, Splits, Tensor, Tensor]:
    """One row per copy; the first copy that goes home says so, and where none does a row is added."""
    size, count, device = load.tokens.shape[0], load.row.shape[0], load.tokens.device
    goes_home = torch.nonzero(expert_holder[load.expert] == load.home[load.row]).flatten()
    first = torch.full((size,), count, device=device).scatter_reduce_(0, load.row[goes_home], goes_home, "amin")
    marked = first[first < count]
    extra = torch.nonzero((first == count) & (home_member >= 0)).flatten()
    source = torch.cat((load.row, extra))
    row_member = torch.cat((member, home_member[extra]))
    home = torch.full_like(source, -1)
    home[marked] = load.home[load.row[marked]]
    home[count:] = load.home[extra]
    order = (row_member * size + source).argsort(stable=True)
    row_of_copy = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=device))[:count]
    return source[order], _splits(row_member, members), row_of_copy, home[order]


def _splits(member: Tensor, members: int) -> Splits:
    return tuple(torch.bincount(member, minlength=members).tolist())


def _join_words(row_words: Tensor, row_splits: Splits, copy_words: Tensor, copy_splits: Splits) -> Slab:
    """Per member its row words, then its copy words."""
    parts, splits = [], []
    flat_rows, flat_copies = row_words.view(-1), copy_words.view(-1)
    at_row = at_copy = 0
    for r, c in zip(row_splits, copy_splits, strict=True):
        r, c = r * row_words.shape[1], c * copy_words.shape[1]
        parts += [flat_rows[at_row : at_row + r], flat_copies[at_copy : at_copy + c]]
        splits.append(r + c)
        at_row, at_copy = at_row + r, at_copy + c
    return Slab(torch.cat(parts), tuple(splits))


def _part_words(words: Slab, row_splits: Splits, copy_splits: Splits, per_copy: int) -> tuple[Tensor, Tensor]:
    """Row words [n, 2] and copy words [c, per_copy] of all members."""
    rows, copies = [], []
    for member, (r, c) in enumerate(zip(row_splits, copy_splits, strict=True)):
        of_rows, of_copies = torch.split(words.piece(member), [ROW_WORDS * r, per_copy * c])
        rows.append(of_rows)
        copies.append(of_copies)
    return torch.cat(rows).view(-1, ROW_WORDS), torch.cat(copies).view(-1, per_copy)
