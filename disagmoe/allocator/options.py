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

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import ceil

from disagmoe.allocator.shapes import MemoryOf, Shape
from disagmoe.allocator.static_memory import static_memory_of
from disagmoe.ops import Phase
from disagmoe.plan.memory import local_experts
from disagmoe.system import Problem

FAST_GBS = 1e9
"""The NIC rate of the end that is not asked about: never the slower one."""


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
