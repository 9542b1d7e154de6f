"""DISPATCH and COMBINE through a dense buffer of equal rows per expert (Tutel).

Decides what encode and decode are. A rank writes its tokens into a buffer
[experts, capacity, hidden] (`capacity.py`), empty rows stay zero, and every rank
sends every other the same number of rows; experts compute on all of them. What
comes back is weighted and summed where the token is. Residual and shared experts
never travel: chunk c of the experts also does them for the c-th run of the rank's
own tokens. In a dropless run the ranks of an exchange first agree on the fullest
expert's load.

The values that other operations see are those of `shelf.py`, whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.cost.capacity import capacity_rows
from disagmoe.model import AttentionOutput, Routing
from disagmoe.ops import Op, Phase
from disagmoe.runtime.capacity import Chunk, Seating, queue_places, seat
from disagmoe.runtime.collective import finish
from disagmoe.runtime.exchange import Arrived, CombineRoute, DispatchRoute, Exchange
from disagmoe.runtime.merge import Blocks, near_equal
from disagmoe.runtime.shelf import Shelf
from disagmoe.runtime.site import Site
from disagmoe.runtime.tally import Tally
from disagmoe.runtime.transfer_ops import TransferOps


@dataclass
class _Pass:
    """One layer and micro-batch on one rank, from its first dispatch to its last gradient."""

    x: Tensor
    routing: Routing
    seating: Seating
    dispatched: dict[int, tuple[DispatchRoute, int]] = field(default_factory=dict)  # and the rows that came
    combined: dict[int, CombineRoute] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)  # what the experts made of the copies of a chunk
    total: Tensor | None = None
    y_grad: Tensor | None = None
    weights_grad: Tensor | None = None
    x_grad: Tensor | None = None
    left: int = 0  # chunks still to come of the pass under way


class CapacityOps(TransferOps):
    """The transfers of one step whose MoE layers are capacity-padded.

    `factor` as in `cost.capacity`. Dropped copies are counted in `tally`.
    """

    def __init__(self, site: Site, shelf: Shelf, tally: Tally, factor: float) -> None:
        super().__init__(site, shelf)
        self._tally = tally
        self._factor = factor
        self._degree = site.chunks

    def _dispatch(self, exchange: Exchange, op: Op) -> None:
        layer, b = op.layer, op.microbatch
        if op.chunk == 0:
            self._shelf.put("pass", layer, b, self._begin(op))
        state, exchange = self._state(op), self._site.exchanges.padded("dispatch", layer)
        tokens = self._tokens(state, exchange)
        buffer = self._encode(state, state.seating.chunks[op.chunk])
        experts = torch.arange(self._site.spec.experts, device=buffer.device).repeat_interleave(state.seating.rows)
        ones = torch.ones(buffer.shape[0], 1, dtype=exchange.form.sum_dtype, device=buffer.device)
        route, arrived = exchange.dispatch(op, tokens, buffer, experts.unsqueeze(1), ones)
        assert arrived is not None
        state.dispatched[op.chunk] = route, arrived.rows.shape[0]
        self._shelf.put("arrived", layer, b, self._with_own(state, arrived, op.chunk), op.chunk)

    def _dispatch_again(self, exchange: Exchange, op: Op) -> None:
        state, exchange = self._state(op), self._site.exchanges.padded("dispatch", op.layer)
        if op.chunk == 0:
            state.x = self._shelf.take("again_sent", op.layer, op.microbatch)
        buffer = self._encode(state, state.seating.chunks[op.chunk])
        rows = exchange.dispatch_again(op, state.dispatched[op.chunk][0], buffer)
        assert rows is not None
        own = state.x[self._run(state, op.chunk)]
        self._shelf.put("again_arrived", op.layer, op.microbatch, torch.cat((rows, own)), op.chunk)

    def _combine(self, exchange: Exchange, op: Op) -> None:
        state, exchange = self._state(op), self._site.exchanges.padded("combine", op.layer)
        route, count = state.dispatched[op.chunk]
        made: Tensor = self._shelf.take("made", op.layer, op.microbatch, op.chunk)
        back, y = exchange.combine(op, self._tokens(state, exchange), route, made[:count])
        assert y is not None
        state.combined[op.chunk] = back
        chunk = state.seating.chunks[op.chunk]
        state.results[op.chunk] = y.index_select(0, chunk.row)
        if state.total is None:
            state.left = self._degree
            state.total = torch.zeros_like(state.x, dtype=exchange.form.sum_dtype)
        weights = state.routing.weights.flatten()[chunk.copy].to(state.total.dtype).unsqueeze(1)
        state.total.index_add_(0, self._token(state, chunk), state.results[op.chunk].to(state.total.dtype) * weights)
        state.total[self._run(state, op.chunk)] += made[count:].to(state.total.dtype)
        state.left -= 1
        if not state.left:
            self._shelf.put_rows("rows", op.layer + 1, op.microbatch, state.total.to(y.dtype))
            state.total = None

    def combine(self, op: Op) -> None:
        if op.phase == Phase.R:
            made: Tensor = self._shelf.take("again_made", op.layer, op.microbatch, op.chunk)
            state, exchange = self._state(op), self._site.exchanges.padded("combine", op.layer)
            exchange.combine_again(op, state.combined[op.chunk], made[: state.dispatched[op.chunk][1]])
        else:
            super().combine(op)

    def _combine_back(self, exchange: Exchange, op: Op) -> None:
        state, exchange = self._state(op), self._site.exchanges.padded("combine", op.layer)
        if state.y_grad is None:
            state.left = self._degree
            state.y_grad = self._gradient(op.layer + 1, op.microbatch)
            state.weights_grad = torch.zeros_like(state.routing.weights).flatten()
        assert state.weights_grad is not None
        chunk, wide = state.seating.chunks[op.chunk], exchange.form.sum_dtype
        per_copy = state.y_grad.index_select(0, self._token(state, chunk)).to(wide)
        weights = state.routing.weights.flatten()[chunk.copy].to(wide)
        state.weights_grad[chunk.copy] = (per_copy * state.results.pop(op.chunk).to(wide)).sum(1).to(weights.dtype)
        buffer = self._empty(state)
        buffer[chunk.row] = (per_copy * weights.unsqueeze(1)).to(buffer.dtype)
        grad = exchange.combine_backward(op, state.combined[op.chunk], buffer)
        assert grad is not None
        own = state.y_grad[self._run(state, op.chunk)]
        self._shelf.put("made_grad", op.layer, op.microbatch, torch.cat((grad, own)), op.chunk)

    def _dispatch_back(self, exchange: Exchange, op: Op) -> None:
        state, exchange = self._state(op), self._site.exchanges.padded("dispatch", op.layer)
        route, count = state.dispatched[op.chunk]
        rows_grad, _ = self._shelf.take("arrived_grad", op.layer, op.microbatch, op.chunk)
        found = exchange.dispatch_backward(op, route, rows_grad[:count])
        assert found is not None and state.weights_grad is not None
        wide, chunk = exchange.form.sum_dtype, state.seating.chunks[op.chunk]
        if state.x_grad is None:
            state.x_grad = torch.zeros_like(state.x, dtype=wide)
        state.x_grad.index_add_(0, self._token(state, chunk), found[0].index_select(0, chunk.row).to(wide))
        state.x_grad[self._run(state, op.chunk)] += rows_grad[count:].to(wide)
        state.left -= 1
        if not state.left:
            self._shelf.take("pass", op.layer, op.microbatch)
            self._shelf.put_rows("sent_grad", op.layer, op.microbatch, state.x_grad.to(rows_grad.dtype))
            grad = state.weights_grad.view(state.routing.weights.shape)
            self._shelf.put_rows("weights_grad", op.layer, op.microbatch, grad)

    def _begin(self, op: Op) -> _Pass:
        """Where the tokens of a layer and micro-batch go. Collective among the ranks of the exchange."""
        sent: AttentionOutput = self._shelf.take("sent", op.layer, op.microbatch)
        assert sent.routing is not None
        spec, ids = self._site.spec, sent.routing.ids
        places = queue_places(ids, spec.experts)
        fullest = 1 + int(places.max()) if places.numel() else 0
        if self._factor <= 0.0:
            fullest = self._largest(self._site.exchanges.padded("dispatch", op.layer), fullest)
        most = max(self._site.before(op.layer, op.microbatch).counts)
        capacity = capacity_rows(max(1, fullest), max(1, most), spec.experts, spec.top_k, self._factor, self._degree)
        seating = seat(ids, places, capacity, self._degree)
        self._tally.add_dropped(op.layer, seating.dropped)
        return _Pass(sent.x, sent.routing, seating)

    def _largest(self, exchange: Exchange, value: int) -> int:
        group = exchange.link.control
        if group is None:
            return value
        shared = torch.tensor([value])
        work = dist.all_reduce(shared, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        finish(work, group)
        return int(shared)

    def _state(self, op: Op) -> _Pass:
        state: _Pass = self._shelf.look("pass", op.layer, op.microbatch)
        return state

    def _tokens(self, state: _Pass, exchange: Exchange) -> Blocks:
        return Blocks.each(exchange.sides.owners, self._site.spec.experts * state.seating.rows)

    def _empty(self, state: _Pass) -> Tensor:
        rows = self._site.spec.experts * state.seating.rows
        return torch.zeros(rows, self._site.spec.hidden, dtype=self._site.row_dtype, device=self._site.device)

    def _encode(self, state: _Pass, chunk: Chunk) -> Tensor:
        buffer = self._empty(state)
        buffer[chunk.row] = state.x.index_select(0, self._token(state, chunk)).to(buffer.dtype)
        return buffer

    def _token(self, state: _Pass, chunk: Chunk) -> Tensor:
        """Own token of each copy of a chunk."""
        return chunk.copy // state.routing.ids.shape[1]

    def _run(self, state: _Pass, chunk: int) -> slice:
        """The own tokens whose residual and shared experts belong to a chunk."""
        sizes = near_equal(state.routing.ids.shape[0], self._degree)
        first = sum(sizes[:chunk])
        return slice(first, first + sizes[chunk])

    def _with_own(self, state: _Pass, arrived: Arrived, chunk: int) -> Arrived:
        """What arrived, and behind it the rank's own run of tokens, which has no experts here but its home."""
        own = state.x[self._run(state, chunk)]
        assert arrived.ids is not None and arrived.weights is not None
        count, more = arrived.rows.shape[0], own.shape[0]
        return replace(
            arrived,
            rows=torch.cat((arrived.rows, own)),
            ids=torch.cat((arrived.ids, arrived.ids.new_full((more, arrived.ids.shape[1]), -1))),
            weights=torch.cat((arrived.weights, arrived.weights.new_zeros(more, arrived.weights.shape[1]))),
            home=torch.arange(count, count + more, device=own.device),
        )
