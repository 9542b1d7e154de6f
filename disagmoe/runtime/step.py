"""One rank of a training run: built from a Plan, runs step after step.

Decides what is put together. The Plan says what runs where and when; the parts of
the model, the exchanges and the optimizer do it; the executor keeps the order.
`StepRunner` is all of that for one rank; what a step gave comes back as the same
`LossReport` that the single-process `ReferenceModel` gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from disagmoe.model import Blueprint, LossReport, LossWeights, Piece
from disagmoe.model.head import CHUNK_TOKENS
from disagmoe.ops import COMM_KINDS, COMPUTE_STREAMS, Kind, Op
from disagmoe.plan.dependencies import build_graph
from disagmoe.plan.plan import Plan
from disagmoe.plan.verify import verify
from disagmoe.runtime.attention_ops import AttentionOps
from disagmoe.runtime.buckets import Bucket
from disagmoe.runtime.capacity_ops import CapacityOps
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut, Fetch, StepBatch
from disagmoe.runtime.executor import MOST_TIMEOUT_S, Executor, Record
from disagmoe.runtime.expert_ops import ExpertOps
from disagmoe.runtime.groups import Groups
from disagmoe.runtime.head_shard import Fragment
from disagmoe.runtime.holdings import Holdings, Share
from disagmoe.runtime.optimizer import Recipe, ShardedAdamW
from disagmoe.runtime.pacing import Pacing
from disagmoe.runtime.script import Task, script_of
from disagmoe.runtime.shard_ops import ShardOps
from disagmoe.runtime.shelf import Shelf
from disagmoe.runtime.site import Site
from disagmoe.runtime.sync_ops import SyncOps
from disagmoe.runtime.tally import Sums, Tally
from disagmoe.runtime.tile_ops import TileOps
from disagmoe.runtime.transfer_ops import TransferOps
from disagmoe.runtime.transport import TRANSPORTS
from disagmoe.runtime.wiring import Exchanges
from disagmoe.specs import ModelSpec


@dataclass(frozen=True)
class Precision:
    """Types of parameters (and gradients, moments), of the rows between parts, and of multiplies under autocast."""

    parameters: torch.dtype
    rows: torch.dtype
    autocast: torch.dtype | None = None


PRECISIONS = {
    "fp64": Precision(torch.float64, torch.float64),
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16, torch.bfloat16),
}


@dataclass(frozen=True)
class RunOptions:
    """How a Plan is run. `recipe` None computes gradients and updates nothing.

    `transport` "pairs" or "union"; `node_size` ranks per (logical) node, None: as
    the plan's workers say; `bias_rate` is the step of the routers' correction bias.
    """

    seed: int = 0
    precision: str = "fp32"
    weights: LossWeights = field(default_factory=LossWeights)
    recipe: Recipe | None = None
    bias_rate: float = 0.0
    transport: str = "pairs"
    node_size: int | None = None
    timeout_s: float = MOST_TIMEOUT_S
    chunk_tokens: int = CHUNK_TOKENS

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r} is unknown; allowed: {', '.join(PRECISIONS)}")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {self.transport!r}; known: {', '.join(TRANSPORTS)}")


@dataclass(frozen=True)
class StepResult:
    """What a step gave: equal on all ranks but for `record`. `grad_norm` is global, before clipping."""

    report: LossReport
    grad_norm: float
    clip_factor: float
    sums: Sums
    record: Record


class StepRunner:
    """This rank's part of `plan`, ready to run steps. Collective over the world; use as a context manager.

    With `pacing` every step takes the modelled time, and its record is in logical seconds.
    """

    def __init__(
        self,
        context: Context,
        plan: Plan,
        spec: ModelSpec,
        cut: Cut,
        options: RunOptions,
        *,
        pacing: Pacing | None = None,
    ) -> None:
        verify(plan)
        precision = PRECISIONS[options.precision]
        self.plan, self.spec, self.cut, self.options = plan, spec, cut, options
        groups = Groups.create(
            plan, device=context.device, timeout_s=options.timeout_s, node_size=options.node_size, tied=spec.tied
        )
        self.pacer = groups.clock = None if pacing is None else pacing.pacer(plan.program, groups)
        self.exchanges = Exchanges(
            groups, spec, transport=options.transport, merge=plan.layout.merge, dtype=precision.rows
        )
        blueprint = Blueprint(spec, precision.parameters, context.device, options.seed)
        self.holdings = Holdings.build(blueprint, self.exchanges, chunk_tokens=options.chunk_tokens)
        self.site = Site(
            plan, spec, groups, self.exchanges, self.holdings, cut, options.weights, precision.rows, precision.autocast
        )
        self.buckets = self._make_buckets()
        self.optimizer = ShardedAdamW(self.buckets, options.recipe) if options.recipe else None
        self._sync = SyncOps(self.site, self.buckets, self.optimizer, bias_rate=options.bias_rate)
        self._ops: _StepOps | None = None
        self.executor = Executor(
            script_of(plan.program, groups.me.worker, build_graph(plan.program)),
            self._perform,
            device=context.device,
            timeout_s=options.timeout_s,
            names=tuple(worker.name for worker in plan.layout.placement.workers),
            pacer=self.pacer,
        )

    def step(self, fetch: Fetch) -> StepResult:
        """Run one step on the sequences that `fetch` gives."""
        self._sync.clear_gradients()
        self._ops = _StepOps(self.site, StepBatch(self.cut, fetch), self._sync)
        record = self.executor.step()
        if left := self._ops.shelf.left():
            raise RuntimeError(f"nobody used {left[0]}" + (f" and {len(left) - 1} more" if len(left) > 1 else ""))
        self._ops = None
        sums = self._sync.sums
        assert sums is not None
        return StepResult(self._report(sums), math.sqrt(sums.square_norm), self._sync.clip_factor, sums, record)

    def values(self) -> dict[str, Tensor]:
        """Global name -> view of every parameter and buffer this rank holds (some rows of one: `name[first:last]`).

        Collective where the plan gathers parameters early.
        """
        self._sync.settle()
        return {
            piece.label if isinstance(piece, Fragment) else name: piece.value
            for name, piece in self.holdings.pieces().items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """As `values`, the complete gradient of every parameter this rank holds. Collective; for inspection."""
        found: dict[str, Tensor] = {}
        for bucket in self.buckets:
            bucket.gather_gradients()
            for run in bucket.runs:
                found[run.label] = bucket.gradients[run.start : run.stop].view(run.shape)
        return found

    def close(self) -> None:
        """End lanes and groups."""
        self.executor.close()
        self.site.groups.destroy()

    def __enter__(self) -> StepRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _perform(self, task: Task) -> float | None:
        assert self._ops is not None
        return self._ops.perform(task)

    def _report(self, sums: Sums) -> LossReport:
        weights, cut = self.options.weights, self.cut
        mean, balance, z = sums.cross_entropy / cut.tokens, sums.balance / cut.sequences, sums.z / cut.tokens
        counts = {layer: sums.counts[layer] for layer in range(self.spec.layers) if self.spec.is_moe(layer)}
        return LossReport(mean + weights.balance * balance + weights.z * z, mean, balance, z, counts)

    def _make_buckets(self) -> list[Bucket]:
        placement, groups = self.site.placement, self.site.groups
        shared: dict[Share, list[tuple[torch.nn.Parameter, list[Piece]]]] = {}
        for share, parameter, pieces in self.holdings.shares(placement.attn, placement.ffn):
            shared.setdefault(share, []).append((parameter, pieces))
        return [
            Bucket.build(share, shared[share], groups.reduction(share.purpose, share.a, share.f))
            for share in sorted(shared)
        ]


class _StepOps:
    """All operations of one step."""

    def __init__(self, site: Site, batch: StepBatch, sync: SyncOps) -> None:
        self.shelf = Shelf(site.device, site.row_chunks)
        self._site = site
        self._tally = Tally(site.spec, site.device)
        self._sync = sync
        self._transfers, experts = self._exchanges()
        attention = AttentionOps(site, self.shelf, batch, self._tally, self._transfers)
        head = ShardOps(site, self.shelf, batch, self._tally).head if site.placement.head_shards else attention.head
        self._compute: dict[Kind, Callable[[Op], float | None]] = {
            Kind.EMBED: attention.embed,
            Kind.ATTN: attention.attention,
            Kind.FFN: experts,
            Kind.HEAD: head,
        }
        self._other: dict[Kind, Callable[[Op], None]] = {
            Kind.DISPATCH: self._transfers.dispatch,
            Kind.COMBINE: self._transfers.combine,
            Kind.GRAD_SYNC: sync.sync,
        }

    def _exchanges(self) -> tuple[TransferOps, Callable[[Op], None]]:
        """What carries tokens, and what the experts do with them, as the plan cuts them."""
        site, shelf = self._site, self.shelf
        if site.tiles:
            tiles = TileOps(site, shelf, site.tiles)
            return tiles, tiles.experts
        experts = ExpertOps(site, shelf).experts
        layout = site.plan.layout
        if layout.capacity_padded:
            factor = float(layout.options.get("capacity_factor", 0.0))
            return CapacityOps(site, shelf, self._tally, factor), experts
        return TransferOps(site, shelf), experts

    def perform(self, task: Task) -> float | None:
        kind = task.op.kind
        if task.stream in COMPUTE_STREAMS and kind in COMM_KINDS:
            return None  # a wait: what the executor waits for before any task is all of it
        if kind in self._compute:
            with self._site.computing():
                return self._compute[kind](task.op)
        elif kind == Kind.OPTIM:
            return self._sync.optimize(self._tally)
        elif kind == Kind.P2P:
            self._transfers.pass_on(task)
        elif kind in self._other:
            self._other[kind](task.op)
        else:
            raise ValueError(f"{kind.name} cannot be executed: only layer-level Programs can")
        return None
