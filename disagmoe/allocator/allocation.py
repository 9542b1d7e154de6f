"""What is decided when GPUs and NICs are divided between attention and experts, and which division is best.

Decides the order of preference, so that every search gives the same answer:

    1. the shortest bottleneck: max(compute A, compute F, NIC A, NIC F)
    2. of those as short within TOLERANCE, the fewest GPUs (the highest MFU)
    3. of those, the first Shape (p, dp, n, m, micro-batch)
    4. on nodes taken in a fixed order, later ones idle first

A search (`milp`, `exhaustive`) makes 1 to 3 and returns a Choice; `allocation`
does 4 and spells the result out. What does not fit in memory is never chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from disagmoe.allocator.nodes import NodeKind, NodeUse, Placer, node_kinds, node_uses, rate_levels
from disagmoe.allocator.options import Option, RecomputeOf, pricer
from disagmoe.allocator.shapes import MemoryOf, Shape, Sizes, shapes
from disagmoe.allocator.solvers import Infeasible
from disagmoe.system import Problem

TOLERANCE = 1e-9
"""Relative difference below which two bottlenecks count as equal."""
BINDS = ("compute A", "compute F", "NIC A", "NIC F")


@dataclass(frozen=True)
class AllocationModel:
    """Everything a search knows: nodes, the ways to use them, the NIC rates these give, options and memory.

    `price` prices a Shape anew, once more is known about what it must recompute.
    """

    kinds: tuple[NodeKind, ...]
    uses: tuple[NodeUse, ...]
    levels: tuple[tuple[float, ...], tuple[float, ...]]
    options: tuple[Option, ...]
    limit_gib: float
    mode: str = "whole_nodes"
    price: Callable[[Shape], Option] | None = field(default=None, compare=False)

    @property
    def fitting(self) -> tuple[Option, ...]:
        """Options that keep the memory limit in both pools; none where a pool has no node to be on."""
        if not all(self.levels):
            return ()
        return tuple(option for option in self.options if option.needed_gib <= self.limit_gib)


def allocation_model(
    problem: Problem,
    mode: str = "whole_nodes",
    sizes: Sizes | None = None,
    memory: MemoryOf | None = None,
    recompute: RecomputeOf | None = None,
) -> AllocationModel:
    """The model of one problem. Raises Infeasible where the cluster is too small to divide."""
    cluster = problem.cluster
    if cluster.gpus < 2:
        raise Infeasible(f"needs at least 2 GPUs for disaggregation, the cluster has {cluster.gpus}", "gpus")
    kinds = node_kinds(cluster, mode)
    uses = node_uses(kinds, mode)
    levels = rate_levels(uses)
    shared = mode == "shared_nodes" or cluster.nodes == 1
    price = pricer(problem, levels, memory, recompute, shared=shared)
    priced = tuple(map(price, shapes(problem, sizes))) if all(levels) else ()
    return AllocationModel(kinds, uses, levels, priced, cluster.limit_gib, mode, price)


@dataclass(frozen=True)
class Choice:
    """The option a search settled on. No division is faster than `bound_s`, nor than `best_s` where `proven`."""

    option: Option
    best_s: float
    bound_s: float
    proven: bool
    solver: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PoolShare:
    """What one pool gets. `nic_gbs_per_gpu` is that of its slowest GPU, each way."""

    gpus: int
    nodes: int
    nics: float
    nic_gbs_per_gpu: float
    compute_s: float
    network_s: float
    memory_gib: float


@dataclass(frozen=True)
class Allocation:
    """A division of the cluster. `nodes` holds a use per node (kinds in order), None where it stays idle."""

    shape: Shape
    attention: PoolShare
    expert: PoolShare
    nodes: tuple[NodeUse | None, ...]
    mode: str
    bound_s: float
    proven: bool
    solver: str
    notes: tuple[str, ...]

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of a step by what could bind it."""
        a, f = self.attention, self.expert
        return dict(zip(BINDS, (a.compute_s, f.compute_s, a.network_s, f.network_s), strict=True))

    @property
    def bottleneck_s(self) -> float:
        """Least step time: the longest part."""
        return max(self.parts_s.values())

    @property
    def binds(self) -> str:
        """The longest part; the first of equals."""
        return max(BINDS, key=lambda name: self.parts_s[name])

    @property
    def gpus_used(self) -> int:
        return self.attention.gpus + self.expert.gpus

    @property
    def status(self) -> str:
        """In words, with the bound where a time limit ended the search."""
        if self.proven:
            return f"optimal ({self.solver})"
        return f"feasible, not proven optimal ({self.solver}): no division is faster than {self.bound_s:.6g} s"


def needed_levels(option: Option, limit_s: float, *, strict: bool = False) -> tuple[int, int] | None:
    """The slowest NIC rate levels at which a step keeps `limit_s` (`strict`: stays below it); None if none does."""

    def kept(seconds: float) -> bool:
        return seconds < limit_s if strict else seconds <= limit_s

    if not kept(option.floor_s):
        return None
    first, second = (next(i for i, network in enumerate(option.network_s[pool]) if kept(network)) for pool in (0, 1))
    return first, second


def undominated(among: Sequence[Option]) -> list[Option]:
    """Without the options that another one beats at every NIC rate with no more GPUs in either pool.

    Such an option is neither the shortest nor equally short, so no preference is lost.
    """
    ordered = sorted(among, key=lambda o: (o.floor_s, o.shape))
    gpus = np.array([o.shape.gpus for o in ordered]).reshape(-1, 2)
    # A step is the largest of these at the rates chosen, so network that hides behind compute does not count.
    compute_s = np.array([max(o.compute_s) for o in ordered]).reshape(-1, 1)
    network_s = np.array([[*o.network_s[0], *o.network_s[1]] for o in ordered]).reshape(len(ordered), -1)
    seconds = np.maximum(compute_s, network_s)
    kept = np.zeros(len(ordered), dtype=np.int64)
    count = 0
    for i in range(len(ordered)):
        others = kept[:count]
        smaller = others[(gpus[others] <= gpus[i]).all(axis=1)]
        if not (seconds[smaller] * (1.0 + 2.0 * TOLERANCE) < seconds[i]).all(axis=1).any():
            kept[count] = i
            count += 1
    return [ordered[i] for i in kept[:count].tolist()]


def allocation(model: AllocationModel, choice: Choice) -> Allocation:
    """Place a Choice on the nodes."""
    option = choice.option
    need = needed_levels(option, choice.best_s * (1.0 + TOLERANCE))
    placer = Placer(model.kinds, model.uses)
    nodes = None
    if need is not None:
        nodes = placer.place(option.shape.gpus, (model.levels[0][need[0]], model.levels[1][need[1]]))
    if nodes is None:
        raise ValueError(f"{choice.solver} chose {option.shape}, which cannot be placed: its answer is wrong")
    pools = [_share(model, option, nodes, pool) for pool in (0, 1)]
    return Allocation(
        shape=option.shape,
        attention=pools[0],
        expert=pools[1],
        nodes=nodes,
        mode=model.mode,
        bound_s=choice.bound_s,
        proven=choice.proven,
        solver=choice.solver,
        notes=choice.notes,
    )


def _share(model: AllocationModel, option: Option, nodes: Sequence[NodeUse | None], pool: int) -> PoolShare:
    mine = [use for use in nodes if use is not None and use.gpus[pool]]
    gpus = sum(use.gpus[pool] for use in mine)
    if gpus != option.shape.gpus[pool]:
        raise ValueError(f"{gpus} GPUs were placed for pool {'AF'[pool]}, {option.shape.gpus[pool]} were asked for")
    rate = min(use.rates[pool] for use in mine)
    return PoolShare(
        gpus=gpus,
        nodes=len(mine),
        nics=float(sum(use.nics[pool] for use in mine)),
        nic_gbs_per_gpu=rate,
        compute_s=option.compute_s[pool],
        network_s=option.network_s[pool][model.levels[pool].index(rate)],
        memory_gib=option.memory_gib[pool],
    )


def why_infeasible(model: AllocationModel) -> Infeasible:
    """The limit that leaves nothing to choose, as an error to raise."""
    kinds = ", ".join(f"{k.count} nodes of {k.gpus} GPUs and {k.nics} NICs for {k.pools}" for k in model.kinds)
    if not all(model.levels):
        return Infeasible(f"nodes: mode={model.mode} leaves a pool without any ({kinds})", "nodes")
    if not model.options:
        return Infeasible("sizes: no admissible A:F sizes fit the number of GPUs, experts and sequences", "sizes")
    most = max(option.shape.gpus[0] for option in model.options)
    beside = Placer(model.kinds, model.uses).frontier((model.levels[0][0], model.levels[1][0]), most)
    placeable = [o for o in model.options if beside[o.shape.gpus[0]] >= o.shape.gpus[1]]
    if not placeable:
        return Infeasible(f"nodes: no admissible A:F sizes fit in mode={model.mode} ({kinds})", "nodes")
    least = min(placeable, key=lambda option: option.needed_gib)
    pool = "A" if least.memory_gib[0] >= least.memory_gib[1] else "F"
    return Infeasible(
        f"memory: the smallest plan needs {least.needed_gib:.1f} GiB per GPU (pool {pool}); "
        f"{model.limit_gib:.1f} GiB available",
        "memory",
        least.needed_gib,
    )
