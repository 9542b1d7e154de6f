"""How nodes may be used: which GPUs and NICs of a node go to which pool.

Decides who owns a NIC. NICs belong to nodes; a pool's GPUs on a node share the
NICs of that node that the pool owns, and a pool is as fast as its slowest member.

    whole_nodes    a node and all its NICs belong to one pool (or stay idle)
    equal_nics     half of the nodes of every kind, with all their NICs, for each
                   pool, however many of their GPUs it uses ("half of the NICs each")
    shared_nodes   a node may hold GPUs of both; its NICs are divided between them

A cluster of one node is always shared. Nodes of any size and kind; a node with a
single NIC that is shared gives every GPU its even part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from disagmoe.specs import ClusterSpec

MODES = ("whole_nodes", "equal_nics", "shared_nodes")
POOLS = ("A", "F")


@dataclass(frozen=True, order=True)
class NodeKind:
    """`count` nodes that are alike in size and in the pools that may use them ("A", "F", "AF" or shared "A+F").

    `nic_gbs` is one NIC's bandwidth, GB/s each way.
    """

    gpus: int
    nics: int
    nic_gbs: float
    pools: str
    count: int


@dataclass(frozen=True)
class NodeUse:
    """One way to use one node of a kind: GPUs at work and NICs owned, attention first."""

    kind: int
    gpus: tuple[int, int]
    nics: tuple[Fraction, Fraction]
    rates: tuple[float, float]
    """NIC bandwidth of one GPU of either pool, GB/s each way; 0 where the pool has none here."""


def _use(index: int, kind: NodeKind, gpus: tuple[int, int], nics: tuple[Fraction, Fraction]) -> NodeUse:
    """Rates are exact until the end: equal ones are equal floats."""
    first, second = (float(n * Fraction(kind.nic_gbs) / g) if g else 0.0 for n, g in zip(nics, gpus, strict=True))
    return NodeUse(index, gpus, nics, (first, second))


def node_kinds(cluster: ClusterSpec, mode: str = "whole_nodes") -> tuple[NodeKind, ...]:
    """The cluster's nodes by kind, in an order that does not depend on how they are listed."""
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    counts: dict[tuple[int, int, float], int] = {}
    for gpus, nics, gbit in cluster.node_list:
        counts[gpus, nics, gbit / 8.0] = counts.get((gpus, nics, gbit / 8.0), 0) + 1
    shared = mode == "shared_nodes" or cluster.nodes == 1
    kinds = []
    for (gpus, nics, gbs), count in sorted(counts.items(), reverse=True):
        if mode == "equal_nics" and not shared:
            parts = [("A", count // 2), ("F", count // 2)]
        else:
            parts = [("A+F" if shared else "AF", count)]
        kinds += [NodeKind(gpus, nics, gbs, pools, number) for pools, number in parts if number]
    return tuple(kinds)


def node_uses(kinds: Sequence[NodeKind], mode: str = "whole_nodes") -> tuple[NodeUse, ...]:
    """Every way to use a node of any kind (idle left out), in a fixed order."""
    uses = []
    for index, kind in enumerate(kinds):
        for pool in (0, 1):
            if POOLS[pool] in kind.pools:
                uses += [_whole(index, kind, pool, gpus) for gpus in range(1, kind.gpus + 1)]
        if "+" in kind.pools:
            uses += _shared(index, kind, mode)
    return tuple(uses)


def _whole(index: int, kind: NodeKind, pool: int, gpus: int) -> NodeUse:
    owned = Fraction(kind.nics)
    if pool == 0:
        return _use(index, kind, (gpus, 0), (owned, Fraction(0)))
    return _use(index, kind, (0, gpus), (Fraction(0), owned))


def _shared(index: int, kind: NodeKind, mode: str) -> list[NodeUse]:
    return [
        _use(index, kind, (first, second), nics)
        for first in range(1, kind.gpus)
        for second in range(1, kind.gpus - first + 1)
        for nics in _divisions(kind, mode, first, second)
    ]


def _divisions(kind: NodeKind, mode: str, first: int, second: int) -> list[tuple[Fraction, Fraction]]:
    """NICs of a shared node for either pool; together never more than the node has."""
    if mode == "equal_nics":
        return [(Fraction(kind.nics, 2), Fraction(kind.nics, 2))]
    if kind.nics == 1:  # nothing to hand out: every GPU keeps its part
        return [(Fraction(first, kind.gpus), Fraction(second, kind.gpus))]
    return [(Fraction(n), Fraction(kind.nics - n)) for n in range(1, kind.nics)]


def rate_levels(uses: Sequence[NodeUse]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The NIC rates that a GPU of either pool can have, ascending."""
    first, second = (tuple(sorted({use.rates[pool] for use in uses if use.gpus[pool]})) for pool in (0, 1))
    return first, second


class Placer:
    """Whether pools of given sizes fit on the nodes at given NIC rates, and where they go.

    Exact: nodes are taken one by one, and for every number of attention GPUs
    placed so far only the largest number of expert GPUs is kept.
    """

    def __init__(self, kinds: Sequence[NodeKind], uses: Sequence[NodeUse]) -> None:
        self.kinds = tuple(kinds)
        self._uses = tuple(uses)
        self._nodes = [index for index, kind in enumerate(kinds) for _ in range(kind.count)]

    def frontier(self, rates: tuple[float, float], most: int) -> NDArray[np.int64]:
        """For 0 to `most` attention GPUs at rates[0]: expert GPUs that fit beside them at rates[1]; -1: none fit."""
        return self._layers(rates, most)[-1]

    def place(self, gpus: tuple[int, int], rates: tuple[float, float]) -> tuple[NodeUse | None, ...] | None:
        """A use per node (kinds in order, None: idle) for pools of `gpus` GPUs at `rates` or more; None if none fits.

        Later nodes stay idle before earlier ones, and the GPUs of a node are used
        up before the next node is.
        """
        layers = self._layers(rates, gpus[0])
        if layers[-1][gpus[0]] < gpus[1]:
            return None
        left_a, left_f = gpus
        chosen: list[NodeUse | None] = []
        for index in range(len(self._nodes) - 1, -1, -1):
            before = layers[index]
            for use in (None, *self._choices(self._nodes[index], rates)):
                took = (0, 0) if use is None else use.gpus
                a, f = max(left_a - took[0], 0), max(left_f - took[1], 0)
                if before[a] >= f:
                    chosen.append(self._trimmed(use, (min(took[0], left_a), min(took[1], left_f)), rates))
                    left_a, left_f = a, f
                    break
        return tuple(reversed(chosen))

    def _layers(self, rates: tuple[float, float], most: int) -> list[NDArray[np.int64]]:
        """frontier() after no node, after the first, after the first two, ..."""
        best = np.full(most + 1, -1, dtype=np.int64)
        best[0] = 0
        layers = [best]
        choices = {kind: self._choices(kind, rates) for kind in set(self._nodes)}
        for node in self._nodes:
            after = best.copy()
            for use in choices[node]:
                a, f = use.gpus
                reached = np.where(best >= 0, best + f, -1)
                if a <= most:
                    np.maximum(after[a:], reached[: most + 1 - a], out=after[a:])
                beyond = reached[max(0, most - a + 1) :]  # the node could hold more than is asked for
                after[most] = max(int(after[most]), int(beyond.max(initial=-1)))
            best = after
            layers.append(best)
        # A node holds fewer attention GPUs than it could: what fits beside more fits beside fewer.
        return [np.maximum.accumulate(layer[::-1])[::-1] for layer in layers]

    def _choices(self, kind: int, rates: tuple[float, float]) -> list[NodeUse]:
        """The uses of a node of this kind that keep the rates, without those that another one covers."""
        best: list[NodeUse] = []
        for use in sorted(self._of_kind(kind, rates), key=lambda u: (-u.gpus[0], -u.gpus[1], u.nics)):
            if not any(use.gpus[1] <= other.gpus[1] for other in best):
                best.append(use)
        return best

    def _of_kind(self, kind: int, rates: tuple[float, float]) -> list[NodeUse]:
        """The uses of a node of this kind that keep the rates."""
        return [
            use
            for use in self._uses
            if use.kind == kind
            and all(not gpus or rate >= least for gpus, rate, least in zip(use.gpus, use.rates, rates, strict=True))
        ]

    def _trimmed(self, use: NodeUse | None, gpus: tuple[int, int], rates: tuple[float, float]) -> NodeUse | None:
        """The same node with only the GPUs that are still needed, its NICs divided as before where that is possible."""
        if use is None or use.gpus == gpus:
            return use
        fit = [u for u in self._of_kind(use.kind, rates) if u.gpus == gpus]
        return next((u for u in fit if u.nics == use.nics), fit[0])
