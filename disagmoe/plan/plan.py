"""Placement and Plan: where the layers live, and everything needed to run them.

A Plan is what a system hands to the simulator, the executor and the report: a
Layout (which worker holds which layer, how many GPUs and NICs a worker has, how
the batch is cut, which transport carries the tokens) and the Program itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from disagmoe.cost.comet import TileSplit
from disagmoe.plan.program import Program


@dataclass(frozen=True)
class Worker:
    """A symmetric group of GPUs that all run the same streams.

    `pool` is "A" (attention only), "F" (experts only) or "AF" (colocated).
    `gpus` counts the GPUs of the group, `nodes` the nodes they lie on, and
    `nic_gbs` is the NIC bandwidth one GPU of the group owns (GB/s, each way).
    Groups of equal `node_ids` lie evenly on the same nodes; () shares no node.
    """

    name: str
    pool: str
    gpus: int
    nodes: int
    nic_gbs: float
    node_ids: tuple[int, ...] = ()

    def shares_nodes(self, other: Worker) -> bool:
        """Both groups lie on the same nodes."""
        return bool(self.node_ids) and self.node_ids == other.node_ids


@dataclass(frozen=True)
class Placement:
    """Which worker holds what. All tuples are indexed by layer.

    `replicas` counts copies of the whole set of workers (dp of the ring). With
    `mirror` every worker w also holds what worker P-1-w of the P workers is listed
    with, for the second direction of a bidirectional pipeline: everything exists
    twice, and mirrored workers are replicas for the optimizer and the gradients.
    `head_shards` are the workers of an output head that is spread by vocabulary
    (1 / len of it each); () means that `head` holds it whole.
    """

    workers: tuple[Worker, ...]
    attn: tuple[int, ...]
    ffn: tuple[int, ...]
    embed: int
    head: int
    replicas: int = 1
    mirror: bool = False
    head_shards: tuple[int, ...] = ()

    @property
    def heads(self) -> tuple[int, ...]:
        """The workers that hold an equal part of the output head each."""
        return self.head_shards or (self.head,)

    def holders(self, worker: int) -> tuple[int, ...]:
        """The workers that hold what `worker` is listed with."""
        return (worker, len(self.workers) - 1 - worker) if self.mirror else (worker,)

    @property
    def copies(self) -> int:
        """How often every parameter exists, rank for rank."""
        return self.replicas * (2 if self.mirror else 1)

    @property
    def disaggregated(self) -> bool:
        """True where attention and experts live on different workers."""
        return any(w.pool != "AF" for w in self.workers)

    @property
    def gpus_used(self) -> int:
        return self.replicas * sum(w.gpus for w in self.workers)


@dataclass(frozen=True)
class Batch:
    """How the global batch is cut: sequences per attention rank and micro-batch."""

    microbatches: int
    sequences: int  # per attention rank and micro-batch
    data_ranks: int  # ranks that hold the same attention layer and take different sequences


@dataclass(frozen=True)
class Layout:
    """A Plan without its Program: enough to bound memory and time from below.

    `ep` ranks share the experts of a layer. `transport` names who carries
    dispatch and combine ("nccl", "deepep", "m2n_rdma"); `merge` says how copies
    of one token are merged ("none", "rank", "node"). `chunks` is the number of
    sub-operator splits of dispatch, experts and combine; `tiles` is the finer cut of
    a system whose exchange is fused with the experts (Comet). `capacity_padded`
    systems (Tutel) move and compute `load` times the mean on every rank (None: the
    maximum load) and drop `tokens_dropped` tokens per step and MoE layer; with
    `two_level` their exchange goes through the node first (2DH). With
    `serial_exchange` nothing but the experts of the same layer can run beside
    dispatch and combine, which gives the tuner a sharper lower bound. `options`
    holds the system's own choices (order, virtual stages, ...) for its program
    generator; `details` is what a table prints.
    """

    system: str
    variant: str
    placement: Placement
    batch: Batch
    ep: int
    transport: str
    merge: str
    chunks: int = 1
    tiles: TileSplit | None = None
    capacity_padded: bool = False
    load: float | None = None
    tokens_dropped: int = 0
    two_level: bool = False
    serial_exchange: bool = False
    options: Mapping[str, str | int | float] = field(default_factory=dict)
    details: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One way to run one training step of one model on one cluster."""

    layout: Layout
    program: Program
