"""DualPipe and DualPipeV (`dualpipe`, `dualpipe_v`; https://github.com/deepseek-ai/DualPipe).

DualPipe runs half of the micro-batches from either end of the pipeline, so every
stage exists twice: two copies of the parameters, whose gradients are summed over
mirrored ranks (they replicate each other for the optimizer too). DualPipeV holds
one copy in twice as many stages, two per rank. Forward and backward overlap as in
combined 1F1B. The open library has no overlapped kernels of its own and waits for
every pipeline transfer; `p2p_exposed` adds the latter, the former is granted. So is
full recompute, as combined 1F1B has it: the library knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baselines.colocated import replay_levels, stages_of
from disagmoe.cost.recompute import Recompute
from disagmoe.plan.dualpipe import dualpipe_program, dualpipe_stages, dualpipev_program, dualpipev_stages
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.system import Candidate, Problem, Variant
from disagmoe.systems.folded import folded_candidates, folded_counts, folded_layout

__all__ = ["DualPipe", "DualPipeV", "folded_counts"]


@dataclass(frozen=True)
class DualPipe:
    """Options of the planner; None lets the tuner choose.

    `pp` is the number of pipeline ranks, which must be even. `p2p_exposed`: ranks
    wait for pipeline transfers between units, as the open code does. `replay`: how
    full recompute runs (see `colocated.REPLAYS`).
    """

    pp: int | None = None
    p2p_exposed: bool = False
    replay: str = "exposed"

    name: str = "dualpipe"
    native_transport: str = "nccl"

    def __post_init__(self) -> None:
        _check_options(self.name, self.pp, self.p2p_exposed)
        replay_levels(self.name, self.replay)
        if self.pp is not None and self.pp % 2:
            raise ValueError(f"dualpipe pp={self.pp}: DualPipe needs an even number of pipeline ranks")

    @property
    def recompute_levels(self) -> tuple[Candidate, ...]:
        """Nothing, selective, full."""
        return replay_levels(self.name, self.replay)

    def variants(self) -> tuple[Variant, ...]:
        """In the native view a second row on DeepEP, which DeepSeek's own runs used."""
        return Variant("", self), Variant("deepep", self, native_transport="deepep")

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """Even pp, and micro-batches whose number is even and at least 2 pp."""
        yield from folded_candidates(problem, self.pp, "DualPipe", step=2, stages_per_rank=1)

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        p = int(candidate["pp"])
        return folded_layout(problem, candidate, self.name, dualpipe_stages(p), self.p2p_exposed)

    def program(self, problem: Problem, layout: Layout) -> Program:
        return dualpipe_program(
            ranks=int(layout.options["pp"]),
            microbatches=layout.batch.microbatches,
            stage_layers=stages_of(layout),
            moe=[problem.model.is_moe(layer) for layer in range(problem.model.layers)],
            p2p_exposed=self.p2p_exposed,
            recompute=Recompute.of(layout.options).repeated(disaggregated=False),
        )


@dataclass(frozen=True)
class DualPipeV:
    """Options of the planner; None lets the tuner choose.

    `pp` is the number of pipeline ranks, each with two of the 2 pp stages.
    `p2p_exposed` and `replay` as in DualPipe.
    """

    pp: int | None = None
    p2p_exposed: bool = False
    replay: str = "exposed"

    name: str = "dualpipe_v"
    native_transport: str = "nccl"

    def __post_init__(self) -> None:
        _check_options(self.name, self.pp, self.p2p_exposed)
        replay_levels(self.name, self.replay)

    @property
    def recompute_levels(self) -> tuple[Candidate, ...]:
        """Nothing, selective, full."""
        return replay_levels(self.name, self.replay)

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """Any pp with two stages per rank, and at least 2 pp micro-batches."""
        yield from folded_candidates(problem, self.pp, "DualPipeV", step=1, stages_per_rank=2)

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        p = int(candidate["pp"])
        return folded_layout(problem, candidate, self.name, dualpipev_stages(p), self.p2p_exposed)

    def program(self, problem: Problem, layout: Layout) -> Program:
        return dualpipev_program(
            ranks=int(layout.options["pp"]),
            microbatches=layout.batch.microbatches,
            stage_layers=stages_of(layout),
            moe=[problem.model.is_moe(layer) for layer in range(problem.model.layers)],
            p2p_exposed=self.p2p_exposed,
            recompute=Recompute.of(layout.options).repeated(disaggregated=False),
        )


def _check_options(name: str, pp: int | None, p2p_exposed: bool) -> None:
    if pp is not None and pp < 1:
        raise ValueError(f"{name} pp={pp}: must be at least 1")
    if not isinstance(p2p_exposed, bool):
        raise ValueError(f"{name} p2p_exposed={p2p_exposed!r}: allowed are true and false")
