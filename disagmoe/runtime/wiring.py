"""Which exchange serves which layer of a plan.

Decides, from the placement: disaggregated, attention group l dispatches to expert
group l, which combines to attention group l + 1, the last layer's to the worker
of the head (near-equal blocks of tokens over the ranks of an expert group).
Colocated, the `ep` ranks of a worker exchange among themselves, a token's home is
where it came from, and dense layers exchange nothing. Where a layer is cut into tiles, each
arrival and each width of column blocks has an exchange of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from disagmoe.cost.comet import TileSplit
from disagmoe.ops import Op
from disagmoe.runtime.arrivals import arrival_groups
from disagmoe.runtime.errors import LaunchError
from disagmoe.runtime.exchange import Exchange, Experts
from disagmoe.runtime.groups import Groups, combine_target
from disagmoe.runtime.ledger import Ledger
from disagmoe.runtime.merge import Blocks, Sides
from disagmoe.runtime.transport import Slab, make_transport
from disagmoe.runtime.wire import Cargo, Format, Hop, Wire
from disagmoe.specs import ModelSpec


class Exchanges:
    """The exchanges and stage transfers of one rank. `ledger` counts what this rank sends."""

    def __init__(self, groups: Groups, model: ModelSpec, *, transport: str, merge: str, dtype: torch.dtype) -> None:
        self.groups = groups
        self.model = model
        self.transport = transport
        self.merge = merge
        self.form = Format(model.hidden, dtype, groups.device)
        self.ledger = Ledger()
        self.placement = groups.ranks.placement
        self._kept: dict[tuple[str, int, int, bool], Exchange] = {}
        self._relays: dict[tuple[int, int], Relay] = {}
        self._padded: dict[tuple[str, int], Exchange] = {}
        self._arrivals: dict[tuple[str, int, bool, int], Exchange] = {}
        self._blocks: dict[tuple[str, int, bool, int], Exchange] = {}

    def dispatch(self, layer: int) -> Exchange:
        """The exchange that takes tokens to the experts of `layer`; this rank must be part of it."""
        if not self.placement.disaggregated:
            return self._exchange("dispatch", self.groups.me.worker, self.groups.me.worker, layer)
        return self._exchange("dispatch", self.placement.attn[layer], self.placement.ffn[layer], layer)

    def combine(self, layer: int) -> Exchange:
        """The exchange that takes what the experts of `layer` made to whoever comes next."""
        if not self.placement.disaggregated:
            return self._exchange("combine", self.groups.me.worker, self.groups.me.worker, layer)
        return self._exchange("combine", self.placement.ffn[layer], combine_target(self.placement, layer), layer)

    def arrival(self, purpose: str, layer: int, split: TileSplit, group: int) -> Exchange:
        """The part of a colocated dispatch or combine that arrives with one group of sources."""
        worker = self.groups.me.worker
        key = (purpose, worker, self.model.is_moe(layer), group)
        if key not in self._arrivals:
            sides = self._sides(purpose, worker, worker, "rank" if split.gather else self.merge)
            only = arrival_groups(split, sides.holders, sides.nodes)[group]
            sides = replace(sides, only=only)
            self._arrivals[key] = self._make(purpose, worker, worker, True, sides=sides, gather=split.gather)
        return self._arrivals[key]

    def block(self, purpose: str, layer: int, split: TileSplit, width: int) -> Exchange:
        """A colocated dispatch or combine of rows of `width` columns."""
        worker = self.groups.me.worker
        key = (purpose, worker, self.model.is_moe(layer), width)
        if key not in self._blocks:
            sides = self._sides(purpose, worker, worker, "rank" if split.gather else self.merge)
            form = replace(self.form, width=width)
            self._blocks[key] = self._make(purpose, worker, worker, True, sides=sides, form=form)
        return self._blocks[key]

    def padded(self, purpose: str, layer: int) -> Exchange:
        """A colocated dispatch or combine of dense buffers: every row has one expert, and no home."""
        worker = self.groups.me.worker
        key = (purpose, worker)
        if key not in self._padded:
            self._padded[key] = self._make(purpose, worker, worker, self.model.is_moe(layer), padded=True)
        return self._padded[key]

    def relay(self, sender: int, receiver: int) -> Relay:
        """The stage transfer between two workers; `sender` sends in forward."""
        if (sender, receiver) not in self._relays:
            self._relays[sender, receiver] = Relay(self, sender, receiver)
        return self._relays[sender, receiver]

    def before(self, layer: int, tokens: int | Sequence[int]) -> Blocks:
        """Which rank has which tokens when `layer` dispatches; `tokens` of each attention rank."""
        owners = self.dispatch(layer).sides.owners
        return Blocks.each(owners, tokens) if isinstance(tokens, int) else Blocks(owners, tuple(tokens))

    def after(self, layer: int, tokens: int | Sequence[int]) -> Blocks:
        """Which rank gets which tokens when `layer` combines; `tokens` of each attention rank."""
        owners = self.combine(layer).sides.owners
        target = self.placement.workers[combine_target(self.placement, layer)]
        if target.pool != "F":
            return Blocks.each(owners, tokens) if isinstance(tokens, int) else Blocks(owners, tuple(tokens))
        attention = self.placement.workers[self.placement.attn[layer]]
        return Blocks.split(owners, tokens * attention.gpus if isinstance(tokens, int) else sum(tokens))

    def _exchange(self, purpose: str, a: int, b: int, layer: int) -> Exchange:
        moe = self.model.is_moe(layer)
        key = (purpose, a, b, moe)
        if key not in self._kept:
            self._kept[key] = self._make(purpose, a, b, moe)
        return self._kept[key]

    def _sides(self, purpose: str, a: int, b: int, merge: str) -> Sides:
        groups, ranks = self.groups, self.groups.ranks
        if groups.me.worker not in (a, b):
            raise LaunchError(f"rank {groups.rank} of worker {groups.me.worker} has no {purpose} from {a} to {b}")
        if a == b:
            owners = holders = ranks.expert_block(a, groups.me.replica, groups.me.local // ranks.ep)
        else:
            owners, holders = ranks.ranks(a, groups.me.replica), ranks.ranks(b, groups.me.replica)
            owners, holders = (owners, holders) if purpose == "dispatch" else (holders, owners)
        return Sides(owners, holders, merge, {rank: ranks.nodes[rank] for rank in (*owners, *holders)})

    def _make(
        self,
        purpose: str,
        a: int,
        b: int,
        moe: bool,
        *,
        sides: Sides | None = None,
        form: Format | None = None,
        gather: bool = False,
        padded: bool = False,
    ) -> Exchange:
        home = "blocks" if not moe else "first_expert" if self.placement.disaggregated else "source"
        home = "nowhere" if padded else home
        return Exchange(
            sides or self._sides(purpose, a, b, self.merge),
            forward=make_transport(self.transport, self.groups.link(purpose, a, b)),
            backward=make_transport(self.transport, self.groups.link(f"{purpose}_back", a, b)),
            again=make_transport(self.transport, self.groups.again(purpose, a, b)),
            form=form or self.form,
            experts=Experts(self.model.experts, 1 if padded else self.model.top_k) if moe else None,
            home=home,
            ledger=self.ledger,
            gather=gather,
        )


class Relay:
    """Rows from each rank of one worker to the rank of the same number in another."""

    def __init__(self, exchanges: Exchanges, sender: int, receiver: int) -> None:
        groups = exchanges.groups
        self._form = exchanges.form
        self._wires: dict[bool, Wire] = {}
        for back, purpose in ((False, "p2p"), (True, "p2p_back")):
            link = groups.link(purpose, sender, receiver)
            sides = Sides(link.members[:1], link.members[1:], "rank", {r: groups.ranks.nodes[r] for r in link.members})
            self._wires[back] = Wire(sides, make_transport(exchanges.transport, link), self._form, exchanges.ledger)

    def send(self, op: Op, rows: Tensor, *, back: bool = False) -> None:
        """Send rows [n, width] to the peer; `back`: against the forward direction."""
        self._swap(op, rows.detach(), rows.shape[0], 0, back)

    def receive(self, op: Op, rows: int, *, back: bool = False) -> Tensor:
        """The peer's rows [rows, width]."""
        return self._swap(op, self._form.no_rows(), rows, rows, back)

    def _swap(self, op: Op, rows: Tensor, tokens: int, wanted: int, back: bool) -> Tensor:
        wire = self._wires[back]
        mine = wire.position

        def at(position: int, count: int) -> tuple[int, ...]:
            return tuple(count if i == position else 0 for i in range(2))

        cargo = Cargo(Slab(rows, at(1 - mine, rows.shape[0])), Slab(self._form.no_words(), (0, 0)))
        with wire.swap(Hop(op, 0, tokens), cargo, (at(1 - mine, wanted), (0, 0))) as got:
            return got.rows
