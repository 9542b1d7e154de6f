"""Tutel: dispatch, experts and combine cut into `degree` capacity chunks that overlap.

One communication stream carries all dispatch chunks first, then all combine
chunks; expert chunk i waits for dispatch chunk i, combine chunk i for expert
chunk i; the backward is the mirror with the chunk order reversed (tutel
impls/overlap.py). Attention, gate, encode and decode never overlap. Hosted in the
same interleaved 1F1B as the reference, since Tutel has no pipeline of its own.
Capacity is dropless: under skewed routing the padded volume follows the fullest
expert rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from baselines.colocated import colocated_candidates, colocated_layout, pipeline_program
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.system import Candidate, Problem

DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Tutel:
    """Options of the planner; None lets the tuner choose.

    `degree` is a2a_ffn_overlap_degree: 1, 2, 4 or 8.
    """

    degree: int | None = None
    pp: int | None = None
    virtual: int | None = None
    group: int | None = None

    name: str = "tutel"
    native_transport: str = "nccl"

    def __post_init__(self) -> None:
        if self.degree is not None and self.degree not in DEGREES:
            raise ValueError(f"tutel degree={self.degree}: allowed are {', '.join(map(str, DEGREES))}")

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        for candidate in colocated_candidates(problem, pp=self.pp, virtual=self.virtual, group=self.group):
            yield {**candidate, "degree": self.degree or 2}

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        """Every overlap degree of a good pipeline."""
        for degree in (self.degree,) if self.degree else DEGREES:
            yield {**candidate, "degree": degree}

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        degree = int(candidate["degree"])
        layout = colocated_layout(problem, candidate, system=self.name, chunks=degree, capacity_padded=True)
        return replace(layout, details={**layout.details, "degree": degree})

    def program(self, problem: Problem, layout: Layout) -> Program:
        return pipeline_program(problem, layout)
