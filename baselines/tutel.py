"""Tutel (`tutel`): dispatch, experts and combine cut into `degree` capacity chunks that overlap.

One communication stream carries all dispatch chunks first, then all combine
chunks; expert chunk i waits for dispatch chunk i, combine chunk i for expert
chunk i; the backward is the mirror with the chunk order reversed
(https://github.com/microsoft/tutel, tutel/impls/overlap.py). Attention and gate
never overlap. Hosted in the same interleaved 1F1B as the reference, since Tutel has
no pipeline of its own.

Rows travel in a dense buffer [experts, capacity, hidden]: every rank moves and
computes the capacity, not its load. Tutel itself has no search, so it is shown at
degree 1 (no overlap, its default) and at the best of degrees 1, 2, 4, 8.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

from baselines.colocated import colocated_candidates, colocated_layout, pipeline_program
from disagmoe.cost.capacity import capacity_rows
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.system import RECOMPUTE_LEVELS, Candidate, NotApplicable, Problem, System

DEGREES = (1, 2, 4, 8)
ALGORITHMS = ("linear", "2dh")


@dataclass(frozen=True)
class Tutel:
    """Options of the planner; None lets the tuner choose.

    `degree` is a2a_ffn_overlap_degree: 1, 2, 4 or 8. `algorithm` of the
    all-to-all: "linear", or "2dh" (through the node first, for many small
    messages). `capacity_factor` as in Tutel: > 0 fixes the capacity and drops what
    exceeds it, 0 follows the fullest expert and drops nothing, < 0 follows it up to
    a capacity factor of that size.
    """

    degree: int | None = None
    algorithm: str | None = None
    capacity_factor: float = 0.0
    pp: int | None = None
    virtual: int | None = None
    group: int | None = None

    name: str = "tutel"
    native_transport: str = "nccl"
    recompute_levels: ClassVar[tuple[Candidate, ...]] = RECOMPUTE_LEVELS

    def __post_init__(self) -> None:
        if self.degree is not None and self.degree not in DEGREES:
            raise ValueError(f"tutel degree={self.degree}: allowed are {', '.join(map(str, DEGREES))}")
        if self.algorithm is not None and self.algorithm not in ALGORITHMS:
            raise ValueError(f"tutel algorithm={self.algorithm}: allowed are {', '.join(ALGORITHMS)}")

    def variants(self) -> tuple[tuple[str, System], ...]:
        """Without overlap and at its best; one row where the degree is given."""
        if self.degree is not None:
            return ((f"degree {self.degree}", self),)
        return (("degree 1", replace(self, degree=1)), ("best degree", self))

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """Every pipeline at one degree; the best ones are refined."""
        for candidate in colocated_candidates(problem, pp=self.pp, virtual=self.virtual, group=self.group):
            yield {**candidate, "degree": self.degree or 2, "algorithm": self.algorithm or "linear"}

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        """Every overlap degree and all-to-all algorithm of a good pipeline."""
        for degree in (self.degree,) if self.degree else DEGREES:
            for algorithm in (self.algorithm,) if self.algorithm else ALGORITHMS:
                yield {**candidate, "degree": degree, "algorithm": algorithm}

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        degree, algorithm = int(candidate["degree"]), str(candidate.get("algorithm", ALGORITHMS[0]))
        two_level = algorithm == "2dh"
        if two_level and problem.merge != "none":
            raise NotApplicable(f"2DH moves every copy of a token and cannot merge them (merge={problem.merge})")
        model, work = problem.model, problem.workload
        tokens = int(candidate["micro_batch"]) * work.seq
        rows = capacity(tokens, model.experts, model.top_k, self.capacity_factor, work.skew, degree)
        load = rows * model.experts / (tokens * model.top_k)
        layout = colocated_layout(
            problem,
            candidate,
            system=self.name,
            chunks=degree,
            capacity_padded=True,
            load=load,
            two_level=two_level,
        )
        share = dropped_share(load, work.skew, layout.ep)
        return replace(
            layout,
            tokens_dropped=round(share * work.global_batch * work.seq),
            options={**layout.options, "capacity_factor": self.capacity_factor},
            details={
                **layout.details,
                "degree": degree,
                "algorithm": algorithm,
                "capacity": rows,
                "capacity_load": round(load, 4),
            },
        )

    def program(self, problem: Problem, layout: Layout) -> Program:
        return pipeline_program(problem, layout)


def capacity(tokens: int, experts: int, top_k: int, factor: float, skew: float, degree: int) -> int:
    """Rows of one expert from one rank with `tokens` tokens (tutel/impls/fast_dispatch.py, extract_critical).

    The fullest expert of dropless routing is taken to hold `skew` times the mean.
    """
    fullest = ceil(round(skew * tokens * top_k / experts, 6))
    return capacity_rows(fullest, tokens, experts, top_k, factor, degree)


def dropped_share(load: float, skew: float, ranks: int) -> float:
    """Share of token-expert rows beyond a capacity of `load` times the mean.

    One of `ranks` expert ranks is `skew` times as loaded as the mean and the
    others share the rest equally: of all loads with that maximum, the one that
    drops least.
    """
    rest = (ranks - skew) / (ranks - 1) if ranks > 1 else 1.0
    hot = skew if ranks > 1 else 1.0
    return (max(0.0, hot - load) + (ranks - 1) * max(0.0, rest - load)) / ranks
