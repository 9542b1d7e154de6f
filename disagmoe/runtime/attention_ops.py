"""EMBED, ATTN and HEAD on one rank: forward, backward and recomputed.

Decides what a phase does to a part. F keeps the handle for the backward pass, or,
where the Program recomputes, only the input; R runs the forward again, with the
experts chosen the first time, so that it cannot route differently; B, or I and
then W, use the handle. Losses and expert counts are taken from F alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from disagmoe.model import AttentionOutput, Saved
from disagmoe.model.segment import Gradient
from disagmoe.ops import Kind, Op, Phase
from disagmoe.runtime.cut import StepBatch
from disagmoe.runtime.shelf import Shelf
from disagmoe.runtime.site import Site
from disagmoe.runtime.tally import Tally
from disagmoe.runtime.transfer_ops import TransferOps


def back(shelf: Shelf, op: Op, name: str, gradients: Callable[[], tuple[Gradient, ...]]) -> tuple[Tensor, ...]:
    """Phase B, I or W of the forward whose handle is `name`: gradients of its inputs (none from W)."""
    layer, b, chunk = op.layer, op.microbatch, op.chunk
    if op.phase == Phase.W:
        weights: Saved = shelf.take(f"{name}_late", layer, b, chunk)
        weights.backward_weight()
        return ()
    saved: Saved = shelf.take(name, layer, b, chunk)
    if op.phase == Phase.B:
        return saved.backward(*gradients())
    found = saved.backward_input(*gradients())
    shelf.put(f"{name}_late", layer, b, saved, chunk)
    return found


class AttentionOps:
    """The operations of one step on what is not an expert."""

    def __init__(self, site: Site, shelf: Shelf, batch: StepBatch, tally: Tally, transfers: TransferOps) -> None:
        self._site = site
        self._shelf = shelf
        self._batch = batch
        self._tally = tally
        self._transfers = transfers
        cut, weights = batch.cut, site.weights
        self._token_scale = 1.0 / cut.tokens
        self._balance_scale = weights.balance_scale(cut.sequences) if weights.balance else None
        self._z_scale = weights.z_scale(cut.tokens) if weights.z else None

    def embed(self, op: Op) -> None:
        part, site, b = self._site.holdings.embedding, self._site, op.microbatch
        assert part is not None
        if op.phase == Phase.F:
            rows, saved = part.start(self._batch.inputs(site.me.replica, b, site.own_tokens(b)).to(site.device))
            self._shelf.put("saved_embed", -1, b, saved)
            self._shelf.put_rows("rows", 0, b, rows.to(site.row_dtype))
        elif op.phase != Phase.R:
            back(self._shelf, op, "saved_embed", lambda: (self._shelf.take_rows("rows_grad", 0, b),))

    def head(self, op: Op) -> None:
        part, site, b = self._site.holdings.head, self._site, op.microbatch
        assert part is not None
        if op.phase == Phase.F:
            tokens = site.head_tokens(b)
            targets = self._batch.targets(site.me.replica, b, tokens).to(site.device)
            loss, saved = part.start(self._shelf.take_rows("rows", site.spec.layers, b), targets)
            self._tally.add_loss(loss, len(tokens))
            self._shelf.put("saved_head", -1, b, saved)
        elif op.phase != Phase.R:
            for rows in back(self._shelf, op, "saved_head", lambda: (self._token_scale,)):
                self._shelf.put_rows("rows_grad", site.spec.layers, b, rows)

    def attention(self, op: Op) -> None:
        layer, b = op.layer, op.microbatch
        part = self._site.holdings.attention[layer]
        if op.phase == Phase.F:
            self._forward(op)
        elif op.phase == Phase.R:
            rows, ids = self._shelf.take("kept_attn", layer, b)
            output, saved = part.start(rows, self._batch.cut.seq, ids)
            self._shelf.put("saved_attn", layer, b, saved)
            if (Kind.DISPATCH, layer) in self._site.recomputed:
                self._shelf.put_rows("again_sent", layer, b, output.x)
        else:
            routed = part.router is not None
            for rows in back(self._shelf, op, "saved_attn", lambda: self._gradients(op, routed)):
                self._shelf.put_rows("rows_grad", layer, b, rows)

    def _forward(self, op: Op) -> None:
        layer, b, seq = op.layer, op.microbatch, self._batch.cut.seq
        part = self._site.holdings.attention[layer]
        rows = self._shelf.take_rows("rows", layer, b)
        again = (Kind.ATTN, layer) in self._site.recomputed
        if again:
            with torch.no_grad():
                output = part.forward(rows, seq)
            self._shelf.put("kept_attn", layer, b, (rows, output.routing.ids if output.routing else None))
        else:
            output, saved = part.start(rows, seq)
            self._shelf.put("saved_attn", layer, b, saved)
            if (Kind.DISPATCH, layer) in self._site.recomputed:
                self._shelf.put_rows("again_sent", layer, b, output.x)
        if output.routing is not None:
            self._tally.add_routing(layer, output.routing)
        for chunk, part_of_output in enumerate(self._by_chunk(output)):
            self._shelf.put("sent", layer, b, part_of_output, chunk)

    def _by_chunk(self, output: AttentionOutput) -> list[AttentionOutput]:
        split, routing = self._shelf.split, output.routing
        if routing is None:
            return [AttentionOutput(x, None) for x in split(output.x)]
        parts = zip(split(output.x), split(routing.ids), split(routing.weights), strict=True)
        return [AttentionOutput(x, replace(routing, ids=ids, weights=weights)) for x, ids, weights in parts]

    def _gradients(self, op: Op, routed: bool) -> tuple[Gradient, ...]:
        """Gradients of attention's output: of its rows, and where it routes of weights, balance and z."""
        if not routed:
            return (self._shelf.take_rows("sent_grad", op.layer, op.microbatch),)
        rows = self._transfers.source_gradient(op.layer, op.microbatch)
        weights = self._shelf.take_rows("weights_grad", op.layer, op.microbatch)
        return rows, weights, self._balance_scale, self._z_scale
