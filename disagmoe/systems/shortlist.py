"""Decides which splits of a large search space are worth a closer look.

Where the expert-parallel size is free there are thousands of ways to split a
cluster. Each gets an estimate that takes microseconds: the compute of its busier
pool, and the weights, gradients and optimizer state of its fullest GPU. The
fastest that fit are kept, and the smallest ones, so that something fits wherever
anything does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil

from disagmoe.ops import Phase
from disagmoe.plan.memory import GIB, GRADIENT_BYTES, OPTIMIZER_BYTES, WEIGHT_BYTES
from disagmoe.specs.params import attention_params, expert_params
from disagmoe.system import Candidate, Problem

FASTEST = 112
SMALLEST = 32


def shortlist(
    problem: Problem, candidates: Sequence[Candidate], fastest: int = FASTEST, smallest: int = SMALLEST
) -> list[Candidate]:
    """At most `fastest` + `smallest` of the candidates, in their order."""
    if len(candidates) <= fastest + smallest:
        return list(candidates)
    estimate = _Estimate(problem)
    seconds = [estimate.seconds(c) for c in candidates]
    gib = [estimate.gib(c) for c in candidates]
    fitting = [i for i in range(len(candidates)) if gib[i] <= problem.cluster.limit_gib]
    kept = set(sorted(fitting, key=seconds.__getitem__)[:fastest])
    kept |= set(sorted(range(len(candidates)), key=lambda i: (gib[i], seconds[i]))[:smallest])
    return [candidates[i] for i in sorted(kept)]


class _Estimate:
    """Rough seconds of a step and GiB of a GPU; both are below the true ones."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.layers = range(problem.model.layers)
        self._attention_s = cache(self._attention)
        self._experts_s = cache(self._experts)
        self.attention_params = sum(attention_params(problem.model, layer) for layer in self.layers)
        self.expert_params = expert_params(problem.model) * sum(problem.model.is_moe(layer) for layer in self.layers)

    def seconds(self, candidate: Candidate) -> float:
        """Compute of the busier pool in all micro-batches."""
        p, m, n = (int(candidate[key]) for key in ("p", "m", "n"))
        sequences = int(candidate["micro_batch"])
        count = ceil(self.problem.workload.global_batch / (sequences * int(candidate["dp"]) * m))
        home_tokens = sequences * self.problem.workload.seq * m / n
        return count * max(self._attention_s(sequences, n), self._experts_s(home_tokens, n)) / p

    def gib(self, candidate: Candidate) -> float:
        """Static memory of the fullest GPU of either pool, the layers taken as spread evenly."""
        p, dp, m, n = (int(candidate[key]) for key in ("p", "dp", "m", "n"))
        held = WEIGHT_BYTES + GRADIENT_BYTES
        attention = self.attention_params * (held + OPTIMIZER_BYTES / (m * dp))
        experts = ceil(self.problem.model.experts / n) * self.expert_params * (held + OPTIMIZER_BYTES / dp)
        return max(attention, experts) / p / GIB

    def _attention(self, sequences: int, n: int) -> float:
        costs = self.problem.costs
        packed = costs.copy_work(self.problem.merge, n).packed
        return sum(
            costs.attention(layer, phase, sequences, packed=packed)
            for layer in self.layers
            for phase in (Phase.F, Phase.B)
        )

    def _experts(self, home_tokens: float, n: int) -> float:
        model, costs = self.problem.model, self.problem.costs
        local = ceil(model.experts / n)
        imbalance = local * n / model.experts * self.problem.workload.skew
        copies = costs.copy_work(self.problem.merge, n)
        return sum(
            costs.ffn(
                layer,
                phase,
                home_tokens=home_tokens,
                rows=home_tokens * model.top_k * imbalance if moe else 0.0,
                local_experts=float(local),
                returned=copies.returned,
                normed=home_tokens * (copies.received(imbalance) if moe else 1.0),
            )
            for layer in self.layers
            for moe in (model.is_moe(layer),)
            for phase in (Phase.F, Phase.B)
        )
