"""HEAD on one rank where the head is spread by vocabulary over the expert groups.

Decides when the shards talk. Forward starts to hand the statistics of a micro-batch
round and does not wait; backward waits for those of all shards. The number of the
micro-batch goes along, so that two shards in different order cannot go unnoticed.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.ops import Op, Phase
from disagmoe.runtime.collective import all_gather, finish
from disagmoe.runtime.cut import StepBatch
from disagmoe.runtime.head_shard import SavedShard
from disagmoe.runtime.shelf import Shelf
from disagmoe.runtime.site import Site
from disagmoe.runtime.tally import Tally


class ShardOps:
    """The operations of one step on a shard of the head."""

    def __init__(self, site: Site, shelf: Shelf, batch: StepBatch, tally: Tally) -> None:
        self._site = site
        self._shelf = shelf
        self._batch = batch
        self._tally = tally
        self._group = site.groups.reduction("head") if site.holdings.head_shard is not None else None
        self._counts_loss = site.me.worker == site.placement.heads[0]
        self._token_scale = 1.0 / batch.cut.tokens

    def head(self, op: Op) -> float | None:
        """Run one operation; in backward returns when the other shards had answered."""
        if op.phase == Phase.F:
            self._forward(op)
            return None
        if op.phase != Phase.B:
            raise ValueError(f"a spread head has phases F and B, not {op.phase.name}")
        return self._backward(op)

    def _forward(self, op: Op) -> None:
        part, site, b = self._site.holdings.head_shard, self._site, op.microbatch
        assert part is not None
        tokens = site.head_tokens(b)
        targets = self._batch.targets(site.me.replica, b, tokens).to(site.device)
        statistics, saved = part.start(self._shelf.take_rows("rows", site.spec.layers, b), targets)
        told = torch.cat((statistics, statistics.new_full((statistics.shape[0], 1), b)), dim=1)
        self._shelf.put("saved_head", -1, b, (saved, len(tokens), *self._hand_round(told)))

    def _hand_round(self, told: Tensor) -> tuple[Tensor, dist.Work | None]:
        if self._group is None:
            return told.unsqueeze(0), None
        every = told.new_empty(dist.get_world_size(self._group), *told.shape)
        return every, all_gather(every.flatten(0, 1), told, self._group)

    def _backward(self, op: Op) -> float:
        entry: tuple[SavedShard, int, Tensor, dist.Work | None] = self._shelf.take("saved_head", -1, op.microbatch)
        saved, tokens, every, work = entry
        if work is not None:
            finish(work, self._group)
        arrived = time.perf_counter()
        numbers = every[:, :, -1]
        if bool((numbers != op.microbatch).any()):
            raise RuntimeError(f"shards of the head are at micro-batches {numbers[:, 0].tolist()}, not {op.microbatch}")
        loss, grad = saved.backward(every[:, :, :-1], self._token_scale)
        if self._counts_loss:
            self._tally.add_loss(loss, tokens)
        self._shelf.put_rows("rows_grad", self._site.spec.layers, op.microbatch, grad)
        return arrived
