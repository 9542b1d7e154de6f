"""Every option at every pair of NIC rates: the search that needs no solver.

Decides like `milp` does and gives the same answer; it is what the allocator falls
back to where no solver runs, and what the tests compare the solvers with.
"""

from __future__ import annotations

import numpy as np

from disagmoe.allocator.allocation import TOLERANCE, AllocationModel, Choice, why_infeasible
from disagmoe.allocator.nodes import Placer
from disagmoe.allocator.solvers import EXHAUSTIVE


def search(model: AllocationModel, notes: tuple[str, ...] = ()) -> Choice:
    """The best Choice of a model. Raises Infeasible naming the limit that binds."""
    fitting = model.fitting
    if not fitting:
        raise why_infeasible(model)
    attention_gpus = np.array([option.shape.gpus[0] for option in fitting])
    expert_gpus = np.array([option.shape.gpus[1] for option in fitting])
    compute_s = np.array([max(option.compute_s) for option in fitting])
    network_s = [np.array([option.network_s[pool] for option in fitting]) for pool in (0, 1)]
    placer = Placer(model.kinds, model.uses)
    best_s = np.full(len(fitting), np.inf)
    for i, first in enumerate(model.levels[0]):
        for j, second in enumerate(model.levels[1]):
            beside = placer.frontier((first, second), int(attention_gpus.max()))
            longest = np.maximum(compute_s, np.maximum(network_s[0][:, i], network_s[1][:, j]))
            placed = beside[attention_gpus] >= expert_gpus
            best_s = np.minimum(best_s, np.where(placed, longest, np.inf))
    least = float(best_s.min())
    if not np.isfinite(least):
        raise why_infeasible(model)
    equal = [o for o, seconds in zip(fitting, best_s.tolist(), strict=True) if seconds <= least * (1.0 + TOLERANCE)]
    option = min(equal, key=lambda o: (sum(o.shape.gpus), o.shape))
    return Choice(option, least, least, True, EXHAUSTIVE, notes)
