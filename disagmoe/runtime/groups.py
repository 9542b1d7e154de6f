"""From the Placement of a Plan to ranks, nodes and process groups.

Decides the numbering: replica after replica, in each one worker after the other.
Every process makes every group, in one and the same order, whether it is a member
or not: a group made by its members only hangs some of them. Groups of one rank are
not made. Exchanges and stage transfers have a group of their own per direction;
reductions share one per set of ranks, as they run one after the other on one stream.

Nodes follow from the plan (a worker's ranks lie evenly on its nodes; workers that
name the same nodes share them), or, given `node_size`, from the machine: so many
consecutive ranks each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from disagmoe.ops import SEND_STREAMS, Kind, Phase
from disagmoe.plan.plan import Placement, Plan
from disagmoe.runtime.errors import LaunchError
from disagmoe.runtime.scheduling import patient_threads
from disagmoe.runtime.transport import Clock, Link

Ranks = tuple[int, ...]


class Place(NamedTuple):
    """Where a rank is: which copy of the ring, which worker in it, which GPU of the worker."""

    replica: int
    worker: int
    local: int


class Key(NamedTuple):
    """What a group is for; unused fields are -1. See `group_specs` for the purposes."""

    purpose: str
    a: int = -1
    b: int = -1
    replica: int = -1
    block: int = -1


@dataclass(frozen=True)
class RankMap:
    """Ranks and nodes of a placement whose experts are shared by `ep` ranks of a worker."""

    placement: Placement
    ep: int
    node_size: int | None = None

    def __post_init__(self) -> None:
        for worker in {self.placement.workers[w] for w in self.placement.ffn}:
            if worker.gpus % self.ep:
                raise LaunchError(f"worker {worker.name} has {worker.gpus} ranks, which ep {self.ep} does not divide")
        if self.node_size is not None and self.node_size < 1:
            raise LaunchError(f"node_size {self.node_size}: a node holds at least 1 rank")

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        starts = [0]
        for worker in self.placement.workers:
            starts.append(starts[-1] + worker.gpus)
        return tuple(starts)

    @property
    def world_size(self) -> int:
        return self.placement.gpus_used

    def check_world(self, world_size: int) -> None:
        """Raise LaunchError unless so many processes are what the plan needs."""
        if world_size != self.world_size:
            parts = " + ".join(f"{w.name} {w.gpus}" for w in self.placement.workers)
            raise LaunchError(
                f"{world_size} processes were started, the plan needs {self.world_size}: "
                f"{self.placement.replicas} x ({parts})"
            )

    def place(self, rank: int) -> Place:
        """Where a rank is."""
        replica, inside = divmod(rank, self._starts[-1])
        worker = max(w for w, start in enumerate(self._starts[:-1]) if start <= inside)
        return Place(replica, worker, inside - self._starts[worker])

    def ranks(self, worker: int, replica: int) -> Ranks:
        """The ranks of one worker of one replica."""
        first = replica * self._starts[-1]
        return tuple(range(first + self._starts[worker], first + self._starts[worker + 1]))

    def everywhere(self, workers: Iterable[int]) -> Ranks:
        """The ranks of some workers in all replicas, ascending."""
        found = {r for w in set(workers) for i in range(self.placement.replicas) for r in self.ranks(w, i)}
        return tuple(sorted(found))

    def expert_block(self, worker: int, replica: int, block: int) -> Ranks:
        """The `ep` ranks that share the experts of a worker's layers; block 0, 1, ... of the worker."""
        return self.ranks(worker, replica)[block * self.ep : (block + 1) * self.ep]

    @cached_property
    def nodes(self) -> Mapping[int, int]:
        """Node of every rank."""
        if self.node_size is not None:
            return {rank: rank // self.node_size for rank in range(self.world_size)}
        nodes: dict[int, int] = {}
        numbers: dict[object, int] = {}
        for rank in range(self.world_size):
            place = self.place(rank)
            worker = self.placement.workers[place.worker]
            index = place.local * worker.nodes // worker.gpus
            shared: object = worker.node_ids[index] if worker.node_ids else (place.worker, index)
            nodes[rank] = numbers.setdefault((place.replica, shared), len(numbers))
        return nodes


def group_specs(ranks: RankMap, plan: Plan, *, tied: bool) -> dict[Key, Ranks]:
    """Every group of a plan, in the order in which all processes make them.

    Reductions: `worker` (a; one replica), `dense` (all ranks that hold what worker
    a holds), `expert` (a; block = index within ep: ranks that hold the same
    experts), `norm` (workers a and b share the FFN norm of their layers), `tied`
    (embedding and head), `head` (shards of a head spread by vocabulary, for a block
    of tokens), `heads` (all ranks with a shard, who share the final norm). Transfers:
    `dispatch`, `combine`, `p2p` from a to b, each with a `_back` for gradients, and
    one `_again` for what is sent a second time on streams of its own; named by the
    forward direction.
    """
    return {**_reductions(ranks, tied), **_exchanges(ranks, plan), **_stage_transfers(ranks, plan)}


def combine_target(placement: Placement, layer: int) -> int:
    """The worker that a layer's results go to; in a colocated plan the worker itself."""
    if not placement.disaggregated:
        return placement.ffn[layer]
    return placement.attn[layer + 1] if layer + 1 < len(placement.attn) else _after_last(placement)


def _after_last(placement: Placement) -> int:
    # A head that is spread starts from the rows on the last layer's own worker.
    return placement.ffn[-1] if placement.head_shards else placement.head


def _reductions(ranks: RankMap, tied: bool) -> dict[Key, Ranks]:
    placement = ranks.placement
    replicas, workers = range(placement.replicas), range(len(placement.workers))
    specs: dict[Key, Ranks] = {}
    for w in workers:
        for i in replicas:
            specs[Key("worker", w, replica=i)] = ranks.ranks(w, i)
        holders = placement.holders(w)
        if w == min(holders):
            specs[Key("dense", w)] = ranks.everywhere(holders)
            for index in range(ranks.ep if w in placement.ffn or holders[-1] in placement.ffn else 0):
                same = [r for r in ranks.everywhere(holders) if ranks.place(r).local % ranks.ep == index]
                specs[Key("expert", w, block=index)] = tuple(same)
    for a, f in sorted(set(zip(placement.attn, placement.ffn, strict=True))):
        if a != f:
            specs[Key("norm", a, f)] = ranks.everywhere((*placement.holders(a), *placement.holders(f)))
    if tied:
        ends = {w for end in (placement.embed, *placement.heads) for w in placement.holders(end)}
        specs[Key("tied")] = ranks.everywhere(ends)
    if placement.head_shards:
        specs[Key("heads")] = ranks.everywhere(placement.heads)
        for i in replicas:
            for local in range(placement.workers[placement.heads[0]].gpus):
                specs[Key("head", replica=i, block=local)] = tuple(
                    sorted(ranks.ranks(w, i)[local] for w in placement.heads)
                )
    return specs


def _exchanges(ranks: RankMap, plan: Plan) -> dict[Key, Ranks]:
    placement, program = ranks.placement, plan.program
    again = (program.phase == int(Phase.R)) & np.isin(program.stream, [int(s) for s in SEND_STREAMS])
    pairs: set[tuple[str, int, int]] = set()
    for layer, (a, f) in enumerate(zip(placement.attn, placement.ffn, strict=True)):
        for w in placement.holders(f):
            pairs.add(("dispatch", a if placement.disaggregated else w, w))
            pairs.add(("combine", w, combine_target(placement, layer) if placement.disaggregated else w))
    specs: dict[Key, Ranks] = {}
    for purpose, a, b in sorted(pairs):
        for i in range(placement.replicas):
            blocks = placement.workers[a].gpus // ranks.ep if a == b else 1
            for block in range(blocks):
                members = ranks.expert_block(a, i, block) if a == b else (*ranks.ranks(a, i), *ranks.ranks(b, i))
                resent = again & (program.kind == int(Kind[purpose.upper()]))
                for direction in (purpose, f"{purpose}_back", *([f"{purpose}_again"] if resent.any() else [])):
                    specs[Key(direction, a, b, i, block)] = tuple(sorted(members))
    return specs


def _stage_transfers(ranks: RankMap, plan: Plan) -> dict[Key, Ranks]:
    program, workers = plan.program, ranks.placement.workers
    sends = np.isin(program.stream, [int(s) for s in SEND_STREAMS]) & (program.kind == int(Kind.P2P))
    back = np.isin(program.phase, (int(Phase.B), int(Phase.I)))
    links: set[tuple[str, int, int]] = set()
    for worker, peer in zip(program.worker[sends & ~back].tolist(), program.peer[sends & ~back].tolist(), strict=True):
        links.add(("p2p", worker, peer))
    for worker, peer in zip(program.worker[sends & back].tolist(), program.peer[sends & back].tolist(), strict=True):
        links.add(("p2p_back", peer, worker))  # named by the forward direction
    specs: dict[Key, Ranks] = {}
    for purpose, a, b in sorted(links):
        if workers[a].gpus != workers[b].gpus:
            raise LaunchError(f"stages {workers[a].name} and {workers[b].name} have different numbers of ranks")
        for i in range(ranks.placement.replicas):
            for local, (one, other) in enumerate(zip(ranks.ranks(a, i), ranks.ranks(b, i), strict=True)):
                specs[Key(purpose, a, b, i, local)] = tuple(sorted((one, other)))
    return specs


class Groups:
    """The process groups of one rank. Make with `Groups.create` on every rank; end with `destroy`."""

    def __init__(self, ranks: RankMap, rank: int, device: torch.device, timeout_s: float) -> None:
        self.ranks = ranks
        self.rank = rank
        self.me = ranks.place(rank)
        self.device = device
        self.timeout_s = timeout_s
        self.clock: Clock | None = None
        """Set before the first link is made, where the run is paced."""
        self._members: dict[Key, Ranks] = {}
        self._data: dict[Key, dist.ProcessGroup] = {}
        self._control: dict[Key, dist.ProcessGroup] = {}
        self._made: list[dist.ProcessGroup] = []

    @classmethod
    def create(
        cls,
        plan: Plan,
        *,
        device: torch.device,
        timeout_s: float,
        node_size: int | None = None,
        tied: bool = False,
    ) -> Groups:
        """Make all groups of `plan`; collective over the world. Raises LaunchError where the world does not fit."""
        ranks = RankMap(plan.layout.placement, plan.layout.ep, node_size)
        ranks.check_world(dist.get_world_size())
        groups = cls(ranks, dist.get_rank(), device, timeout_s)
        specs = group_specs(ranks, plan, tied=tied)
        shared: dict[Ranks, dist.ProcessGroup] = {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        for key, members in specs.items():
            groups._members[key] = members
            if len(members) == 1:
                continue
            reduces = key.purpose in _REDUCTIONS
            if not reduces or members not in shared:
                made = groups._make(members, backend)
                if reduces:
                    shared[members] = made
            groups._data[key] = shared[members] if reduces else made
            if not reduces:
                groups._control[key] = made if backend == "gloo" else groups._make(members, "gloo")
        groups._warm_up(backend)
        dist.monitored_barrier(timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
        return groups

    def members(self, key: Key) -> Ranks:
        """The ranks of a group."""
        return self._members[key]

    def reduction(self, purpose: str, a: int = -1, b: int = -1) -> dist.ProcessGroup | None:
        """This rank's group for a reduction; None where it would be alone.

        "worker" and "dense" need no arguments (own worker), nor does "expert" (own
        experts), "tied", "head" or "heads"; "norm" takes the A- and the F-worker.
        """
        me, ep = self.me, self.ranks.ep
        canonical = min(self.ranks.placement.holders(me.worker))
        key = {
            "worker": Key("worker", me.worker, replica=me.replica),
            "dense": Key("dense", canonical),
            "expert": Key("expert", canonical, block=me.local % ep),
            "norm": Key("norm", a, b),
            "tied": Key("tied"),
            "heads": Key("heads"),
            "head": Key("head", replica=me.replica, block=me.local),
        }[purpose]
        if self.rank not in self._members[key]:
            raise LaunchError(f"rank {self.rank} is not in the {purpose} group {self._members[key]}")
        return self._data.get(key)

    def link(self, purpose: str, a: int, b: int) -> Link:
        """One direction of a transfer that this rank takes part in, from worker a to worker b (forward)."""
        block = self.me.local if purpose.startswith("p2p") else self.me.local // self.ranks.ep if a == b else 0
        key = Key(purpose, a, b, self.me.replica, block)
        return Link(
            self._members[key], self.rank, self._control.get(key), self._data.get(key), self.timeout_s, self.clock
        )

    def again(self, purpose: str, a: int, b: int) -> Link:
        """The link of what is sent a second time: one of its own where that has streams of its own."""
        apart = Key(f"{purpose}_again", a, b, self.me.replica, 0 if a != b else self.me.local // self.ranks.ep)
        return self.link(f"{purpose}_again" if apart in self._members else purpose, a, b)

    def destroy(self) -> None:
        """Give back every group (and its threads); the world group stays."""
        while self._made:
            dist.destroy_process_group(self._made.pop())

    def _make(self, members: Ranks, backend: str) -> dist.ProcessGroup:
        with patient_threads():
            group: dist.ProcessGroup = dist.new_group(
                list(members), timeout=timedelta(seconds=self.timeout_s), backend=backend
            )
        if self.rank in members:
            self._made.append(group)
        return group

    def _warm_up(self, backend: str) -> None:
        """NCCL connects at first use, which must happen in one order: here."""
        if backend == "nccl":
            for group in self._made:
                if dist.get_backend(group) == "nccl":
                    dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            torch.cuda.synchronize(self.device)


_REDUCTIONS = frozenset({"worker", "dense", "expert", "norm", "tied", "head", "heads"})
