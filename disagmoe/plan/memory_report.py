"""Decides what a plan's GPUs hold, by component: the report, its peak, and a bound before there is a Program.

A Layout says what one GPU handles (tokens, expert rows, copies on the wire);
`cost.memory` says what that costs in bytes; `memory_timeline` integrates it over
the Program. Communicators count towards the peak and stay apart from
`allocated_gib`, which is what an allocator would report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.memory import LOSS_CHUNK_TOKENS
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Kind, Phase
from disagmoe.plan.memory import (
    GIB,
    RECIPES,
    Recipe,
    StaticMemory,
    held_layers,
    static_gib,
    static_memory,
)
from disagmoe.plan.memory_load import in_frames, worker_bytes
from disagmoe.plan.memory_tables import DYNAMIC, WorkerBytes
from disagmoe.plan.memory_timeline import Levels, levels, peak_bytes
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.specs import ModelSpec, Workload

FloatArray = NDArray[np.float64]

STATIC = ("weights", "gradients", "optimizer", "workspace", "communicators")
COMPONENTS = (*STATIC, *DYNAMIC)
"""Components of a worker's memory, in the order of tables and pictures; they add up to its peak."""


@dataclass(frozen=True)
class WorkerMemory:
    """One GPU of one worker: GiB by component (COMPONENTS) at its peak."""

    name: str
    pool: str
    gpus: int
    at_peak: Mapping[str, float]

    @property
    def peak_gib(self) -> float:
        """All components together."""
        return sum(self.at_peak.values())

    @property
    def allocated_gib(self) -> float:
        """What torch.cuda.max_memory_allocated would say: all but communicators."""
        return self.peak_gib - self.at_peak["communicators"]


@dataclass(frozen=True, eq=False)
class MemoryReport:
    """Memory of one GPU of every worker, at its peak and over the step.

    `unit` says what `curve` is over: "operations" (the worker's compute order) or
    "seconds". `static[w]` [GiB] is what a worker holds all the time.
    """

    workers: tuple[WorkerMemory, ...]
    static: tuple[StaticMemory, ...]
    levels: Levels
    unit: str

    @cached_property
    def peaks_gib(self) -> tuple[float, ...]:
        """Peak of every worker; what `plan.verify` compares with the limit."""
        return tuple(w.peak_gib for w in self.workers)

    @property
    def peak_gib(self) -> float:
        """Peak of the fullest GPU."""
        return max(self.peaks_gib)

    @property
    def fullest(self) -> WorkerMemory:
        """The worker with the highest peak, the first of equals."""
        return max(self.workers, key=lambda w: w.peak_gib)

    def curve(self, worker: int) -> tuple[FloatArray, FloatArray]:
        """(place of every event, GiB held after it by component [len(COMPONENTS), events]) of one worker."""
        low, high = int(self.levels.first[worker]), int(self.levels.first[worker + 1])
        fixed = np.array(list(self.static[worker].parts.values()))
        held_gib = np.empty((len(COMPONENTS), high - low))
        held_gib[: len(STATIC)] = fixed[:, None]
        held_gib[len(STATIC) :] = self.levels.nbytes[:, low:high] / GIB
        return self.levels.where[low:high], held_gib

    def table(self) -> list[dict[str, str | int | float]]:
        """One row per worker: name, pool, gpus, peak_gib and every component, for tables and JSON."""
        return [
            {"worker": w.name, "pool": w.pool, "gpus": w.gpus, "peak_gib": w.peak_gib, **w.at_peak}
            for w in self.workers
        ]


def memory_report(
    layout: Layout,
    program: Program,
    model: ModelSpec,
    workload: Workload,
    *,
    recompute: Recompute | None = None,
    optimizer: str | Recipe | None = None,
    loss_chunk: int | None = LOSS_CHUNK_TOKENS,
    start_s: FloatArray | None = None,
    end_s: FloatArray | None = None,
) -> MemoryReport:
    """What one GPU of every worker holds while this Program runs.

    `recompute` defaults to the Layout's options. `optimizer` names a recipe of
    RECIPES (default: the workload's). `loss_chunk` are the tokens whose logits exist at once (None: all).
    `start_s` and `end_s` [rows] place every buffer in time (a Timeline's); without
    them the order of the compute streams does.
    """
    policy = Recompute.of(layout.options) if recompute is None else recompute
    _check_policy(layout, program, policy)
    recipe = _recipe(workload.optimizer if optimizer is None else optimizer)
    fixed = static_memory(layout, model, program, recipe)
    moe = [model.is_moe(layer) for layer in range(model.layers)]
    frames = in_frames(layout, program)
    dynamic = levels(
        program,
        worker_bytes(layout, model, workload, policy, frames=frames, loss_chunk=loss_chunk, step=recipe.step),
        moe,
        policy,
        frames=frames,
        start_s=start_s,
        end_s=end_s,
    )
    workers = []
    for index, worker in enumerate(layout.placement.workers):
        event = dynamic.peak_event(index)
        moving = dynamic.nbytes[:, event] / GIB if event >= 0 else np.zeros(len(DYNAMIC))
        at_peak = {**fixed[index].parts, **dict(zip(DYNAMIC, moving.tolist(), strict=True))}
        workers.append(WorkerMemory(worker.name, worker.pool, worker.gpus, at_peak))
    return MemoryReport(tuple(workers), fixed, dynamic, "operations" if start_s is None else "seconds")


def peak_gib(
    layout: Layout,
    program: Program,
    model: ModelSpec,
    workload: Workload,
    *,
    optimizer: str | Recipe | None = None,
    start_s: FloatArray | None = None,
    end_s: FloatArray | None = None,
) -> float:
    """Peak of the fullest GPU: `memory_report(...).peak_gib` without what a report adds. Linear in rows."""
    policy = Recompute.of(layout.options)
    _check_policy(layout, program, policy)
    recipe = _recipe(workload.optimizer if optimizer is None else optimizer)
    fixed = static_memory(layout, model, program, recipe)
    moe = [model.is_moe(layer) for layer in range(model.layers)]
    frames = in_frames(layout, program)
    held_bytes = worker_bytes(layout, model, workload, policy, frames=frames, step=recipe.step)
    moving = peak_bytes(program, held_bytes, moe, policy, frames=frames, start_s=start_s, end_s=end_s)
    peaks: list[float] = [part.total_gib + nbytes / GIB for part, nbytes in zip(fixed, moving.tolist(), strict=True)]
    return max(peaks)


def lower_bound_gib(
    layout: Layout, model: ModelSpec, workload: Workload, *, optimizer: str | Recipe | None = None
) -> float:
    """What no Program of this Layout can go below: static memory and what must be in flight.

    Every schedule passes through a moment at which a micro-batch has run all its
    forwards and none of its backwards, so every worker holds what its layers keep.
    A system that knows more says so in the option `in_flight_<worker>`: the layers
    (of a pool's worker, its side of them) that its order makes this worker hold at once.
    """
    policy = Recompute.of(layout.options)
    recipe = _recipe(workload.optimizer if optimizer is None else optimizer)
    nbytes = worker_bytes(layout, model, workload, policy, frames=False)
    fixed, counts = static_gib(layout, model, recipe), held_layers(layout, model)
    same: dict[int, list[int]] = {}
    for index, of in enumerate(nbytes):
        same.setdefault(id(of), []).append(index)
    kept = np.empty(len(nbytes))
    for workers in same.values():
        at = slice(None) if len(workers) == len(nbytes) else workers
        kept[at] = _kept_bytes(nbytes[workers[0]], policy, counts[..., at], _at_once(layout, workers))
    return float((fixed + kept / GIB).max())


def _at_once(layout: Layout, workers: Sequence[int]) -> FloatArray:
    """Layers that a planner knows its order to make each of these workers hold; 0 where it says nothing."""
    names = [f"in_flight_{layout.placement.workers[index].name}" for index in workers]
    return np.array([float(layout.options.get(name, 0.0)) for name in names])


def _kept_bytes(of: WorkerBytes, policy: Recompute, counts: NDArray[np.int64], at_once: FloatArray) -> FloatArray:
    """Bytes that workers of one sort keep, [workers]; `counts` [sides, (dense, MoE), workers] are their layers."""
    kept, once, least = np.zeros(at_once.shape), np.zeros(at_once.shape), np.full(at_once.shape, np.inf)
    for layer, there in zip(of.layers, (counts[:, 0], counts[:, 1]), strict=True):
        attention = layer.attention.kept if policy.attention == "full" else layer.attention.saved
        experts = layer.ffn.kept if policy.ffn == "full" else layer.ffn.saved
        kept += attention * there[0] + experts * there[1]
        once += there.max(axis=0)
        whole = attention * (there[0] > 0) + experts * (there[1] > 0)
        least = np.where(there.any(axis=0), np.minimum(least, whole), least)
    more = np.where((at_once > once) & (once > 0.0), at_once - once, 0.0)
    kept += more * np.where(more > 0.0, least, 0.0)
    return kept


def _check_policy(layout: Layout, program: Program, policy: Recompute) -> None:
    """What the policy repeats must be in the Program: otherwise nothing would hold what it drops."""
    wanted, sample = policy.repeated(disaggregated=layout.placement.disaggregated), program.sorts.sample
    there, found = (
        {Kind(k) for k in np.flatnonzero(np.bincount(kinds)).tolist()}
        for kinds in (sample.kind, sample.kind[sample.phase == int(Phase.R)])
    )
    if found != wanted & there:
        names = [", ".join(sorted(k.name for k in kinds)) or "nothing" for kinds in (wanted & there, found)]
        raise ValueError(f"recompute of {layout.system}: the policy repeats {names[0]}, its Program repeats {names[1]}")


def _recipe(optimizer: str | Recipe) -> Recipe:
    if isinstance(optimizer, Recipe):
        return optimizer
    if optimizer not in RECIPES:
        raise ValueError(f"optimizer={optimizer!r}: allowed are {', '.join(RECIPES)}")
    return RECIPES[optimizer]
