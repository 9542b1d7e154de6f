"""DISPATCH, COMBINE and P2P on one rank: which exchange, with what, and where the result goes.

Both sides of a transfer run the same code: whoever owns tokens gives or gets them,
whoever holds experts does the other half.
"""

from __future__ import annotations

from torch import Tensor

from disagmoe.model import AttentionOutput
from disagmoe.ops import COMPUTE_STREAMS, SEND_STREAMS, Op, Phase
from disagmoe.runtime.exchange import Exchange
from disagmoe.runtime.script import Task
from disagmoe.runtime.shelf import Shelf, joined
from disagmoe.runtime.site import Site


class TransferOps:
    """The transfers of one step."""

    def __init__(self, site: Site, shelf: Shelf) -> None:
        self._site = site
        self._shelf = shelf

    def dispatch(self, op: Op) -> None:
        exchange = self._site.exchanges.dispatch(op.layer)
        if op.phase == Phase.F:
            self._dispatch(exchange, op)
        elif op.phase == Phase.R:
            self._dispatch_again(exchange, op)
        else:
            self._dispatch_back(exchange, op)

    def combine(self, op: Op) -> None:
        exchange = self._site.exchanges.combine(op.layer)
        if op.phase == Phase.F:
            self._combine(exchange, op)
        elif op.phase == Phase.R:
            _, holder = self._sides(exchange)
            made = self._shelf.take("again_made", *_at(op)) if holder else None
            exchange.combine_again(op, self._shelf.look("combine", *_at(op)), made)
        else:
            self._combine_back(exchange, op)

    def source_gradient(self, layer: int, microbatch: int) -> Tensor:
        """Gradient of the rows that attention gave to the experts of `layer`."""
        return self._shelf.take_rows("sent_grad", layer, microbatch)

    def pass_on(self, task: Task) -> None:
        """A transfer between pipeline stages: the output of a layer, or its gradient."""
        op, worker = task.op, self._site.me.worker
        if task.stream in COMPUTE_STREAMS:
            return None  # the worker only waits here
        forward, sends = op.phase == Phase.F, task.stream in SEND_STREAMS
        first, second = (worker, task.peer) if sends == forward else (task.peer, worker)
        relay = self._site.exchanges.relay(first, second)
        layer, b = op.layer + 1, op.microbatch
        if sends:
            rows = self._shelf.take_rows("rows", layer, b) if forward else self._whole_gradient(layer, b)
            return relay.send(op, rows, back=not forward)
        if not self._site.placement.head_shards:
            rows = relay.receive(op, len(self._site.own_tokens(b)), back=not forward)
            return self._shelf.put_rows("rows" if forward else "rows_grad", layer, b, rows)
        rows = relay.receive(op, len(self._site.head_tokens(b)), back=not forward)
        uses = self._site.row_uses if forward else 1
        self._shelf.put_rows("rows" if forward else "far_grad", layer, b, rows, uses=uses)
        return None

    def _whole_gradient(self, layer: int, microbatch: int) -> Tensor:
        return joined([self._gradient(layer, microbatch, chunk) for chunk in range(self._shelf.chunks)])

    def _gradient(self, layer: int, microbatch: int, chunk: int = 0) -> Tensor:
        """The gradient of the rows before `layer`, with another worker's part where a spread head makes one."""
        grad: Tensor = self._shelf.take("rows_grad", layer, microbatch, chunk)
        if layer == self._site.spec.layers and self._site.far_gradients:
            grad = grad + self._shelf.take("far_grad", layer, microbatch, chunk)
        return grad

    def _sides(self, exchange: Exchange) -> tuple[bool, bool]:
        """Whether this rank owns tokens and whether it holds experts."""
        rank = self._site.groups.rank
        return rank in exchange.sides.owners, rank in exchange.sides.holders

    def _dispatch(self, exchange: Exchange, op: Op) -> None:
        owner, holder = self._sides(exchange)
        tokens = self._site.before(op.layer, op.microbatch, op.chunk)
        if owner:
            sent: AttentionOutput = self._shelf.take("sent", *_at(op))
            routing = sent.routing
            ids, weights = (None, None) if routing is None else (routing.ids, routing.weights)
            route, arrived = exchange.dispatch(op, tokens, sent.x, ids, weights)
        else:
            route, arrived = exchange.dispatch(op, tokens)
        self._shelf.put("dispatch", op.layer, op.microbatch, route, op.chunk)
        if holder:
            self._shelf.put("arrived", op.layer, op.microbatch, arrived, op.chunk)

    def _dispatch_again(self, exchange: Exchange, op: Op) -> None:
        owner, holder = self._sides(exchange)
        rows = self._shelf.take("again_sent", *_at(op)) if owner else None
        again = exchange.dispatch_again(op, self._shelf.look("dispatch", *_at(op)), rows)
        if holder:
            self._shelf.put("again_arrived", op.layer, op.microbatch, again, op.chunk)

    def _dispatch_back(self, exchange: Exchange, op: Op) -> None:
        owner, holder = self._sides(exchange)
        rows_grad, weights_grad = self._shelf.take("arrived_grad", *_at(op)) if holder else (None, None)
        found = exchange.dispatch_backward(op, self._shelf.take("dispatch", *_at(op)), rows_grad, weights_grad)
        if owner:
            assert found is not None
            self._shelf.put("sent_grad", op.layer, op.microbatch, found[0], op.chunk)
            if found[1] is not None:
                self._shelf.put("weights_grad", op.layer, op.microbatch, found[1], op.chunk)

    def _combine(self, exchange: Exchange, op: Op) -> None:
        owner, holder = self._sides(exchange)
        tokens = self._site.after(op.layer, op.microbatch, op.chunk)
        if holder:
            route = self._shelf.look("dispatch", *_at(op))
            back_route, rows = exchange.combine(op, tokens, route, self._shelf.take("made", *_at(op)))
        else:
            back_route, rows = exchange.combine(op, tokens)
        self._shelf.put("combine", op.layer, op.microbatch, back_route, op.chunk)
        if owner:
            last = op.layer + 1 == self._site.spec.layers
            uses = self._site.row_uses if last else 1
            self._shelf.put("rows", op.layer + 1, op.microbatch, rows, op.chunk, uses=uses)

    def _combine_back(self, exchange: Exchange, op: Op) -> None:
        owner, holder = self._sides(exchange)
        grad = self._gradient(op.layer + 1, op.microbatch, op.chunk) if owner else None
        made_grad = exchange.combine_backward(op, self._shelf.take("combine", *_at(op)), grad)
        if holder:
            self._shelf.put("made_grad", op.layer, op.microbatch, made_grad, op.chunk)


def _at(op: Op) -> tuple[int, int, int]:
    """The place of an operation's values on the shelf."""
    return op.layer, op.microbatch, op.chunk
