"""How many distinct ranks or nodes the experts of one token lie on, and who handles how many copies of it.

Decides how far copies of a token can be merged. Routing is taken as uniform over
the experts, or, for models that route within the best `topk_group` of `n_group`
expert groups, uniform over the experts of the chosen groups, each of which gets
at least one copy (they are chosen for their high scores: with groups ranked by
their best expert, as DeepEP's test does, 3.98 of 4 groups get one).
Formulas: DeepSeek-V3 (arXiv 2412.19437, node-limited routing) and elementary
hypergeometric counting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb, inf


@cache
def distinct_units(experts: int, top_k: int, units: int, n_group: int = 1, topk_group: int = 1) -> float:
    """Expected number of units (ranks or nodes) that hold at least one expert of a token.

    `experts` lie in contiguous, near-equal blocks on `units` units. Between 1
    and min(top_k, units).
    """
    if units < 1 or not 1 <= top_k <= experts:
        raise ValueError(f"cannot place top-{top_k} of {experts} experts on {units} ranks; top-k may be 1 to {experts}")
    grouped = topk_group < n_group and (units % n_group == 0 or n_group % units == 0)
    if not grouped:
        return _uniform(experts, top_k, units)
    if units <= n_group:
        # A unit holds whole groups; every chosen group is hit.
        per_unit = n_group // units
        return min(float(top_k), units * (1.0 - _missed(n_group, per_unit, topk_group)))
    # A group spans several units; the copies spread over the units of the chosen groups.
    chosen = units // n_group * topk_group
    return max(float(min(topk_group, top_k)), _uniform(experts // n_group * topk_group, top_k, chosen))


def _uniform(experts: int, top_k: int, units: int) -> float:
    """Expected distinct units under uniform routing; uneven blocks differ by one expert."""
    small, larger = divmod(experts, units)
    hit_larger = 1.0 - _missed(experts, small + 1, top_k)
    return larger * hit_larger + (units - larger) * (1.0 - _missed(experts, small, top_k))


def _missed(total: int, block: int, drawn: int) -> float:
    """Probability that `drawn` of `total` without replacement all miss a block of `block`."""
    return comb(max(total - block, 0), drawn) / comb(total, drawn)


@dataclass(frozen=True)
class CopyWork:
    """Rows per token that kernels around an exchange touch.

    `packed` are written before it, `returned` have to be summed up after it,
    `arriving` are received by all ranks together, at most `most`.
    """

    packed: float
    returned: float
    arriving: float
    most: float

    def received(self, load: float) -> float:
        """Rows per token on a rank with `load` times the mean, as if every rank had as many."""
        return min(self.arriving * load, self.most)


def copy_work(merge: str, top_k: int, ranks: int, on_ranks: float) -> CopyWork:
    """Where copies are not merged, or merged per rank, each is laid out in a send buffer and comes back by itself.

    Kernels that merge per node read tokens where they are and return their sum
    (https://github.com/deepseek-ai/DeepEP, csrc/kernels/internode.cu).
    """
    if merge == "none":
        return CopyWork(packed=top_k, returned=top_k, arriving=top_k, most=inf)
    if merge == "rank":
        return CopyWork(packed=on_ranks, returned=on_ranks, arriving=on_ranks, most=ranks)
    return CopyWork(packed=0.0, returned=1.0, arriving=on_ranks, most=ranks)
