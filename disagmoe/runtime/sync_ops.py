"""GRAD_SYNC and OPTIM on one rank: what is reduced when, the update, and what every rank learns of the step.

Decides which bucket belongs to which row. A GRAD_SYNC of layer l reduces what only
this worker's ranks (and its copies) hold of layer l; of layer -1, embedding and
head, and, where no row names them, everything else. What several workers hold
together (FFN norms, the norm of a spread head, a tied embedding) is summed by the
last GRAD_SYNC of each, after all else and in one order everywhere: then no two
workers can wait for each other crosswise.

OPTIM begins with one small sum over all ranks (gradient norm, losses, expert
counts). With it every rank clips alike, and the correction biases of the routers
move once, by global counts.

Where a Program gathers early, updated parameters are handed round at the start of the
next step, what several workers hold together first; `settle` does it where there is
no next step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import numpy as np

from disagmoe.model import update_correction_bias
from disagmoe.ops import Kind, Op, Phase
from disagmoe.plan.program import Program
from disagmoe.runtime.buckets import Bucket
from disagmoe.runtime.collective import sum_over_world
from disagmoe.runtime.holdings import Share
from disagmoe.runtime.optimizer import ShardedAdamW
from disagmoe.runtime.site import Site
from disagmoe.runtime.tally import Sums, Tally


class SyncOps:
    """The end of a step. `optimizer` None: gradients are reduced, parameters stay."""

    def __init__(
        self, site: Site, buckets: Iterable[Bucket], optimizer: ShardedAdamW | None, *, bias_rate: float = 0.0
    ) -> None:
        self._site = site
        self._buckets = tuple(sorted(buckets, key=_together))
        self._optimizer = optimizer
        self._bias_rate = bias_rate
        program = site.plan.program
        self._early_gather = program.early_gather
        self._stale = False
        reduces, gathers = (sync_layers(program, site.me.worker, phase) for phase in (Phase.B, Phase.F))
        self._reduce = self._assign(reduces, reduces[-1:])
        self._gather = self._assign(gathers, gathers[:1] if program.early_gather else gathers[-1:])
        self.clip_factor = 1.0
        self.sums: Sums | None = None

    def clear_gradients(self) -> None:
        """Set every gradient to zero."""
        for bucket in self._buckets:
            bucket.clear()

    def sync(self, op: Op) -> None:
        """Reduce gradients (phase B) or hand updated parameters round (phase F)."""
        if op.phase == Phase.B:
            for bucket in self._reduce.get(op.layer, ()):
                bucket.reduce()
        elif self._optimizer is not None:
            for bucket in self._gather.get(op.layer, ()):
                bucket.gather()

    def settle(self) -> None:
        """Hand round what the last update left on its shards, if there is any. Collective."""
        if self._stale:
            for bucket in self._buckets:
                bucket.gather()
        self._stale = False

    def optimize(self, tally: Tally) -> float:
        """Sum over the world, check, update; returns when the others had arrived."""
        self.sums = tally.read(sum_over_world(tally.vector(self._square_norm())))
        arrived = time.perf_counter()
        self._check(self.sums)
        if self._optimizer is not None:
            self.clip_factor = self._optimizer.recipe.clip_factor(math.sqrt(self.sums.square_norm))
            self._optimizer.update(self.clip_factor)
            self._stale = self._early_gather
            self._move_biases(self.sums)
        return arrived

    def _square_norm(self) -> float:
        return sum(bucket.square_norm() for bucket in self._buckets)

    def _check(self, sums: Sums) -> None:
        if sums.tokens != self._site.cut.tokens:
            raise RuntimeError(f"the loss of {sums.tokens} tokens was computed, the batch has {self._site.cut.tokens}")
        for label, value in (("gradient norm", sums.square_norm), ("cross entropy", sums.cross_entropy)):
            if not math.isfinite(value):
                raise ValueError(f"the {label} is {value}: the run has diverged; lower lr, or train in fp32")

    def _move_biases(self, sums: Sums) -> None:
        for layer, part in self._site.holdings.attention.items():
            bias = None if part.router is None else part.router.correction_bias
            if bias is not None and self._bias_rate:
                update_correction_bias(bias, sums.counts[layer].to(bias.device), self._bias_rate)

    def _assign(self, rows: list[int], of_several: list[int]) -> dict[int, list[Bucket]]:
        """Buckets by the layer of the row that handles them; `of_several` is that of what several workers hold."""
        assigned: dict[int, list[Bucket]] = {layer: [] for layer in rows}
        for bucket in self._buckets:
            layer = bucket.share.layer
            if not rows:
                raise ValueError(f"worker {self._site.me.worker} has parameters and no GRAD_SYNC for them")
            if _together(bucket)[0] or (layer not in assigned and -1 not in assigned):
                (layer,) = of_several
            assigned[layer if layer in assigned else -1].append(bucket)
        return assigned


def sync_layers(program: Program, worker: int, phase: Phase) -> list[int]:
    """Layers of the GRAD_SYNC rows of one worker and phase, in the order in which they run."""
    rows = (program.worker == worker) & (program.kind == int(Kind.GRAD_SYNC)) & (program.phase == int(phase))
    return [int(layer) for layer in program.layer[np.flatnonzero(rows)]]


def _together(bucket: Bucket) -> tuple[int, Share]:
    """What one worker holds alone first, then what several do: one order for all workers."""
    return {"norm": 1, "heads": 2, "tied": 3}.get(bucket.share.purpose, 0), bucket.share
