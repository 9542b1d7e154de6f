"""What disaggregating only some layers could gain at most: the resource bound of every mix of both forms.

Decides what a mix is. A layer is *together* (attention and experts on one GPU) or
*apart* (on pools), each layer as it likes; dense layers exchange nothing either way.
Two kinds of mix are bounded, each over every number of layers of each kind apart:

- `separate_s`: a GPU works for one form only. The GPUs of a part that has a share g of
  the cluster need 1 / g times what all of them would, so the best division takes
  T_together(its layers) + T_apart(its layers). Layers of one kind then all want the form
  in which one of them takes the smaller share of the GPUs. That stays so with memory: a
  layer's share is the larger of its seconds over the step's and its bytes over the
  limit, at the best mix of recompute, and shares add up.
- `shared_s`: a GPU may work for both, so all resources are pooled: compute, NICs and
  NVLink of both parts add up over all GPUs, and one part's idle resource serves the
  other. No plan of any mix is faster.

Both are relaxed as in `resource_bound.py`, and the part that is apart more so: its
pools divide GPUs at any ratio and its fan-out is spread over all of them. Recompute is
charged to neither. It is no reason to mix: weights and optimizer state are as many in
any form, and what a token leaves behind in a layer is no less apart than together
(`cost/memory.py`), so that at equal tokens in flight no mix holds less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from disagmoe.cost.model import CostModel
from disagmoe.plan.resource_bound import Resources, Work, apart, side_by_side, together, work_of


@dataclass(frozen=True)
class Part:
    """Seconds of the whole cluster's compute, NICs and NVLink that the layers of one form need."""

    compute_s: float = 0.0
    nic_s: float = 0.0
    nvlink_s: float = 0.0

    def __add__(self, other: Part) -> Part:
        return Part(self.compute_s + other.compute_s, self.nic_s + other.nic_s, self.nvlink_s + other.nvlink_s)

    def times(self, count: float) -> Part:
        """So many of them."""
        return Part(count * self.compute_s, count * self.nic_s, count * self.nvlink_s)


@dataclass(frozen=True)
class Mixed:
    """Least steps: all layers `together`, all `apart` (None where no pools fit), and of the best mixes.

    `separate_apart` and `shared_apart` are the layers that the best mix has apart;
    fewer where that is as good.
    """

    together: Resources
    apart: Resources | None
    layers: int
    separate_s: float
    separate_apart: int
    shared_s: float
    shared_apart: int

    @property
    def pure_s(self) -> float:
        """The better of both forms."""
        return min(form.step_s for form in (self.together, self.apart) if form is not None)


def mixed_bound(costs: CostModel, transport: str, merge: str, ep: int) -> Mixed:
    """The least step of any mix of both forms with experts over `ep` ranks."""
    whole = work_of(costs, merge, ep)
    all_together = together(costs, whole, transport, merge, ep)
    all_apart = min(apart(costs, whole, transport, merge, ep), key=lambda form: form.step_s, default=None)
    factors = costs.contention(transport)

    def least(part: Part) -> float:
        return side_by_side(part.compute_s, max(part.nic_s, part.nvlink_s), factors.compute, factors.comm)

    separate, shared = [], []
    for count, inside, outside in _mixes(costs, transport, merge, ep, possible=all_apart is not None):
        separate.append((least(inside) + least(outside), count))
        shared.append((least(inside + outside), count))
    return Mixed(all_together, all_apart, costs.model.layers, *min(separate, key=_rounded), *min(shared, key=_rounded))


def _rounded(found: tuple[float, int]) -> tuple[float, int]:
    """Nine digits of a step, so that equal ones are told apart by the layers."""
    return float(f"{found[0]:.9g}"), found[1]


def _mixes(
    costs: CostModel, transport: str, merge: str, ep: int, *, possible: bool
) -> Iterator[tuple[int, Part, Part]]:
    """(layers apart, what is together, what is apart) for every number of layers of each kind apart."""
    gpus = costs.cluster.gpus
    ends = Part(work_of(costs, merge, ep, layers=()).rest / gpus)
    kinds = sorted(set(costs.like))
    counts = [costs.like.count(kind) for kind in kinds]
    forms = [_one_layer(costs, kind, transport, merge, ep) for kind in kinds]
    exchange = next(iter(forms))[2]
    for away in product(*(range(count + 1 if possible else 1) for count in counts)):
        inside, outside, exchanging = ends, Part(), 0
        for count, number, (here, there, _) in zip(counts, away, forms, strict=True):
            inside, outside = inside + here.times(count - number), outside + there.times(number)
        exchanging = sum(n for n, kind in zip(away, kinds, strict=True) if costs.model.is_moe(kind))
        # The last combine may stay inside the experts' own group.
        yield sum(away), inside, outside + exchange.times(max(0, 2 * exchanging - 1))


def _one_layer(costs: CostModel, kind: int, transport: str, merge: str, ep: int) -> tuple[Part, Part, Part]:
    """One layer together, the same apart but for its exchanges, and one exchange apart in one direction."""
    work = work_of(costs, merge, ep, layers=(kind,), ends=False)
    here = together(costs, work, transport, merge, ep)
    gpus = costs.cluster.gpus
    one = Work(work.attention, work.experts, work.rest, work.tokens, 1)
    there = next(apart(costs, one, transport, merge, ep), None)
    crossing = Part() if there is None else Part(0.0, there.nic_s, there.nvlink_s * there.expert_gpus / gpus)
    return Part(here.compute_s, here.nic_s, here.nvlink_s), Part(work.compute / gpus), crossing
