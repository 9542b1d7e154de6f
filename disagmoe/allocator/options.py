"""What an allocation chooses from: ring shapes with their times and memory, priced by the CostModel.

A Shape says how deep the ring is (p), how often it is replicated (dp), how many
GPUs an attention group (m) and an expert group (n) have, and how many sequences a
micro-batch has. An Option is a Shape with the numbers the allocation weighs:

    compute   a group's own compute in a step, what it must recompute included, and its wait until the
              first micro-batch has come through the groups before it and the last gradient has gone
              back through them
    network   a group's dispatch and combine in one direction, and tokens sent again, by NIC rate
    memory    GiB of the fullest GPU of either pool

each for the group of a pool that takes longest, so that no step is shorter than the
largest of the times. Gradient sync, the optimizer and everything a schedule adds are
left to the step function of the local search. Prices follow disagmoe.plan.pricing;
experts of a group lie on as few nodes as hold it. Where nodes hold GPUs of both pools,
an attention group and the experts of its layers are taken to share as few nodes as
hold both: what stays on a node crosses NVLink only, the rest NICs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import ceil

from disagmoe.allocator.shapes import MemoryOf, Shape
from disagmoe.allocator.static_memory import static_memory_of
from disagmoe.cost.recompute import NO_RECOMPUTE, Recompute
from disagmoe.ops import Kind, Phase
from disagmoe.plan.memory import local_experts
from disagmoe.system import Problem

RecomputeOf = Callable[[Shape], Recompute]
"""What a plan of a Shape must recompute to fit, as far as is known."""
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


def pricer(
    problem: Problem,
    levels: tuple[tuple[float, ...], tuple[float, ...]],
    memory: MemoryOf | None = None,
    recompute: RecomputeOf | None = None,
    *,
    shared: bool = False,
) -> Callable[[Shape], Option]:
    """Prices Shapes at the NIC rates of `levels` (GB/s of a GPU, attention first).

    `shared`: nodes may hold GPUs of both pools.
    """
    prices = _Pricer(problem, levels, shared)
    memory, recompute = memory or static_memory_of(problem), recompute or (lambda shape: NO_RECOMPUTE)
    return lambda shape: prices.option(shape, memory(shape), recompute(shape))


def options(
    problem: Problem,
    levels: tuple[tuple[float, ...], tuple[float, ...]],
    chosen: Iterable[Shape],
    memory: MemoryOf | None = None,
) -> tuple[Option, ...]:
    """Shapes priced without recompute, pools on nodes of their own."""
    return tuple(map(pricer(problem, levels, memory), chosen))


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


@dataclass(frozen=True)
class _Place:
    """Nodes an expert group lies on, and the shares of dispatch and combine that cross no NIC."""

    nodes: int
    dispatch_local: float
    combine_local: float


_PHASES = (Phase.F, Phase.B)


class _Pricer:
    """Times of a Shape. Layers of one kind (MoE?, window) share their prices."""

    def __init__(
        self, problem: Problem, levels: tuple[tuple[float, ...], tuple[float, ...]], shared: bool = False
    ) -> None:
        self.problem = problem
        self.levels = levels
        self.shared = shared
        model = problem.model
        self.kinds = [(model.is_moe(layer), model.window(layer)) for layer in range(model.layers)]
        self._example = {kind: layer for layer, kind in reversed(list(enumerate(self.kinds)))}
        self._attention = cache(self._attention_s)
        self._sends = cache(self._sends_s)
        self._ends = cache(self._ends_s)
        self._layers = cache(self._layers_of)

    def option(self, shape: Shape, memory_gib: tuple[float, float], redone: Recompute) -> Option:
        work = self.problem.workload
        count = ceil(work.global_batch / (shape.micro_batch * shape.dp * shape.m))
        ffn = cache(lambda kind: self._ffn_s(kind, shape, redone))
        passed = cache(lambda kind: self._ffn_s(kind, shape, NO_RECOMPUTE))
        own = {
            layers: (
                sum(self._attention(kind, shape.micro_batch, shape.n, redone) * k for kind, k in layers),
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
            # A repeat may be done while the gradient is still on its way: it is work, no waiting.
            wait += self._attention(kind, shape.micro_batch, shape.n, NO_RECOMPUTE) + moved
            busy[1] = max(busy[1], wait + count * expert_s * slowed[shape.p + group])
            wait += passed(kind) + moved
        return Option(
            shape=shape,
            compute_s=(busy[0], busy[1]),
            network_s=(self._network_s(shape, 0, count, redone), self._network_s(shape, 1, count, redone)),
            memory_gib=memory_gib,
        )

    def _fastest(self, shape: Shape, kind: LayerKind) -> float:
        """Forward and backward transfer of one layer in one direction with the fastest NICs there are."""
        copies, place = "experts" if kind[0] else "one", self._place(shape)
        rates = (self.levels[0][-1], self.levels[1][-1])
        return max(
            self._sends(shape.micro_batch, 1, shape.n, 0, rates[0], copies, place, False),
            self._sends(shape.micro_batch, shape.m, shape.n, 1, rates[1], copies, place, False),
        )

    def _place(self, shape: Shape) -> _Place:
        """Where the experts of a group lie, and which of its transfers stay on a node."""
        size = self.problem.cluster.gpus_per_node
        if not self.shared:
            return _Place(ceil(shape.n / size), 0.0, 0.0)
        ring = shape.p * (shape.m + shape.n)
        if ring <= size:
            return _Place(1, 1.0, 1.0)
        nodes = min(shape.n, ceil((shape.m + shape.n) / size))
        # The next layer's attention is elsewhere, but in a ring of one group.
        return _Place(nodes, 1.0 / nodes, 1.0 / nodes if shape.p == 1 else 0.0)

    def _layers_of(self, p: int) -> list[Layers]:
        """Per group: its kinds of layers and how many of each."""
        groups = []
        for group in range(p):
            mine = self.kinds[group::p]
            groups.append(tuple((kind, mine.count(kind)) for kind in dict.fromkeys(mine)))
        return groups

    def _attention_s(self, kind: LayerKind, sequences: int, n: int, redone: Recompute) -> float:
        layer, costs = self._example[kind], self.problem.costs
        packed = costs.copy_work(self.problem.merge, n).packed
        phases = (*_PHASES, Phase.R) if Kind.ATTN in redone.repeated(disaggregated=True) else _PHASES
        seconds = sum(costs.attention(layer, phase, float(sequences), packed=packed) for phase in phases)
        return seconds + costs.attention_redone(layer, float(sequences), redone)

    def _ffn_s(self, kind: LayerKind, shape: Shape, redone: Recompute) -> float:
        """Forward, backward and repeat of one layer on the fullest expert GPU."""
        problem = self.problem
        home = float(shape.micro_batch * problem.workload.seq) * (shape.m / shape.n)
        local = local_experts(problem.model, shape.n)
        imbalance = local * shape.n / problem.model.experts * problem.workload.skew
        rows = home * problem.model.top_k * imbalance if kind[0] else 0.0
        copies = problem.costs.copy_work(problem.merge, shape.n)
        phases = (*_PHASES, Phase.R) if Kind.FFN in redone.repeated(disaggregated=True) else _PHASES
        seconds = sum(
            problem.costs.ffn(
                self._example[kind],
                phase,
                home_tokens=home,
                rows=rows,
                local_experts=float(local),
                returned=copies.returned,
                normed=home * (copies.received(imbalance) if kind[0] else 1.0),
            )
            for phase in phases
        )
        return seconds + problem.costs.experts_redone(rows, redone)

    def _ends_s(self, sequences: int, spread: float) -> tuple[float, float]:
        """Embedding on an attention GPU and output head on an expert GPU, forward and backward."""
        tokens = float(sequences * self.problem.workload.seq)
        costs = self.problem.costs
        return (
            sum(costs.embed(phase, tokens) for phase in (Phase.F, Phase.B)),
            sum(costs.head(phase, tokens * spread) for phase in (Phase.F, Phase.B)),
        )

    def _network_s(self, shape: Shape, pool: int, count: int, redone: Recompute) -> tuple[float, ...]:
        """What a GPU of the busiest group exchanges with the other pool in one direction, per NIC rate."""
        m = shape.m if pool else 1  # of the attention side only its own tokens matter
        distinct = tuple(dict.fromkeys(self._layers(shape.p)))
        place, again = self._place(shape), Kind.DISPATCH in redone.repeated(disaggregated=True)
        seconds = []
        for rate in self.levels[pool]:
            moe = self._sends(shape.micro_batch, m, shape.n, pool, rate, "experts", place, again)
            dense = self._sends(shape.micro_batch, m, shape.n, pool, rate, "one", place, again)
            busiest = max(sum((moe if kind[0] else dense) * k for kind, k in layers) for layers in distinct)
            seconds.append(count * busiest)
        return tuple(seconds)

    def _sends_s(
        self, sequences: int, m: int, n: int, pool: int, rate: float, copies: str, place: _Place, again: bool
    ) -> float:
        """Dispatch and gradient of the combine of one layer, with only one end's NICs in the way.

        `again`: the tokens are sent once more for the repeated forward.
        """
        size = self.problem.cluster.gpus_per_node
        senders = _Group(m, ceil(m / size), FAST_GBS if pool else rate)
        receivers = _Group(n, place.nodes, rate if pool else FAST_GBS)
        dispatch_local = place.dispatch_local
        if copies == "one" and dispatch_local:  # a dense layer's tokens stay where they are
            dispatch_local = 1.0
        sent = [(Phase.F, False, dispatch_local), (Phase.B, True, place.combine_local)]
        if again:
            sent.append((Phase.R, False, dispatch_local))
        return sum(
            self.problem.costs.m2n(
                tokens=float(sequences * self.problem.workload.seq),
                senders=senders,
                receivers=receivers,
                copies=copies,
                transport=self.problem.transport,
                merge=self.problem.merge,
                phase=phase,
                combine=combine,
                local=local,
            ).seconds
            for phase, combine, local in sent
        )
