"""Megatron-LM's interleaved 1F1B without expert-parallel overlap (`megatron_1f1b`).

The reference of every speed-up. Every dispatch and combine is on the critical
path; pipeline P2P is asynchronous, in one process group per direction. Order and
warm-up follow megatron/core/pipeline_parallel/schedules.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from baselines.colocated import colocated_candidates, colocated_layout, pipeline_program
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.system import RECOMPUTE_LEVELS, Candidate, Problem


@dataclass(frozen=True)
class Megatron1F1B:
    """Options of the planner; None lets the tuner choose.

    `group` is microbatch_group_size_per_vp_stage (default pp).
    """

    pp: int | None = None
    virtual: int | None = None
    group: int | None = None

    name: str = "megatron_1f1b"
    native_transport: str = "nccl"
    recompute_levels: ClassVar[tuple[Candidate, ...]] = RECOMPUTE_LEVELS

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        yield from colocated_candidates(problem, pp=self.pp, virtual=self.virtual, group=self.group)

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        return colocated_layout(problem, candidate, system=self.name)

    def program(self, problem: Problem, layout: Layout) -> Program:
        return pipeline_program(problem, layout)
