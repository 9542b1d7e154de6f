"""Decides which GPUs and which NICs the attention and the expert groups of a ring get.

NICs belong to nodes, and three rules say how the two pools share them:

- `halves`: each pool has half of the nodes with all their NICs, however many of
  their GPUs it uses (16:10 GPUs on 16:16 NICs in the DisagMoE paper).
- `own`: the expert pool has the nodes its GPUs fill, the attention pool the rest.
- `shared_nodes`: every node of a stage holds `a` GPUs of its attention group and
  `f` of its expert group, and each pool has half of the node's NIC bandwidth (what
  the one sends the other receives, so halves balance). A stage spans k nodes: its
  groups have a k and f k GPUs. Bytes between GPUs of one node stay on NVLink. With
  k = 1 several stages may share a node; the stages of one ring do so only where the
  whole ring does, and then nothing of it crosses a NIC. It is the only rule on a
  cluster of one node.

A group is placed on as many nodes of its pool as it can have for itself; groups
smaller than a node share one, each inside it; groups that fit neither way fill the
pool's nodes one after the other, and count as spread as the worst of them. All GPUs
of a group have one NIC rate, that of the fullest node, so that no node hands out
more than it has. Nodes that differ count as the smallest of them, with the NICs per
GPU of the slowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from disagmoe.plan.plan import Worker
from disagmoe.specs import ClusterSpec

NIC_RULES = ("halves", "own", "shared_nodes")


@dataclass(frozen=True)
class Shape:
    """Sizes of a ring: depth, replicas, GPUs per A- and F-group, nodes per stage (0: pools apart), F-groups (0: p)."""

    p: int
    dp: int
    m: int
    n: int
    stage_nodes: int = 0
    p_f: int = 0

    @property
    def groups(self) -> int:
        """A-groups of all rings, and F-groups unless they are another number."""
        return self.p * self.dp

    @property
    def f_groups(self) -> int:
        """F-groups of all rings."""
        return (self.p_f or self.p) * self.dp


@dataclass(frozen=True)
class Node:
    """What can be counted on in any node: GPUs, and NIC bandwidth (GB/s, each way)."""

    gpus: int
    nic_gbs: float


def shapes(cluster: ClusterSpec, rule: str, p: int, dp: int, n: int) -> Iterator[Shape]:
    """Shapes with the most attention GPUs that the rule leaves beside p dp expert groups of n; none where it cannot."""
    node, total = _node(cluster), cluster.nodes
    if rule != "shared_nodes":
        pools = _pools(rule, node, total, p * dp * n)
        if pools is not None and pools[0] * node.gpus >= p * dp:
            yield Shape(p, dp, pools[0] * node.gpus // (p * dp), n)
        return
    for k in range(1, min(n, total // (p * dp)) + 1) if p * dp <= total else (1,):
        if n % k:
            continue
        together = {-(-p * dp // total), p * -(-dp // total)} if k == 1 else {1}  # stages per node: any, or whole rings
        for stages in sorted(together):
            if (attention := node.gpus // stages - n // k) > 0:
                yield Shape(p, dp, attention * k, n, k)


def place(cluster: ClusterSpec, rule: str, shape: Shape) -> tuple[Worker, ...] | None:
    """The workers A0..A(p-1), F0..F(p-1) of one ring, or None where the rule has no room for them."""
    node, total = _node(cluster), cluster.nodes
    if rule == "shared_nodes":
        return _place_together(node, total, shape)
    pools = _pools(rule, node, total, shape.f_groups * shape.n)
    if pools is None or shape.stage_nodes:
        return None
    workers: list[Worker] = []
    sides = (("A", shape.m, pools[0], shape.groups), ("F", shape.n, pools[1], shape.f_groups))
    for pool, gpus, nodes, groups in sides:
        if not 1 <= gpus * groups <= nodes * node.gpus:
            return None
        spread, fullest = _spread(gpus, groups, nodes, node.gpus)
        count = groups // shape.dp
        workers += [Worker(f"{pool}{i}", pool, gpus, spread, node.nic_gbs / fullest) for i in range(count)]
    return tuple(workers)


def _node(cluster: ClusterSpec) -> Node:
    return Node(cluster.gpus_per_node, cluster.nic_gbs_per_gpu() * cluster.gpus_per_node)


def _pools(rule: str, node: Node, total: int, expert_gpus: int) -> tuple[int, int] | None:
    """Nodes of the attention and of the expert pool, where pools have nodes of their own."""
    experts = total // 2 if rule == "halves" else ceil(expert_gpus / node.gpus)
    attention = experts if rule == "halves" else total - experts
    if attention < 1 or expert_gpus > experts * node.gpus:
        return None
    return attention, experts


def _spread(gpus: int, groups: int, nodes: int, size: int) -> tuple[int, int]:
    """Nodes a group lies on, and GPUs of the pool on the fullest node."""
    alone, needed = nodes // groups, ceil(gpus / size)
    if alone >= needed:
        on = min(alone, gpus)
        return on, ceil(gpus / on)
    beside = ceil(groups / nodes)
    if beside * gpus <= size:
        return 1, beside * gpus
    starts = (i * gpus for i in range(groups))
    return max((first + gpus - 1) // size - first // size + 1 for first in starts), size


def _place_together(node: Node, total: int, shape: Shape) -> tuple[Worker, ...] | None:
    k = shape.stage_nodes
    if k < 1 or shape.m % k or shape.n % k or min(shape.m, shape.n) < 1:
        return None
    a, f = shape.m // k, shape.n // k
    per_ring = shape.p * ceil(shape.dp / total)
    whole = k == 1 and per_ring * (a + f) <= node.gpus
    stages = per_ring if whole else ceil(shape.groups / total) if k == 1 else 1
    if stages * (a + f) > node.gpus or shape.groups * k > total * stages:
        return None
    ids = [(0,) if whole else tuple(range(g * k, (g + 1) * k)) for g in range(shape.p)]
    half_gbs = node.nic_gbs / 2.0
    return tuple(
        Worker(f"{pool}{g}", pool, gpus * k, k, half_gbs / (gpus * stages), ids[g])
        for pool, gpus in (("A", a), ("F", f))
        for g in range(shape.p)
    )
