"""What an allocation chooses from: ring shapes with their times and memory, priced by the CostModel.

A Shape says how deep the ring is (p), how often it is replicated (dp), how many
GPUs an attention group (m) and an expert group (n) have, and how many sequences a
micro-batch has. An Option is a Shape with the numbers the allocation weighs:

    compute   a group's own compute in a step, and its wait until the first micro-batch has come
              through the groups before it and the last gradient has gone back through them
    network   a group's dispatch and combine in one direction, by NIC rate
    memory    GiB of the fullest GPU of either pool

each for the group of a pool that takes longest, so that no step is shorter than the
largest of the times. Gradient sync, the optimizer and everything a schedule adds are
left to the step function of the local search. Prices follow disagmoe.plan.pricing;
experts of a group lie on as few nodes as hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil

from disagmoe.ops import Phase
from disagmoe.plan.memory import GIB, RECIPES, holdings, local_experts
from disagmoe.plan.plan import Batch, Layout, Placement, Worker
from disagmoe.system import Problem

MICRO_BATCHES = (1, 2, 4, 8)
FAST_GBS = 1e9
"""The NIC rate of the end that is not asked about: never the slower one."""


@dataclass(frozen=True, order=True)
class Shape:
    """A ring; the order is the last tie-break between equally good allocations."""

    p: int
    dp: int
    n: int
    m: int
    micro_batch: int

    @property
    def gpus(self) -> tuple[int, int]:
        """GPUs of both pools, attention first."""
        return self.p * self.dp * self.m, self.p * self.dp * self.n


@dataclass(frozen=True)
class Option:
    """A Shape and its numbers: seconds of a step, GiB of a GPU. Pairs have attention first.

    `network_s[pool][i]` belongs to the i-th NIC rate level of that pool.
    """

    shape: Shape
    compute_s: tuple[float, float]
    network_s: tuple[tuple[float, ...], tuple[float, ...]]
    memory_gib: tuple[float, float]

    def step_s(self, levels: tuple[int, int]) -> float:
        """Least step time at the given NIC rate levels."""
        return max(*self.compute_s, self.network_s[0][levels[0]], self.network_s[1][levels[1]])

    @property
    def floor_s(self) -> float:
        """Least step time with the fastest NICs."""
        return self.step_s((-1, -1))

    @property
    def needed_gib(self) -> float:
        return max(self.memory_gib)


MemoryOf = Callable[[Shape], tuple[float, float]]
"""GiB of the fullest attention GPU and of the fullest expert GPU of a Shape."""


@dataclass(frozen=True)
class Sizes:
    """Admissible sizes; None leaves a size free. `n` are expert-group sizes, `m` attention-group sizes."""

    p: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    n: tuple[int, ...] | None = None
    m: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("p", "dp", "n", "m", "micro_batch"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise ValueError(f"allocation sizes {name}={values}: at least one, all at least 1")


def shapes(problem: Problem, sizes: Sizes | None = None, *, all_m: bool = False) -> Iterator[Shape]:
    """Every admissible Shape of the cluster, in order.

    Where sizes are free, a larger group that gains nothing is left out: of the
    attention groups with equally many micro-batches and of the expert groups with
    equally many experts per GPU only the smallest is given (`all_m`: every m).
    """
    sizes = sizes or Sizes()
    world, model, work = problem.cluster.gpus, problem.model, problem.workload
    micro_batches = (work.micro_batch,) if work.micro_batch is not None else sizes.micro_batch or MICRO_BATCHES
    expert_sizes = sorted(set(sizes.n or _expert_sizes(problem)))
    for p in _within(sizes.p, model.layers):
        for dp in _within(sizes.dp, world // (2 * p)):
            room = world // (p * dp)
            for n in (n for n in expert_sizes if n <= min(model.experts, room - 1)):
                allowed = _within(sizes.m, room - n)
                for b in micro_batches:
                    counts: set[int] = set()
                    for m in allowed:
                        count = ceil(work.global_batch / (b * dp * m))
                        if b <= max(1, work.global_batch // (dp * m)) and (all_m or count not in counts):
                            counts.add(count)
                            yield Shape(p, dp, n, m, b)


def _within(values: tuple[int, ...] | None, most: int) -> list[int]:
    return list(range(1, most + 1)) if values is None else sorted(v for v in set(values) if v <= most)


def _expert_sizes(problem: Problem) -> list[int]:
    """The EP size asked for; where it is free, the smallest group for every number of experts per GPU."""
    experts = problem.model.experts
    if problem.ep is not None:
        return [min(problem.ep, experts)]
    return sorted({ceil(experts / per_gpu) for per_gpu in range(1, experts + 1)})


def options(
    problem: Problem,
    levels: tuple[tuple[float, ...], tuple[float, ...]],
    chosen: Iterable[Shape],
    memory: MemoryOf | None = None,
) -> tuple[Option, ...]:
    """Price Shapes at the NIC rates of `levels` (GB/s of a GPU, attention first)."""
    pricer = _Pricer(problem, levels)
    memory = memory or static_memory_of(problem)
    return tuple(pricer.option(shape, memory(shape)) for shape in chosen)


LayerKind = tuple[bool, int | None]
"""(MoE?, window)."""
Layers = tuple[tuple[LayerKind, int], ...]
"""The layers of one group by kind, with their number."""


@dataclass(frozen=True)
class _Group:
    """One end of a transfer."""

    gpus: int
    nodes: int
    nic_gbs: float


class _Pricer:
    """Times of a Shape. Layers of one kind (MoE?, window) share their prices."""

    def __init__(self, problem: Problem, levels: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
        self.problem = problem
        self.levels = levels
        model = problem.model
        self.kinds = [(model.is_moe(layer), model.window(layer)) for layer in range(model.layers)]
        self._example = {kind: layer for layer, kind in reversed(list(enumerate(self.kinds)))}
        self._attention = cache(self._attention_s)
        self._sends = cache(self._sends_s)
        self._ends = cache(self._ends_s)
        self._layers = cache(self._layers_of)

    def option(self, shape: Shape, memory_gib: tuple[float, float]) -> Option:
        work = self.problem.workload
        count = ceil(work.global_batch / (shape.micro_batch * shape.dp * shape.m))
        ffn = cache(lambda kind: self._ffn_s(kind, shape))
        own = {
            layers: (
                sum(self._attention(kind, shape.micro_batch, shape.n) * k for kind, k in layers),
                sum(ffn(kind) * k for kind, k in layers),
            )
            for layers in dict.fromkeys(self._layers(shape.p))
        }
        embed, head = self._ends(shape.micro_batch, shape.m / shape.n)
        last = (self.problem.model.layers - 1) % shape.p
        slowed = work.slowdowns([shape.m] * shape.p + [shape.n] * shape.p, shape.dp)
        busy, wait = [0.0, 0.0], 0.0
        for group, layers in enumerate(self._layers(shape.p)):
            kind = self.kinds[group]  # the group's first layer: the way to the next group goes through it
            moved = self._fastest(shape, kind)
            attention_s = own[layers][0] + (embed if group == 0 else 0.0)
            expert_s = own[layers][1] + (head if group == last else 0.0)
            busy[0] = max(busy[0], wait + count * attention_s * slowed[group])
            wait += self._attention(kind, shape.micro_batch, shape.n) + moved
            busy[1] = max(busy[1], wait + count * expert_s * slowed[shape.p + group])
            wait += ffn(kind) + moved
        return Option(
            shape=shape,
            compute_s=(busy[0], busy[1]),
            network_s=(self._network_s(shape, 0, count), self._network_s(shape, 1, count)),
            memory_gib=memory_gib,
        )

    def _fastest(self, shape: Shape, kind: LayerKind) -> float:
        """Forward and backward transfer of one layer in one direction with the fastest NICs there are."""
        copies = "experts" if kind[0] else "one"
        rates = (self.levels[0][-1], self.levels[1][-1])
        return max(
            self._sends(shape.micro_batch, 1, shape.n, 0, rates[0], copies),
            self._sends(shape.micro_batch, shape.m, shape.n, 1, rates[1], copies),
        )

    def _layers_of(self, p: int) -> list[Layers]:
        """Per group: its kinds of layers and how many of each."""
        groups = []
        for group in range(p):
            mine = self.kinds[group::p]
            groups.append(tuple((kind, mine.count(kind)) for kind in dict.fromkeys(mine)))
        return groups

    def _attention_s(self, kind: LayerKind, sequences: int, n: int) -> float:
        layer, costs = self._example[kind], self.problem.costs
        packed = costs.copy_work(self.problem.merge, n).packed
        return sum(costs.attention(layer, phase, float(sequences), packed=packed) for phase in (Phase.F, Phase.B))

    def _ffn_s(self, kind: LayerKind, shape: Shape) -> float:
        """Forward and backward of one layer on the fullest expert GPU."""
        problem = self.problem
        home = float(shape.micro_batch * problem.workload.seq) * (shape.m / shape.n)
        local = local_experts(problem.model, shape.n)
        imbalance = local * shape.n / problem.model.experts * problem.workload.skew
        rows = home * problem.model.top_k * imbalance if kind[0] else 0.0
        copies = problem.costs.copy_work(problem.merge, shape.n)
        return sum(
            problem.costs.ffn(
                self._example[kind],
                phase,
                home_tokens=home,
                rows=rows,
                local_experts=float(local),
                returned=copies.returned,
                normed=home * (copies.received(imbalance) if kind[0] else 1.0),
            )
            for phase in (Phase.F, Phase.B)
        )

    def _ends_s(self, sequences: int, spread: float) -> tuple[float, float]:
        """Embedding on an attention GPU and output head on an expert GPU, forward and backward."""
        tokens = float(sequences * self.problem.workload.seq)
        costs = self.problem.costs
        return (
            sum(costs.embed(phase, tokens) for phase in (Phase.F, Phase.B)),
            sum(costs.head(phase, tokens * spread) for phase in (Phase.F, Phase.B)),
        )

    def _network_s(self, shape: Shape, pool: int, count: int) -> tuple[float, ...]:
        """What a GPU of the busiest group exchanges with the other pool in one direction, per NIC rate."""
        m = shape.m if pool else 1  # of the attention side only its own tokens matter
        distinct = tuple(dict.fromkeys(self._layers(shape.p)))
        seconds = []
        for rate in self.levels[pool]:
            moe = self._sends(shape.micro_batch, m, shape.n, pool, rate, "experts")
            dense = self._sends(shape.micro_batch, m, shape.n, pool, rate, "one")
            busiest = max(sum((moe if kind[0] else dense) * k for kind, k in layers) for layers in distinct)
            seconds.append(count * busiest)
        return tuple(seconds)

    def _sends_s(self, sequences: int, m: int, n: int, pool: int, rate: float, copies: str) -> float:
        """Forward and backward transfer of one layer in one direction, with only one end's NICs in the way."""
        size = self.problem.cluster.gpus_per_node
        senders = _Group(m, ceil(m / size), FAST_GBS if pool else rate)
        receivers = _Group(n, ceil(n / size), rate if pool else FAST_GBS)
        transfers = (
            self.problem.costs.m2n(
                tokens=float(sequences * self.problem.workload.seq),
                senders=senders,
                receivers=receivers,
                copies=copies,
                transport=self.problem.transport,
                merge=self.problem.merge,
                phase=phase,
                combine=phase is Phase.B,
            )
            for phase in (Phase.F, Phase.B)
        )
        return sum(transfer.seconds for transfer in transfers)


def static_memory_of(problem: Problem) -> MemoryOf:
    """Weights, gradients and optimizer state of the fullest GPU of either pool; activations are not in it."""
    model = problem.model

    @cache
    def held(p: int, n: int) -> Layout:
        return _ring(problem, Shape(p, 1, n, 1, 1))

    @cache
    def parameters(p: int, n: int) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]:
        pairs = [(h.dense, h.expert) for h in holdings(held(p, n), model)]
        return tuple(pairs[:p]), tuple(pairs[p:])

    recipe = RECIPES[problem.workload.optimizer]

    def gib(dense: float, expert: float, dense_ranks: int, expert_ranks: int) -> float:
        sharded = dense / dense_ranks + expert / expert_ranks
        return ((dense + expert) * (recipe.weight + recipe.gradient) + sharded * recipe.optimizer) / GIB

    def memory(shape: Shape) -> tuple[float, float]:
        attention, expert = parameters(shape.p, shape.n)
        return (
            max(gib(d, e, shape.m * shape.dp, 1) for d, e in attention),
            max(gib(d, e, shape.n * shape.dp, shape.dp) for d, e in expert),
        )

    return memory


def _ring(problem: Problem, shape: Shape) -> Layout:
    """The placement of a Shape as far as memory depends on it: layer l on group l mod p, head with the last layer."""
    p, layers = shape.p, problem.model.layers
    workers = tuple(
        Worker(f"{pool}{group}", pool, gpus, 1, 0.0)
        for pool, gpus in (("A", shape.m), ("F", shape.n))
        for group in range(p)
    )
    placement = Placement(
        workers=workers,
        attn=tuple(layer % p for layer in range(layers)),
        ffn=tuple(p + layer % p for layer in range(layers)),
        embed=0,
        head=p + (layers - 1) % p,
        replicas=shape.dp,
    )
    batch = Batch(1, shape.micro_batch, shape.dp * shape.m)
    return Layout("disagmoe", "", placement, batch, shape.n, problem.transport, problem.merge)
