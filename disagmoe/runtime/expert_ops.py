"""FFN on one rank: experts, shared experts and dense MLPs on the rows that came in.

As `attention_ops`: F keeps a handle or, where the Program recomputes, what R needs
to run the forward again: the rows that arrived, or only their routing where their
dispatch is repeated too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disagmoe.model import ExpertPart
from disagmoe.ops import Kind, Op, Phase
from disagmoe.runtime.attention_ops import back
from disagmoe.runtime.exchange import Arrived
from disagmoe.runtime.shelf import Shelf, joined
from disagmoe.runtime.site import Site


class ExpertOps:
    """The expert operations of one step."""

    def __init__(self, site: Site, shelf: Shelf) -> None:
        self._site = site
        self._shelf = shelf

    def experts(self, op: Op) -> None:
        part = self._site.holdings.experts[op.layer]
        if not self._site.exchanged(op.layer):
            self._local(part, op)
        elif op.phase == Phase.W and op.chunk < 0:
            for chunk in range(self._site.chunks):
                self._remote(part, op._replace(chunk=chunk))
        else:
            self._remote(part, op)

    def _remote(self, part: ExpertPart, op: Op) -> None:
        """On rows that a dispatch brought."""
        shelf, layer, b, chunk = self._shelf, op.layer, op.microbatch, op.chunk
        again, resent = self._repeats(Kind.FFN, layer), self._repeats(Kind.DISPATCH, layer)
        if op.phase == Phase.F:
            arrived: Arrived = shelf.take("arrived", layer, b, chunk)
            shelf.put("made", layer, b, self._run(part, arrived, op, save=not again), chunk)
            if again:
                shelf.put("kept_ffn", layer, b, arrived.without_rows() if resent else arrived, chunk)
        elif op.phase == Phase.R:
            arrived = shelf.take("kept_ffn", layer, b, chunk)
            if resent:
                arrived = arrived.with_rows(shelf.take("again_arrived", layer, b, chunk))
            made = self._run(part, arrived, op, save=True)
            if self._repeats(Kind.COMBINE, layer):
                shelf.put("again_made", layer, b, made, chunk)
        else:
            found = back(shelf, op, "saved_ffn", lambda: (shelf.take("made_grad", layer, b, chunk),))
            if found:
                shelf.put("arrived_grad", layer, b, (found[0], found[1] if len(found) > 1 else None), chunk)

    def _run(self, part: ExpertPart, arrived: Arrived, op: Op, *, save: bool) -> Tensor:
        if not save:
            with torch.no_grad():
                return part.forward(arrived.rows, arrived.ids, arrived.weights, arrived.home)
        made, saved = part.start(arrived.rows, arrived.ids, arrived.weights, arrived.home)
        self._shelf.put("saved_ffn", op.layer, op.microbatch, saved, op.chunk)
        return made

    def _local(self, part: ExpertPart, op: Op) -> None:
        """A dense layer that lives where its attention does: on all rows at once, nothing is exchanged."""
        shelf, layer, b = self._shelf, op.layer, op.microbatch
        if op.phase == Phase.F:
            rows = joined([shelf.take("sent", layer, b, chunk).x for chunk in range(shelf.chunks)])
            if self._repeats(Kind.FFN, layer):
                with torch.no_grad():
                    made = part.forward(rows)
                shelf.put("kept_ffn", layer, b, rows)
            else:
                made, saved = part.start(rows)
                shelf.put("saved_ffn", layer, b, saved)
            shelf.put_rows("rows", layer + 1, b, made)
        elif op.phase == Phase.R:
            _, saved = part.start(shelf.take("kept_ffn", layer, b))
            shelf.put("saved_ffn", layer, b, saved)
        else:
            op = op._replace(chunk=0)
            for rows in back(shelf, op, "saved_ffn", lambda: (shelf.take_rows("rows_grad", layer + 1, b),)):
                shelf.put_rows("sent_grad", layer, b, rows)

    def _repeats(self, kind: Kind, layer: int) -> bool:
        return (kind, layer) in self._site.recomputed
