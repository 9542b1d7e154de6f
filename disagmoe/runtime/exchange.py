"""Dispatch and combine between the owners of tokens and the holders of experts, and their backward.

Decides what an exchange means; the parts know how. In a *dispatch* every owner's
rows travel to the ranks that hold their experts and to their home; with them the
expert ids and the gate weights. In a *combine* every holder sends what it made of
its rows, one partial sum each, and the owners add the partial sums of a token up.
The owners of a combine need not be those of the dispatch: experts answer straight
to the next layer's attention group, or to themselves before an output head.

Backward is the transpose. `combine_backward` copies gradients of tokens to all who
contributed; `dispatch_backward` adds up the gradients of a token's copies, the
residual's included, and returns the gradients of the gate weights.

All calls block until the rank's part is done, are collective over the members
of the exchange, and run without autograd. Run them on a `Lane` to keep computing.
Forward and backward use a transport each, so both may be under way at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from disagmoe.ops import Op
from disagmoe.runtime.errors import ExchangeError, PeerLostError
from disagmoe.runtime.ledger import Ledger
from disagmoe.runtime.merge import Blocks, Sides
from disagmoe.runtime.party import Arrived, Experts, Party
from disagmoe.runtime.route import End, Leg, arrive, depart, return_end
from disagmoe.runtime.transport import Link, Slab, Transport
from disagmoe.runtime.wire import Cargo, Format, Hop, Wire

__all__ = ["Arrived", "CombineRoute", "DispatchRoute", "Exchange", "Experts"]


@dataclass(frozen=True)
class DispatchRoute:
    """What the later passes of one dispatch need to know on one rank.

    `legs` from the owner down; `tokens` as in `Arrived`; `cells` [c] place of each
    copy in the flattened `Arrived.ids`; `total` tokens of the micro-batch.
    """

    legs: tuple[Leg, ...]
    tokens: Tensor
    cells: Tensor
    total: int


@dataclass(frozen=True)
class CombineRoute:
    """What the later passes of one combine need to know on one rank; `legs` from the owner down."""

    legs: tuple[Leg, ...]
    total: int


class Exchange:
    """The exchange between `sides` of one kind of layer, on one rank.

    `forward` and `backward` are its transports, `again` that of what is sent a second
    time beside the first time of something else (None: that never happens). `experts`
    is None in a dense layer, `home` one of `party.HOMES`. What is sent is counted in
    `ledger`. `gather`: an owner's tokens go to every holder, whether it has their
    experts or not.
    """

    def __init__(
        self,
        sides: Sides,
        *,
        forward: Transport,
        backward: Transport,
        form: Format,
        experts: Experts | None,
        home: str,
        ledger: Ledger,
        gather: bool = False,
        again: Transport | None = None,
    ) -> None:
        self.sides = sides
        self.gather = gather
        self.form = form
        self.me = forward.link.me
        self.party = Party(sides, self.me, form, experts, home)
        self._forward = Wire(sides, forward, form, ledger)
        self._backward = Wire(sides, backward, form, ledger)
        self._again = self._forward if again is None else Wire(sides, again, form, ledger)

    @property
    def link(self) -> Link:
        """The groups of its forward direction."""
        return self._forward.link

    @property
    def local_experts(self) -> range:
        """Experts this rank holds (none of its own in a dense layer)."""
        return self.party.placed.range_of(self.me)

    @torch.no_grad()
    def dispatch(
        self,
        op: Op,
        tokens: Blocks,
        x: Tensor | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[DispatchRoute, Arrived | None]:
        """Owners: rows x [t, width], ids and weights [t, k] (dense layers: None) -> what arrived, at a holder.

        `tokens`: which owner has which tokens of the micro-batch.
        """
        party, sides = self.party, self.sides
        with self._told(self._forward, Hop(op, 0, tokens.total)):
            load = party.load(tokens, x, ids, weights)
            rows = self._rows(x)
        legs = []
        for stage in range(sides.stages):
            hop = Hop(op, stage, tokens.total)
            with self._told(self._forward, hop):
                leaving = depart(
                    load,
                    party.reach[stage],
                    party.expert_holder,
                    len(sides.members),
                    merged=sides.merge != "none",
                    everywhere=self.gather,
                )
            with self._forward.swap(hop, Cargo(leaving.rows.pack(rows), leaving.words), None) as got:
                load, copy_splits = arrive(got.words, got.splits, self.form, sides.members, self.me)
                rows = got.rows
                lower, lower_copies = End(rows.shape[0], got.splits), End(load.row.shape[0], copy_splits)
                legs.append(Leg(leaving.rows, lower, leaving.copies, lower_copies))
                if stage + 1 == sides.stages:
                    cells, arrived = party.arrived(load, rows)
        return DispatchRoute(tuple(legs), load.tokens, cells, tokens.total), arrived

    @torch.no_grad()
    def dispatch_again(self, op: Op, route: DispatchRoute, x: Tensor | None = None) -> Tensor | None:
        """The rows of a dispatch once more, over the same route: `Arrived.rows`, at a holder."""
        rows = self._down(self._again, op, route.legs, route.total, x)
        return rows if self.party.is_holder else None

    @torch.no_grad()
    def dispatch_backward(
        self,
        op: Op,
        route: DispatchRoute,
        rows_grad: Tensor | None = None,
        weights_grad: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Holders: gradients of `Arrived.rows` and `Arrived.weights` -> at an owner, of x and of weights [t, k].

        Without `weights_grad` those of the weights are zero; in a dense layer there are none.
        """
        experts, dtype = self.party.experts, self.form.sum_dtype
        with self._told(self._backward, Hop(op, len(route.legs) - 1, route.total)):
            rows = self._rows(rows_grad)
            if weights_grad is None:
                values = torch.zeros(route.cells.shape[0], dtype=dtype, device=self.form.device)
            else:
                values = weights_grad.detach().to(dtype).flatten()[route.cells]
        for stage, leg in reversed(list(enumerate(route.legs))):
            rows, values = self._up(self._backward, Hop(op, stage, route.total), leg, rows, values)
        if not self.party.is_owner:
            return None
        return rows, values.view(rows.shape[0], experts.top_k) if experts else None

    @torch.no_grad()
    def sum_backward(self, op: Op, route: DispatchRoute, rows_grad: Tensor) -> Tensor | None:
        """As `dispatch_backward`, of the rows alone: nothing travels with their copies."""
        rows, nothing = self._rows(rows_grad), torch.empty(0, dtype=self.form.sum_dtype, device=self.form.device)
        for stage, leg in reversed(list(enumerate(route.legs))):
            rows, _ = self._up(self._backward, Hop(op, stage, route.total), leg, rows, nothing)
        return rows if self.party.is_owner else None

    @torch.no_grad()
    def combine(
        self, op: Op, tokens: Blocks, route: DispatchRoute | None = None, rows: Tensor | None = None
    ) -> tuple[CombineRoute, Tensor | None]:
        """Holders: partial sums rows [r, width], one per row of `route` -> at an owner, y [t, width].

        `tokens`: which owner gets which tokens of the micro-batch; as many in all as were dispatched.
        """
        legs: list[Leg] = []
        current = self._rows(rows)
        numbers = torch.empty(0, dtype=torch.int64, device=self.form.device) if route is None else route.tokens
        for stage in reversed(range(self.sides.stages)):
            hop = Hop(op, stage, tokens.total)
            with self._told(self._forward, hop):
                self._check_partial_sums(tokens, route, numbers, current)
                member = self.party.return_member(tokens, numbers, stage)
                lower, words = return_end(numbers, member, len(self.sides.members))
            with self._forward.swap(hop, Cargo(lower.pack(current), words), None) as got:
                upper, numbers = self.party.collected(hop, tokens, got.words.data.long(), got.splits)
                legs.append(Leg(upper, lower, _no_copies(upper), _no_copies(lower)))
            current = upper.add_up(got.rows, self.form.sum_dtype)
        return CombineRoute(tuple(reversed(legs)), tokens.total), current if self.party.is_owner else None

    @torch.no_grad()
    def combine_again(self, op: Op, route: CombineRoute, rows: Tensor | None = None) -> Tensor | None:
        """A combine once more, over the same route: y, at an owner."""
        current = self._rows(rows)
        nothing = torch.empty(0, dtype=self.form.sum_dtype, device=self.form.device)
        for stage, leg in reversed(list(enumerate(route.legs))):
            current, _ = self._up(self._again, Hop(op, stage, route.total), leg, current, nothing)
        return current if self.party.is_owner else None

    @torch.no_grad()
    def combine_backward(self, op: Op, route: CombineRoute, y_grad: Tensor | None = None) -> Tensor | None:
        """Owners: gradient of y [t, width] -> at a holder, of its partial sums [r, width]."""
        rows = self._down(self._backward, op, route.legs, route.total, y_grad)
        return rows if self.party.is_holder else None

    def _rows(self, rows: Tensor | None) -> Tensor:
        return self.form.no_rows() if rows is None else rows.detach()

    def _down(self, wire: Wire, op: Op, legs: tuple[Leg, ...], total: int, x: Tensor | None) -> Tensor:
        """Copy rows from the owners to the holders of a known route."""
        rows, nothing = self._rows(x), wire.nothing
        for stage, leg in enumerate(legs):
            hop = Hop(op, stage, total)
            with self._told(wire, hop):
                packed = self._packed(leg.upper, rows)
            with wire.swap(hop, Cargo(packed, Slab(self.form.no_words(), nothing)), (leg.lower.splits, nothing)) as got:
                pass
            rows = leg.lower.place(got.rows)
        return rows

    def _up(self, wire: Wire, hop: Hop, leg: Leg, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows up from the lower to the upper end of a known leg; `values`, one per copy, go along."""
        per_copy = self.form.copy_words
        with self._told(wire, hop):
            packed = self._packed(leg.lower, rows)
            words = leg.lower_copies.pack(values).packed.view(torch.int32)
        sent = Slab(words, tuple(per_copy * c for c in leg.lower_copies.splits))
        wanted = tuple(per_copy * c for c in leg.upper_copies.splits)
        with wire.swap(hop, Cargo(packed, sent), (leg.upper.splits, wanted)) as got:
            placed = leg.upper_copies.place(got.words.data.view(self.form.sum_dtype))
        return leg.upper.add_up(got.rows, self.form.sum_dtype), placed

    def _packed(self, end: End, rows: Tensor) -> Slab:
        if rows.shape[0] != end.size:
            raise ExchangeError(f"rank {self.me} has {rows.shape[0]} rows, its route {end.size}")
        return end.pack(rows)

    def _check_partial_sums(self, tokens: Blocks, route: DispatchRoute | None, numbers: Tensor, rows: Tensor) -> None:
        self.party.check_owners(tokens)
        if self.party.is_holder and route is None:
            raise ExchangeError(f"rank {self.me} holds experts and needs the route of its dispatch to combine")
        if route is not None and route.total != tokens.total:
            raise ExchangeError(f"rank {self.me}: {route.total} tokens were dispatched, {tokens.total} are combined")
        if rows.shape[0] != numbers.shape[0]:
            raise ExchangeError(f"rank {self.me} has {rows.shape[0]} partial sums for {numbers.shape[0]} rows")

    @contextmanager
    def _told(self, wire: Wire, hop: Hop) -> Iterator[None]:
        """An error inside is told to the peers of the hop before it is raised."""
        try:
            yield
        except Exception:
            with suppress(PeerLostError):
                wire.refuse(hop)
            raise


def _no_copies(end: End) -> End:
    return End(0, (0,) * len(end.splits))
