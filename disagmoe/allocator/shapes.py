"""Admissible sizes of a ring: depth, replicas, GPUs per group, sequences per micro-batch.

Decides what an allocation may choose from, before anything is priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from disagmoe.system import Problem

MICRO_BATCHES = (1, 2, 4, 8)


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
