"""Where a rank stands: everything its operations need to know that does not change from step to step.

Decides who has which tokens. Tokens of a micro-batch are numbered as the data
are: sequence after sequence, rank after rank of an attention group. Before an
output head on an expert group they lie there in near-equal blocks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from disagmoe.cost.comet import TileSplit
from disagmoe.model import LossWeights
from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.plan import Placement, Plan
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.groups import Groups, Place, combine_target
from disagmoe.runtime.holdings import Holdings
from disagmoe.runtime.merge import Blocks, near_equal
from disagmoe.runtime.wiring import Exchanges
from disagmoe.specs import ModelSpec


@dataclass(frozen=True)
class Site:
    """One rank of a Plan.

    `row_dtype` is the type of rows between parts, `autocast` that of the multiplies (None: as the parameters).
    """

    plan: Plan
    spec: ModelSpec
    groups: Groups
    exchanges: Exchanges
    holdings: Holdings
    cut: Cut
    weights: LossWeights
    row_dtype: torch.dtype
    autocast: torch.dtype | None = None

    @property
    def me(self) -> Place:
        return self.groups.me

    @property
    def placement(self) -> Placement:
        return self.plan.layout.placement

    @property
    def device(self) -> torch.device:
        return self.groups.device

    @property
    def tiles(self) -> TileSplit | None:
        """The cut of exchange and experts into arrivals and column blocks, where the plan has one."""
        return self.plan.layout.tiles

    @property
    def row_chunks(self) -> int:
        """Into how many runs of tokens the rows of a layer are split where they are exchanged."""
        return 1 if self.tiles or self.plan.layout.capacity_padded else self.chunks

    @cached_property
    def chunks(self) -> int:
        """Sub-operator splits of an exchange and its experts (1: none; tiles are none)."""
        if self.tiles:
            self._check_tiles(self.tiles)
            return 1
        program = self.plan.program
        counts = {
            kind: 1 + int(program.chunk[program.kind == int(kind)].max(initial=0))
            for kind in (Kind.DISPATCH, Kind.FFN, Kind.COMBINE)
        }
        if len(set(counts.values())) > 1:
            text = ", ".join(f"{kind.name} {count}" for kind, count in counts.items())
            raise ValueError(f"a layer with different numbers of chunks cannot be executed: {text}")
        return counts[Kind.FFN]

    @cached_property
    def recomputed(self) -> frozenset[tuple[Kind, int]]:
        """(kind, layer) of what the Program recomputes."""
        program = self.plan.program
        rows = np.flatnonzero(program.phase == int(Phase.R))
        return frozenset((Kind(program.kind[row]), int(program.layer[row])) for row in rows)

    @cached_property
    def passes(self) -> frozenset[tuple[Phase, Stream]]:
        """(phase, stream) of the transfers between stages that this worker takes part in."""
        program = self.plan.program
        rows = np.flatnonzero((program.kind == int(Kind.P2P)) & (program.worker == self.me.worker))
        return frozenset((Phase(program.phase[row]), Stream(program.stream[row])) for row in rows)

    @property
    def row_uses(self) -> int:
        """How many operations of this worker take the rows before a spread head: its own, and passing them on."""
        return 1 + int(bool(self.placement.head_shards) and (Phase.F, Stream.SEND) in self.passes)

    @property
    def far_gradients(self) -> bool:
        """Whether a part of the gradient of those rows comes from another worker."""
        return bool(self.placement.head_shards) and (Phase.B, Stream.RECV) in self.passes

    def exchanged(self, layer: int) -> bool:
        """Whether the rows of `layer` travel between ranks (a colocated dense layer's do not)."""
        return self.placement.disaggregated or self.spec.is_moe(layer)

    def computing(self) -> AbstractContextManager[object]:
        """The context of all compute: autocast where it is asked for."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def own_tokens(self, microbatch: int) -> range:
        """Tokens of a micro-batch that this attention rank has."""
        shares = self._shares(self.me.worker, microbatch)
        first = sum(shares[: self.me.local])
        return range(first, first + shares[self.me.local])

    def head_tokens(self, microbatch: int) -> range:
        """Tokens of a micro-batch whose loss this rank computes."""
        if self.placement.workers[self.placement.head].pool != "F":
            return self.own_tokens(microbatch)
        ranks = self.groups.ranks.ranks(self.me.worker, self.me.replica)
        tokens = len(self.cut.sequences_of(self.me.replica, microbatch)) * self.cut.seq
        return Blocks.split(ranks, tokens).range_of(self.groups.rank)

    def before(self, layer: int, microbatch: int, chunk: int = 0) -> Blocks:
        """Which rank has which tokens when `layer` dispatches."""
        return self._blocks(self.exchanges.dispatch(layer).sides.owners, microbatch, chunk)

    def after(self, layer: int, microbatch: int, chunk: int = 0) -> Blocks:
        """Which rank gets which tokens when `layer` combines."""
        owners = self.exchanges.combine(layer).sides.owners
        placement = self.placement
        if placement.disaggregated and placement.workers[combine_target(placement, layer)].pool == "F":
            return Blocks.split(owners, sum(self._shares(placement.attn[layer], microbatch)))
        return self._blocks(owners, microbatch, chunk)

    def _check_tiles(self, tiles: TileSplit) -> None:
        """The Program must have the tiles of the layout."""
        program, wanted = self.plan.program, {Kind.DISPATCH: tiles.groups, Kind.COMBINE: tiles.columns}
        for kind, count in {**wanted, Kind.FFN: tiles.groups + tiles.columns}.items():
            rows = (program.kind == int(kind)) & (program.phase == int(Phase.F))
            found = 1 + int(program.chunk[rows].max(initial=0))
            if rows.any() and found != count:
                raise ValueError(f"{kind.name} has {found} chunks in the Program, the tiles of the layout {count}")

    def _shares(self, worker: int, microbatch: int) -> tuple[int, ...]:
        return self.cut.shares(self.me.replica, microbatch, self.placement.workers[worker].gpus)

    def _blocks(self, owners: tuple[int, ...], microbatch: int, chunk: int) -> Blocks:
        places = [self.groups.ranks.place(rank) for rank in owners]
        tokens = [self._shares(place.worker, microbatch)[place.local] for place in places]
        return Blocks(owners, tuple(near_equal(count, self.row_chunks)[chunk] for count in tokens))
