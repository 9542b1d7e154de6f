"""Whose tokens arrive when, where a layer is exchanged source by source (Comet).

Decides the order of the sources of a holder: itself, then its own node in ring
order, then the other nodes in ring order. A group of a `TileSplit` is so many
consecutive sources. Seen from the other side, group j of an owner are the holders
that count it in their group j: with one source per group step j is a shift by j.
All holders of a node have the same far sources in the same order, so that a
gateway can pass on what it got in one step.

And how the arrivals of one layer make one route: the column blocks of the second
half go back over all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from disagmoe.cost.comet import TileSplit
from disagmoe.runtime.exchange import DispatchRoute
from disagmoe.runtime.route import End, Leg

Pairs = frozenset[tuple[int, int]]


def arrival_groups(split: TileSplit, ranks: Sequence[int], nodes: Mapping[int, int]) -> tuple[Pairs, ...]:
    """The (owner, holder) pairs of each arrival group among `ranks`, who are all of both."""
    if split.ranks != len(ranks):
        raise ValueError(f"tiles for {split.ranks} expert-parallel ranks cannot serve {len(ranks)}")
    sizes = (1, *split.near, *split.far)
    ends = list(accumulate(sizes))
    groups: list[set[tuple[int, int]]] = [set() for _ in sizes]
    for holder in ranks:
        sources = sources_of(holder, ranks, nodes)
        for index, end in enumerate(ends):
            groups[index] |= {(owner, holder) for owner in sources[end - sizes[index] : end]}
    return tuple(frozenset(group) for group in groups)


def sources_of(holder: int, ranks: Sequence[int], nodes: Mapping[int, int]) -> list[int]:
    """All ranks in the order in which their tokens arrive at `holder`."""
    at = ranks.index(holder)
    shift = {rank: (at - place) % len(ranks) for place, rank in enumerate(ranks)}  # the ring runs upwards
    near = sorted((r for r in ranks if nodes[r] == nodes[holder]), key=shift.__getitem__)
    order = sorted({nodes[rank] for rank in ranks})
    mine = order.index(nodes[holder])
    ahead = {node: (mine - place) % len(order) for place, node in enumerate(order)}
    far = sorted((r for r in ranks if nodes[r] != nodes[holder]), key=lambda r: (ahead[nodes[r]], ranks.index(r)))
    return near + far


def joint_route(routes: Sequence[DispatchRoute], kept: Sequence[Tensor], copies: int, slots: int) -> DispatchRoute:
    """One route over which the rows of all groups go back up together.

    Rows are those of the groups one after the other; `kept[g]` are the places of
    group g's copies among the owner's `copies`, `slots` the columns of `Arrived.ids`.
    """
    legs, device = [], routes[0].tokens.device
    for stage in range(len(routes[0].legs)):
        parts = [route.legs[stage] for route in routes]
        upper, upper_copies = [leg.upper for leg in parts], [leg.upper_copies for leg in parts]
        if stage == 0:  # every group leaves from the same tokens
            tokens = upper[0].size
            tops = _joined(upper, [_order(end, device) for end in upper], tokens)
            places = [names[_order(end, device)] for names, end in zip(kept, upper_copies, strict=True)]
            top_copies = _joined(upper_copies, places, copies)
        else:
            tops, top_copies = _stacked(upper, device), _stacked(upper_copies, device)
        lower, lower_copies = [leg.lower for leg in parts], [leg.lower_copies for leg in parts]
        legs.append(Leg(tops, _stacked(lower, device), top_copies, _stacked(lower_copies, device)))
    starts = _starts([route.tokens.shape[0] for route in routes])
    cells = torch.cat([route.cells + start * slots for route, start in zip(routes, starts, strict=True)])
    return DispatchRoute(tuple(legs), torch.cat([route.tokens for route in routes]), cells, routes[0].total)


def rows_only(leg: Leg) -> Leg:
    """The leg without the values that travel with copies."""
    nothing = tuple(0 for _ in leg.upper.splits)
    return Leg(leg.upper, leg.lower, End(0, nothing), End(0, nothing))


def _stacked(ends: Sequence[End], device: torch.device) -> End:
    """Ends whose rows are numbered one after the other."""
    starts = _starts([end.size for end in ends])
    orders = [_order(end, device) + start for end, start in zip(ends, starts, strict=True)]
    return _joined(ends, orders, sum(end.size for end in ends))


def _joined(ends: Sequence[End], orders: Sequence[Tensor], size: int) -> End:
    """The wire rows of several ends, member after member; `orders` name their rows among `size`."""
    pieces = [torch.split(order, list(end.splits)) for end, order in zip(ends, orders, strict=True)]
    members = range(len(ends[0].splits))
    splits = tuple(sum(end.splits[m] for end in ends) for m in members)
    return End(size, splits, torch.cat([of_end[m] for m in members for of_end in pieces]))


def _order(end: End, device: torch.device) -> Tensor:
    return torch.arange(end.size, device=device) if end.order is None else end.order


def _starts(sizes: Sequence[int]) -> list[int]:
    return [total - size for total, size in zip(accumulate(sizes), sizes, strict=True)]
