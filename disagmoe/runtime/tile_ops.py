"""DISPATCH, FFN and COMBINE of layers whose exchange is fused with the experts tile by tile (Comet).

Decides what a chunk of each is. Forward, chunk j of a DISPATCH is what arrives from
group j of the sources, chunk j of the first half of the experts the first multiply
of those rows; chunk c of the second half is a block of columns of all rows, chunk
c of the COMBINE its way home. Backward the COMBINE arrives by groups, the DISPATCH
leaves by blocks, and the gradients of the gate weights go with the first block.

Values on the shelf beside those of `shelf.py`: `tiles` (the pass through the
experts), `routes` (arrivals), `joint` (their common route), `block`, `block_grad`
(columns by chunk), `waiting` (rows that have not left yet), `normed_grad` (gradient
of the normed rows at their owner).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from disagmoe.cost.comet import TileSplit
from disagmoe.model import AttentionOutput
from disagmoe.model.tiles import TiledExperts, column_ranges
from disagmoe.ops import Kind, Op, Phase
from disagmoe.runtime.arrivals import joint_route, rows_only
from disagmoe.runtime.exchange import Arrived, CombineRoute, DispatchRoute
from disagmoe.runtime.expert_ops import ExpertOps
from disagmoe.runtime.shelf import Shelf
from disagmoe.runtime.site import Site
from disagmoe.runtime.transfer_ops import TransferOps


@dataclass
class _Pass:
    """One layer and micro-batch on one rank: what its exchange knows, from the first arrival to the last departure."""

    sent: AttentionOutput | None  # until all of it has left, and the rows come again where they are sent again
    arrivals: list[DispatchRoute]
    kept: list[Tensor]
    x: Tensor | None = None
    route: DispatchRoute | None = None
    y_grad: Tensor | None = None
    weights_grad: list[Tensor] | None = None


class TileOps(TransferOps):
    """The transfers and the experts of one step where layers are tiled; everything else as in `TransferOps`."""

    def __init__(self, site: Site, shelf: Shelf, tiles: TileSplit) -> None:
        super().__init__(site, shelf)
        self._tiles = tiles
        self._dense = ExpertOps(site, shelf)
        self._ranges = column_ranges(site.spec.hidden, tiles.columns)

    def dispatch(self, op: Op) -> None:
        if op.phase in (Phase.F, Phase.R):
            self._arrive(op)
        else:
            self._leave_back(op)

    def combine(self, op: Op) -> None:
        if op.phase in (Phase.F, Phase.R):
            self._leave(op)
        else:
            self._arrive_back(op)

    def experts(self, op: Op) -> None:
        """FFN, tile by tile; a dense layer as everywhere."""
        if not self._site.exchanged(op.layer):
            return self._dense.experts(op)
        if op.phase == Phase.W:
            tiled: TiledExperts = self._shelf.take("tiles_late", op.layer, op.microbatch)
            return tiled.weight_back()
        first, forward = op.chunk < self._tiles.groups, op.phase in (Phase.F, Phase.R)
        column = op.chunk - self._tiles.groups
        if forward:
            return self._first(op) if first else self._second(op, column)
        return self._first_back(op) if first else self._second_back(op, column)

    def source_gradient(self, layer: int, microbatch: int) -> Tensor:
        """Gradient of the rows that a layer sent: from their columns, through the norm, and the residual's."""
        part = self._site.holdings.experts[layer]
        blocks = [self._shelf.take("normed_grad", layer, microbatch, c) for c in range(self._tiles.columns)]
        state: _Pass = self._shelf.take("pass", layer, microbatch)
        assert state.y_grad is not None and state.x is not None
        with torch.enable_grad():
            leaf = state.x.detach().requires_grad_()
            part.ffn_norm(leaf).backward(torch.cat(blocks, dim=1))
        assert leaf.grad is not None
        return leaf.grad + state.y_grad

    def _arrive(self, op: Op) -> None:
        layer, b, group = op.layer, op.microbatch, op.chunk
        exchange = self._site.exchanges.arrival("dispatch", layer, self._tiles, group)
        if op.phase == Phase.R:
            state: _Pass = self._shelf.look("pass", layer, b)
            if group == 0:
                state.x = self._shelf.take("again_sent", layer, b)
            again = exchange.dispatch_again(op, state.arrivals[group], state.x)
            return self._shelf.put("again_arrived", layer, b, again, group)
        if group == 0:
            self._shelf.put("pass", layer, b, _Pass(self._shelf.take("sent", layer, b), [], []))
        state = self._shelf.look("pass", layer, b)
        assert state.sent is not None and state.sent.routing is not None
        routing = state.sent.routing
        tokens = self._site.before(layer, b)
        route, arrived = exchange.dispatch(op, tokens, state.sent.x, routing.ids, routing.weights)
        state.arrivals.append(route)
        state.kept.append(exchange.party.kept(routing.ids))
        if group + 1 == self._tiles.groups:
            copies = routing.ids.numel()
            state.route = joint_route(state.arrivals, state.kept, copies, exchange.party.slots)
            if (Kind.DISPATCH, layer) not in self._site.recomputed:
                state.x = state.sent.x
            state.sent, state.kept = None, []
        return self._shelf.put("arrived", layer, b, arrived, group)

    def _leave(self, op: Op) -> None:
        layer, b, column = op.layer, op.microbatch, op.chunk
        state: _Pass = self._shelf.look("pass", layer, b)
        assert state.route is not None
        name = "block" if op.phase == Phase.F else "again_block"
        block = self._shelf.take(name, layer, b, column)
        exchange = self._site.exchanges.block("combine", layer, self._tiles, block.shape[1])
        route = CombineRoute(tuple(rows_only(leg) for leg in state.route.legs), state.route.total)
        y = exchange.combine_again(op, route, block)
        if op.phase == Phase.R:
            return
        self._shelf.put("left", layer, b, y, column)
        if column + 1 == self._tiles.columns:
            columns = [self._shelf.take("left", layer, b, c) for c in range(self._tiles.columns)]
            self._shelf.put_rows("rows", layer + 1, b, torch.cat(columns, dim=1))
        return

    def _arrive_back(self, op: Op) -> None:
        layer, b, group = op.layer, op.microbatch, op.chunk
        state: _Pass = self._shelf.look("pass", layer, b)
        if group == 0:
            state.y_grad = self._gradient(layer + 1, b)
        exchange = self._site.exchanges.arrival("combine", layer, self._tiles, group)
        route = state.arrivals[group]
        grad = exchange.combine_backward(op, CombineRoute(route.legs, route.total), state.y_grad)
        self._shelf.put("made_grad", layer, b, grad, group)

    def _leave_back(self, op: Op) -> None:
        layer, b, column = op.layer, op.microbatch, op.chunk
        state: _Pass = self._shelf.look("pass", layer, b)
        assert state.route is not None
        block = self._shelf.take("block_grad", layer, b, column)
        exchange = self._site.exchanges.block("dispatch", layer, self._tiles, block.shape[1])
        if column:
            route = DispatchRoute(
                tuple(rows_only(leg) for leg in state.route.legs),
                state.route.tokens, state.route.cells, state.route.total,
            )  # fmt: skip
            found = exchange.sum_backward(op, route, block)
        else:
            assert state.weights_grad is not None
            both = exchange.dispatch_backward(op, state.route, block, torch.cat(state.weights_grad))
            assert both is not None and both[1] is not None
            found = both[0]
            self._shelf.put_rows("weights_grad", layer, b, both[1])
        self._shelf.put("normed_grad", layer, b, found, column)

    def _first(self, op: Op) -> None:
        layer, b, group = op.layer, op.microbatch, op.chunk
        arrived = self._arrived(op)
        if group == 0:
            self._shelf.put("tiles", layer, b, TiledExperts(self._site.holdings.experts[layer], self._tiles.columns))
        tiled: TiledExperts = self._shelf.look("tiles", layer, b)
        assert arrived.ids is not None and arrived.weights is not None
        tiled.first(arrived.rows, arrived.ids, arrived.weights, arrived.home)

    def _arrived(self, op: Op) -> Arrived:
        """What group `op.chunk` brought, now or the first time."""
        layer, b, group = op.layer, op.microbatch, op.chunk
        repeats = self._site.recomputed
        if op.phase == Phase.R:
            kept: Arrived = self._shelf.take("kept_ffn", layer, b, group)
            if (Kind.DISPATCH, layer) not in repeats:
                return kept
            return kept.with_rows(self._shelf.take("again_arrived", layer, b, group))
        arrived: Arrived = self._shelf.take("arrived", layer, b, group)
        if (Kind.FFN, layer) in repeats:
            resent = (Kind.DISPATCH, layer) in repeats
            self._shelf.put("kept_ffn", layer, b, arrived.without_rows() if resent else arrived, group)
        return arrived

    def _second(self, op: Op, column: int) -> None:
        layer, b = op.layer, op.microbatch
        tiled: TiledExperts = self._shelf.look("tiles", layer, b)
        block = tiled.second(column)
        if op.phase == Phase.F:
            self._shelf.put("block", layer, b, block, column)
            if column + 1 == self._tiles.columns and (Kind.FFN, layer) in self._site.recomputed:
                self._shelf.take("tiles", layer, b)  # R makes it again
        elif (Kind.COMBINE, layer) in self._site.recomputed:
            self._shelf.put("again_block", layer, b, block, column)

    def _first_back(self, op: Op) -> None:
        layer, b, group = op.layer, op.microbatch, op.chunk
        tiled: TiledExperts = self._shelf.look("tiles", layer, b)
        state: _Pass = self._shelf.look("pass", layer, b)
        if group == 0:
            state.weights_grad = []
        assert state.weights_grad is not None
        state.weights_grad.append(tiled.first_back(group, self._shelf.take("made_grad", layer, b, group)))

    def _second_back(self, op: Op, column: int) -> None:
        layer, b = op.layer, op.microbatch
        tiled: TiledExperts = self._shelf.look("tiles", layer, b)
        self._shelf.put("block_grad", layer, b, tiled.second_back(column), column)
        if column + 1 == self._tiles.columns:
            self._shelf.put("tiles_late", layer, b, self._shelf.take("tiles", layer, b))
