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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from baselines.colocated import (
    expert_parallel_sizes,
    loads_s,
    micro_batches,
    pipeline_workers,
    replay_levels,
    stages_of,
)
from disagmoe.cost.recompute import Recompute
from disagmoe.plan.dualpipe import dualpipe_program, dualpipe_stages, dualpipev_program, dualpipev_stages
from disagmoe.plan.plan import Batch, Layout, Placement
from disagmoe.plan.program import Program
from disagmoe.plan.split import split_layers
from disagmoe.plan.units import Stages
from disagmoe.system import Candidate, NotApplicable, Problem, Variant, recompute_of


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
        yield from _candidates(problem, self.pp, "DualPipe", step=2, stages_per_rank=1)

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        p = int(candidate["pp"])
        return _layout(problem, candidate, self.name, dualpipe_stages(p), self.p2p_exposed)

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
        yield from _candidates(problem, self.pp, "DualPipeV", step=1, stages_per_rank=2)

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        return ()

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        p = int(candidate["pp"])
        return _layout(problem, candidate, self.name, dualpipev_stages(p), self.p2p_exposed)

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


def _candidates(problem: Problem, pp: int | None, name: str, *, step: int, stages_per_rank: int) -> Iterator[Candidate]:
    """(EP, pp, micro-batch): pp and the number of micro-batches are multiples of `step`, that number at least 2 pp."""
    world, batch = problem.cluster.gpus, problem.workload.global_batch
    most = problem.model.layers // stages_per_rank
    even = "even " if step == 2 else ""
    found, refused = False, ""
    for ep in expert_parallel_sizes(problem):
        depths = [d for d in range(step, most + 1, step) if world % d == 0 and (world // d) % ep == 0]
        for depth in [d for d in depths if pp in (None, d)]:
            data_ranks = world // depth
            for sequences in micro_batches(problem, data_ranks):
                count = ceil(batch / (sequences * data_ranks))
                if count % step == 0 and count >= 2 * depth:
                    found = True
                    yield {"ep": ep, "pp": depth, "micro_batch": sequences}
                elif not refused:
                    refused = f"pp={depth} with {sequences} x {data_ranks} sequences in each has {count}"
    if not found and refused:
        needed = "an even number of micro-batches, " if step == 2 else "micro-batches, "
        raise NotApplicable(f"{name} needs {needed}at least 2 x pp: {refused} (global batch {batch})")
    if not found:
        ep = expert_parallel_sizes(problem)[0]
        pinned = f"{name}: pp={pp} is no {even}number" if pp is not None else f"{name} finds no {even}pp"
        raise NotApplicable(
            f"{pinned} that divides {world} GPUs into at most {most} ranks of a multiple of EP {ep} GPUs"
        )


def _layout(problem: Problem, candidate: Candidate, system: str, stages: Stages, p2p_exposed: bool) -> Layout:
    """One worker per pipeline rank, which holds stages s and S-1-s of S."""
    p, sequences, ep = int(candidate["pp"]), int(candidate["micro_batch"]), int(candidate["ep"])
    workers = pipeline_workers(problem, p)
    data_ranks = workers[0].gpus
    count = ceil(problem.workload.global_batch / (sequences * data_ranks))
    recompute = recompute_of(candidate)

    def layout(counts: tuple[int, ...]) -> Layout:
        owner = tuple(stages.home(stage, 0) for stage, layers in enumerate(counts) for _ in range(layers))
        placement = Placement(
            workers=workers,
            attn=owner,
            ffn=owner,
            embed=owner[0],
            head=owner[-1],
            mirror=stages.bidirectional,
        )
        return Layout(
            system=system,
            variant="",
            placement=placement,
            batch=Batch(count, sequences, data_ranks),
            ep=ep,
            transport=problem.transport,
            merge=problem.merge,
            options={"pp": p, "stages": ",".join(map(str, counts)), **recompute},
            details={
                "pp": p,
                "virtual_stages": 2,
                "dp": data_ranks,
                "ep": ep,
                "micro_batch": sequences,
                "parameter_copies": placement.copies,
                "p2p": "exposed" if p2p_exposed else "asynchronous",
                "layers_per_stage": f"{min(counts)}-{max(counts)}",
                **recompute,
            },
        )

    even = layout(folded_counts([1.0] * problem.model.layers, stages.count))
    loads, head, embed = loads_s(even, problem.costs, overlap=True)
    return layout(folded_counts(loads, stages.count, head_load=head, embed_load=embed))


def folded_counts(
    loads: Sequence[float], stages: int, *, head_load: float = 0.0, embed_load: float = 0.0
) -> tuple[int, ...]:
    """Layers of each of an even number of stages, of which s and S-1-s share a rank.

    `loads` are the times of the layers in any unit. Ranks are balanced, the outermost
    one holding the embedding and the output head. The two stages of a rank get equally
    many layers, as one's forward runs beside the other's backward layer by layer.
    """
    ranks = [min(stage, stages - 1 - stage) for stage in range(stages)]
    dealt = split_layers(loads, ranks, head_load=head_load, embed_load=embed_load)
    both = [len(dealt[rank]) + len(dealt[stages - 1 - rank]) for rank in range(stages // 2)]
    return tuple([ceil(n / 2) for n in both] + [n // 2 for n in reversed(both)])
