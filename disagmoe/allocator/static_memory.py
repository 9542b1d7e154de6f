"""Memory of a ring whatever its schedule, by Shape: cheap enough to ask for thousands of them.

Decides nothing of its own: parameters come from `plan.memory`, by depth and expert
size, and only who shares the optimizer state changes with the other sizes.
"""

from __future__ import annotations

from functools import cache

from disagmoe.allocator.shapes import MemoryOf, Shape
from disagmoe.plan.memory import GIB, RECIPES, holdings
from disagmoe.plan.plan import Batch, Layout, Placement, Worker
from disagmoe.system import Problem


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
