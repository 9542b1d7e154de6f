"""Random allocation models, and the plainest possible search: every use of every node."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import strategies as st

from disagmoe.allocator.allocation import AllocationModel
from disagmoe.allocator.nodes import node_kinds, node_uses, rate_levels
from disagmoe.allocator.options import Option
from disagmoe.allocator.shapes import Shape
from disagmoe.specs import ClusterSpec, NodeGroup

LIMIT_GIB = 50.0


def cluster_of(*groups: NodeGroup) -> ClusterSpec:
    return ClusterSpec(
        name="random", device="H800", groups=groups, nvlink_gbs=200.0, memory_gib=79.6, calibration="h800"
    )


@dataclass(frozen=True)
class Instance:
    cluster: ClusterSpec
    mode: str
    model: AllocationModel


@st.composite
def instances(draw: st.DrawFn, nodes: int = 3, gpus: int = 4) -> Instance:
    """A cluster of up to `nodes` nodes, and up to ten options with times that are often equal."""
    number = draw(st.sampled_from([1, *range(2, nodes + 1), *range(2, nodes + 1)]))
    kind = st.tuples(st.integers(1, gpus), st.integers(1, 3), st.sampled_from([200.0, 400.0]))
    kinds = draw(st.lists(kind, min_size=1, max_size=2))
    groups = [NodeGroup(1, *draw(st.sampled_from(kinds))) for _ in range(number)]
    cluster = cluster_of(*groups)
    mode = draw(st.sampled_from(["whole_nodes", "equal_nics", "shared_nodes"]))
    found = node_kinds(cluster, mode)
    uses = node_uses(found, mode)
    levels = rate_levels(uses)
    most = max(1, cluster.gpus - 1)
    sizes = st.builds(
        Shape,
        p=st.sampled_from([1, 1, 1, 2]),
        dp=st.sampled_from([1, 1, 2]),
        n=st.integers(1, most),
        m=st.integers(1, most),
        micro_batch=st.sampled_from([1, 2]),
    )
    placeable = sizes.filter(lambda shape: sum(shape.gpus) <= cluster.gpus or cluster.gpus < 2)
    shapes = (
        draw(st.lists(placeable, min_size=3, max_size=10, unique=True)) if cluster.gpus > 3 else [Shape(1, 1, 1, 1, 1)]
    )
    # Few distinct values make many ties; 0.1 has no exact binary form.
    seconds = st.integers(1, 6).map(lambda k: 0.1 * k)
    options = tuple(
        Option(
            shape=shape,
            compute_s=(draw(seconds), draw(seconds)),
            network_s=(_network(draw(seconds), levels[0]), _network(draw(seconds), levels[1])),
            memory_gib=(draw(st.sampled_from([10.0, 10.0, 10.0, 60.0])), draw(st.sampled_from([10.0, 50.0]))),
        )
        for shape in shapes
    )  # fmt: skip
    return Instance(cluster, mode, AllocationModel(found, uses, levels, options, LIMIT_GIB, mode))


def _network(seconds: float, levels: tuple[float, ...]) -> tuple[float, ...]:
    """Time by rate: `seconds` at 100 GB/s, with a part that no rate shortens."""
    return tuple(max(0.2, seconds * 100.0 / level) for level in levels)


Pool = tuple[int, float]
"""GPUs, and the rate of the slowest (infinite where there are none)."""


def node_states(gpus: int, nics: int, gbs: float, mode: str, single: bool, side: str) -> list[tuple[Pool, Pool]]:
    """What a node can contribute, written without a look at disagmoe.allocator.nodes."""
    nothing = (0, float("inf"))
    states: list[tuple[Pool, Pool]] = [(nothing, nothing)]
    for used in range(1, gpus + 1):
        if side in ("A", "either"):
            states.append(((used, nics * gbs / used), nothing))
        if side in ("F", "either"):
            states.append((nothing, (used, nics * gbs / used)))
    if not (single or mode == "shared_nodes"):
        return states
    for a, f in itertools.product(range(1, gpus), repeat=2):
        if a + f > gpus:
            continue
        if mode == "equal_nics":
            owned = [(Fraction(nics, 2), Fraction(nics, 2))]
        elif nics == 1:
            owned = [(Fraction(a, gpus), Fraction(f, gpus))]
        else:
            owned = [(Fraction(k), Fraction(nics - k)) for k in range(1, nics)]
        states += [((a, float(x * Fraction(gbs) / a)), (f, float(y * Fraction(gbs) / f))) for x, y in owned]
    return states


def every_division(instance: Instance) -> set[tuple[Pool, Pool]]:
    """(GPUs, slowest rate) of both pools for every combination of node states."""
    nodes = instance.cluster.node_list
    sides = ["either"] * len(nodes)
    if instance.mode == "equal_nics" and len(nodes) > 1:
        for kind in set(nodes):
            members = [i for i, node in enumerate(nodes) if node == kind]
            half = len(members) // 2
            for position, i in enumerate(members):
                sides[i] = "A" if position < half else "F" if position < 2 * half else "none"
    reached: set[tuple[Pool, Pool]] = {((0, float("inf")), (0, float("inf")))}
    for (gpus, nics, gbit), side in zip(nodes, sides, strict=True):
        states = node_states(gpus, nics, gbit / 8.0, instance.mode, len(nodes) == 1, side)
        reached = {
            ((a + x, min(rate_a, s)), (f + y, min(rate_f, t)))
            for (a, rate_a), (f, rate_f) in reached
            for (x, s), (y, t) in states
        }
    return reached


def best_by_hand(instance: Instance) -> tuple[float, Shape] | None:
    """The shortest time and the preferred shape; None where nothing fits."""
    levels = instance.model.levels
    times: dict[Shape, float] = {}
    for (a, rate_a), (f, rate_f) in every_division(instance):
        for option in instance.model.options:
            if option.shape.gpus != (a, f) or max(option.memory_gib) > LIMIT_GIB:
                continue
            network = (option.network_s[0][levels[0].index(rate_a)], option.network_s[1][levels[1].index(rate_f)])
            seconds = max(*option.compute_s, *network)
            times[option.shape] = min(times.get(option.shape, float("inf")), seconds)
    if not times:
        return None
    least = min(times.values())
    equal = [shape for shape, seconds in times.items() if seconds <= least * (1 + 1e-9)]
    return least, min(equal, key=lambda s: (sum(s.gpus), s))
