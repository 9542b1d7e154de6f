"""How deep a model may be so that everything compared fits, and where the answer is kept.

`depth=common` is the most layers of a model at which every shipped system fits, at
every length from 4K to 32K: computed once per model, cluster and calibration,
whatever systems and length are asked for, so that tables at a common depth can be
held beside each other. `depth=fitting` is the most layers at which every point of
one study fits. What cannot run at all, whatever its memory, does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baselines.registry import SHIPPED, get_system
from bench import disk_cache
from bench.identity import ROOT, source_digest
from bench.simulated import Simulated
from bench.transports import MERGE_OF_TRANSPORT
from disagmoe.allocator.fitting import fits
from disagmoe.cost.calibration import Calibration
from disagmoe.cost.model import CostModel
from disagmoe.specs import ClusterSpec, ModelSpec, Workload, default_global_batch
from disagmoe.system import Problem, System

SEQUENCES = (32768, 16384, 8192, 4096)
"""Lengths that must fit; the longest first, as it refuses most."""
CACHE = disk_cache.CACHE / "depth"


def common_depth(
    model: ModelSpec,
    cluster: ClusterSpec,
    calibration: Calibration,
    ep: int | None,
    optimizer: str = "megatron",
    *,
    cache: Path | None = CACHE,
    say: Callable[[str], None] | None = None,
) -> int:
    """The common depth in layers. Raises ValueError where not even two layers fit."""

    def find() -> int:
        if say is not None:
            say(f"depth=common: finding how many layers of {model.name} every system fits on {cluster.name}")
        depth = model.layers
        for name in SHIPPED:
            depth = _deepest(get_system(name), model, cluster, calibration, ep, depth, optimizer)
        return depth

    return remembered([model, cluster, calibration, ep, optimizer, source_digest(ROOT)], find, cache)


def remembered(question: object, find: Callable[[], int], cache: Path | None = CACHE) -> int:
    """The answer to a question, found once."""
    if cache is None:
        return find()
    path = disk_cache.path_of(cache, question)
    kept = disk_cache.read(path)
    if isinstance(kept, int):
        return kept
    depth = find()
    disk_cache.write(path, depth)
    return depth


def deepest(fine: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `fine` holds, by bisection; 0 where there is none."""
    if fine(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fine(middle) else (low, middle)
    return low


def _deepest(
    system: System,
    model: ModelSpec,
    cluster: ClusterSpec,
    calibration: Calibration,
    ep: int | None,
    most: int,
    optimizer: str = "megatron",
) -> int:
    """The largest depth up to `most` at which one system fits everywhere, by bisection."""

    def everywhere(layers: int) -> bool:
        return all(
            fit is None or fit
            for fit in (
                _fits(system, model.with_layers(layers), cluster, calibration, ep, seq, optimizer) for seq in SEQUENCES
            )
        )

    depth = deepest(everywhere, most)
    if depth == 0:
        raise ValueError(f"depth=common: not even one layer of {model.name} fits {cluster.name} with {system.name}")
    return depth


def _fits(
    system: System,
    model: ModelSpec,
    cluster: ClusterSpec,
    calibration: Calibration,
    ep: int | None,
    seq: int,
    optimizer: str,
) -> bool | None:
    workload = Workload(seq=seq, global_batch=default_global_batch(seq), optimizer=optimizer)
    costs = CostModel(model, cluster, calibration, workload)
    transport = system.native_transport
    problem = Problem(model, cluster, workload, costs, transport, MERGE_OF_TRANSPORT[transport], ep)
    return fits(system, problem, Simulated(problem).peak)
