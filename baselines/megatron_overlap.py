"""Megatron-LM's interleaved 1F1B with expert-parallel overlap (`megatron_1f1b_overlap`).

Combined 1F1B: in the steady state the forward of one micro-batch and the backward
of another run side by side on a compute and an all-to-all stream, layer by layer;
warm-up and cool-down stay exposed. Preconditions follow Megatron-Core's
`overlap_moe_expert_parallel_comm` (megatron/training/arguments.py): expert
parallelism, and virtual stages where there are pipeline stages. Weight gradients
are split off (`delay_wgrad_compute`). Full recompute repeats a whole layer before its
backward (https://github.com/NVIDIA/Megatron-LM/pull/6311).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from baselines.colocated import (
    colocated_candidates,
    colocated_layout,
    expert_parallel_sizes,
    replay_levels,
    stages_of,
)
from disagmoe.cost.recompute import Recompute
from disagmoe.plan.combined import combined_program, combined_warmup
from disagmoe.plan.orders import groups
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.system import Candidate, NotApplicable, Problem


@dataclass(frozen=True)
class Megatron1F1BOverlap:
    """Options of the planner; None lets the tuner choose.

    `group` is microbatch_group_size_per_vp_stage (default pp), `replay` how full
    recompute runs (see `colocated.REPLAYS`).
    """

    pp: int | None = None
    virtual: int | None = None
    group: int | None = None
    replay: str = "exposed"

    name: str = "megatron_1f1b_overlap"
    native_transport: str = "nccl"

    def __post_init__(self) -> None:
        replay_levels(self.name, self.replay)

    @property
    def recompute_levels(self) -> tuple[Candidate, ...]:
        """Nothing, selective, full."""
        return replay_levels(self.name, self.replay)

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """Those of interleaved 1F1B with pp = 1 or virtual > 1."""
        if max(expert_parallel_sizes(problem)) < 2:
            raise NotApplicable("EP overlap needs expert parallelism: EP is 1 here, at least 2 is needed")
        allowed = False
        for candidate in colocated_candidates(problem, pp=self.pp, virtual=self.virtual, group=self.group):
            if candidate["ep"] == 1 or (candidate["pp"] != 1 and candidate["virtual"] == 1):
                continue
            allowed = True
            yield candidate
        if not allowed:
            raise NotApplicable(
                "EP overlap with pp > 1 needs virtual stages (virtual > 1): none of the allowed pp has at least "
                f"2 virtual stages of {problem.model.layers} layers"
            )

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        """Stages of equally many layers where layers differ: pairs run layer by layer, surplus layers alone."""
        yield {**candidate, "split": "count"}

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        layout = colocated_layout(problem, candidate, system=self.name, overlap=True)
        p, v, m = int(candidate["pp"]), int(candidate["virtual"]), layout.batch.microbatches
        alone = combined_warmup(p, v, p - 1, max(groups(m, p, int(candidate["group"]))), m * v)
        if alone == m * v:
            raise NotApplicable(
                f"{m} micro-batches in {v} virtual stages leave no forward and backward to overlap: "
                f"the last rank warms up with all {m * v} forwards"
            )
        return replace(layout, details={**layout.details, "overlapped_share": round(1.0 - alone / (m * v), 3)})

    def program(self, problem: Problem, layout: Layout) -> Program:
        model = problem.model
        return combined_program(
            p=int(layout.options["pp"]),
            v=int(layout.options["virtual"]),
            m=layout.batch.microbatches,
            group=int(layout.options["group"]),
            stage_layers=stages_of(layout),
            moe=[model.is_moe(layer) for layer in range(model.layers)],
            recompute=Recompute.of(layout.options).repeated(disaggregated=False),
        )
