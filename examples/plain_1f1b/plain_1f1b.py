"""Template of a baseline that lives outside this repository: classic 1F1B without virtual stages.

Copy this folder, rename it, and change three things: which candidates exist,
how one is laid out, and in which order its operations run. Everything else
(tuning, verification, simulation, tables, pictures) is done by the harness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baselines.colocated import colocated_candidates, colocated_layout, pipeline_program
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.system import Candidate, NotApplicable, Problem


@dataclass(frozen=True)
class Plain1F1B:
    """Fields are the user's options: `system.plain_1f1b.pp=4` on the command line."""

    pp: int | None = None

    name: str = "plain_1f1b"
    native_transport: str = "nccl"

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """The search space. Raise NotApplicable(reason) where the system cannot run at all."""
        if problem.model.layers < 2:
            raise NotApplicable(f"a pipeline needs at least 2 layers, {problem.model.name} has {problem.model.layers}")
        return colocated_candidates(problem, pp=self.pp, virtual=1, group=None)

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        """Variations of a good candidate; none here."""
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        """Which worker holds which layer, how many GPUs it has, how the batch is cut."""
        return colocated_layout(problem, candidate, system=self.name)

    def program(self, problem: Problem, layout: Layout) -> Program:
        """The ordered operations of every stream of every worker."""
        return pipeline_program(problem, layout)
