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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from disagmoe.runtime.errors import ExchangeError
from disagmoe.runtime.mail import WORD_BYTES
from disagmoe.runtime.transport import Slab
from disagmoe.runtime.wire import Format, Splits

Numbers = np.ndarray[Any, np.dtype[Any]]

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
    size, device = load.tokens.shape[0], load.tokens.device
    if not size:
        nothing = End(0, (0,) * members)
        return Departure(nothing, nothing, Slab(load.tokens.to(torch.int32), nothing.splits))
    held, reached, expert, home = _host(expert_holder), _host(reach), _host(load.expert), _host(load.home)
    member = reached[held][expert]
    if member.size and member.min() < 0:
        raise ExchangeError(f"experts {np.unique(expert[member < 0]).tolist()} cannot be reached from here")
    at_home = np.append(reached, -1)[home]
    if merged:
        rows = _merged_rows(
            _host(load.row), home, member, at_home, reached[reached >= 0] if everywhere else None, members
        )
    else:
        rows = _single_rows(_host(load.row), home, member, at_home, held[expert], members)
    copies = rows.of_copy.argsort(kind="stable")
    row_words = np.empty((rows.source.size, ROW_WORDS), np.int32)
    row_words[:, 0] = _host(load.tokens)[rows.source]
    row_words[:, 1] = np.bincount(rows.of_copy, minlength=rows.source.size) << _COPIES_SHIFT | (rows.home + 1)
    weight_words = load.weight.element_size() // WORD_BYTES
    copy_words = np.empty((copies.size, 1 + weight_words), np.int32)
    copy_words[:, 0] = expert[copies]
    copy_words[:, 1:] = _host(load.weight)[copies].view(np.int32).reshape(-1, weight_words)
    copy_splits = tuple(np.bincount(member, minlength=members).tolist())
    words = _join_words(row_words, rows.splits, copy_words, copy_splits)
    return Departure(
        End(size, rows.splits, torch.from_numpy(rows.source).to(device)),
        End(load.row.shape[0], copy_splits, torch.from_numpy(copies).to(device)),
        Slab(words.data.to(device), words.splits),
    )


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


class _Rows(NamedTuple):
    """Rows of a departure by member: `source` of each in the load, `home` it tells; the row `of_copy` of each copy."""

    source: Numbers
    splits: Splits
    of_copy: Numbers
    home: Numbers


def _merged_rows(
    row: Numbers, home: Numbers, member: Numbers, at_home: Numbers, anyway: Numbers | None, members: int
) -> _Rows:
    """One row per (member, token) with a copy or the home there, and for all tokens of the members `anyway`."""
    size = home.size
    cell = member * size + row
    # One more line than members: there lie the homes of member -1, that is nowhere.
    there = np.zeros((members + 1) * size, np.bool_)
    there[cell] = True
    there[at_home * size + np.arange(size)] = True
    there = there[: members * size]
    lines = there.reshape(members, size)
    if anyway is not None:
        lines[anyway] = True
    source = np.flatnonzero(there) % size
    return _Rows(source, tuple(lines.sum(1).tolist()), there.cumsum()[cell] - 1, home[source])


def _single_rows(
    row: Numbers, home: Numbers, member: Numbers, at_home: Numbers, holder: Numbers, members: int
) -> _Rows:
    """One row per copy; the first copy that goes home says so, and where none does a row is added."""
    size, count = home.size, row.size
    goes_home = np.flatnonzero(holder == home[row])[::-1]
    first = np.full(size, count)
    first[row[goes_home]] = goes_home  # of several the last written stays, which is the first copy
    marked = first[first < count]
    extra = np.flatnonzero((first == count) & (at_home >= 0))
    source, row_member = np.concatenate((row, extra)), np.concatenate((member, at_home[extra]))
    told = np.full(source.size, -1)
    told[marked] = home[row[marked]]
    told[count:] = home[extra]
    order = (row_member * size + source).argsort(kind="stable")
    of_copy = np.empty_like(order)
    of_copy[order] = np.arange(order.size)
    splits = tuple(np.bincount(row_member, minlength=members).tolist())
    return _Rows(source[order], splits, of_copy[:count], told[order])


def _host(numbers: Tensor) -> Numbers:
    """Routes are found on the host, which must know their sizes anyway: there an array operation costs far less."""
    array: Numbers = numbers.cpu().numpy()
    return array


def _splits(member: Tensor, members: int) -> Splits:
    return tuple(torch.bincount(member, minlength=members).tolist())


def _join_words(row_words: Numbers, row_splits: Splits, copy_words: Numbers, copy_splits: Splits) -> Slab:
    """Per member its row words, then its copy words."""
    parts, splits = [], []
    at_row = at_copy = 0
    for r, c in zip(row_splits, copy_splits, strict=True):
        parts += [row_words[at_row : at_row + r].reshape(-1), copy_words[at_copy : at_copy + c].reshape(-1)]
        splits.append(parts[-2].size + parts[-1].size)
        at_row, at_copy = at_row + r, at_copy + c
    return Slab(torch.from_numpy(np.concatenate(parts)), tuple(splits))


def _part_words(words: Slab, row_splits: Splits, copy_splits: Splits, per_copy: int) -> tuple[Tensor, Tensor]:
    """Row words [n, 2] and copy words [c, per_copy] of all members."""
    rows, copies = [], []
    for member, (r, c) in enumerate(zip(row_splits, copy_splits, strict=True)):
        of_rows, of_copies = torch.split(words.piece(member), [ROW_WORDS * r, per_copy * c])
        rows.append(of_rows)
        copies.append(of_copies)
    return torch.cat(rows).view(-1, ROW_WORDS), torch.cat(copies).view(-1, per_copy)
