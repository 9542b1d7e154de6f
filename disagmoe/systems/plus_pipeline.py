"""Colocated plans of `disagmoe_plus`: for where keeping attention and experts together is faster.

Decides which pipelines are looked at. Three schedules, all made of pieces that the
baselines use too, and none a baseline as it is:

- `combined`: combined 1F1B, forwards and backwards of different micro-batches in pairs;
- `folded`: DualPipeV's order, two stages per worker;
- `plain`: interleaved 1F1B whose workers do not wait for exchanges, with backwards in
  two parts, so that weight gradients cover what is exposed. It needs the least memory.

Exchange and experts can be cut in parts, which helps where an operation has no other
micro-batch beside it; replays leave out the combine, as no gradient needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Kind, Phase
from disagmoe.plan.bounds import contended_s
from disagmoe.plan.colocated import colocated_program, without_waits
from disagmoe.plan.combined import combined_program
from disagmoe.plan.dualpipe import dualpipev_program, dualpipev_stages
from disagmoe.plan.plan import Layout
from disagmoe.plan.pricing import LayoutCosts
from disagmoe.plan.program import Program
from disagmoe.plan.split_backward import split_backward
from disagmoe.system import Candidate, NotApplicable, Problem
from disagmoe.systems.folded import folded_candidates, folded_layout
from disagmoe.systems.pipelines import colocated_candidates, colocated_layout, stages_of

SCHEDULES = ("combined", "folded", "plain")
KEPT: Mapping[str, int] = {"combined": 14, "folded": 7, "plain": 7}
"""Candidates of each schedule that get a closer look, the most promising ones by `_Estimate`."""
FEW_MICROBATCHES = 8
"""Up to here a good part of the step has no other micro-batch beside it, and parts are tried first."""


def pipeline_candidates(problem: Problem) -> list[Candidate]:
    """The most promising pipelines of every schedule, in a fixed order. Raises NotApplicable where there are none."""
    estimate, reason = _Estimate(problem), None
    found: list[Candidate] = []
    for schedule in SCHEDULES:
        try:
            listed = list(_of_schedule(problem, schedule))
        except NotApplicable as refused:
            reason = reason or refused
            continue
        seconds = [estimate.seconds(candidate) for candidate in listed]
        kept = set(sorted(range(len(listed)), key=seconds.__getitem__)[: KEPT[schedule]])
        if schedule == "plain":
            kept |= {i for i, candidate in enumerate(listed) if _lean(candidate)}
        found += [listed[i] for i in sorted(kept)]
    if not found and reason is not None:
        raise reason
    return found


def _lean(candidate: Candidate) -> bool:
    """Whether a pipeline holds the least that its depth can."""
    return candidate["virtual"] == 1 and candidate["micro_batch"] == 1


def _of_schedule(problem: Problem, schedule: str) -> Iterator[Candidate]:
    if schedule == "folded":
        for listed in folded_candidates(problem, None, "a folded pipeline", step=1, stages_per_rank=2):
            yield _first_form(problem, {"schedule": schedule, "virtual": 2, **listed})
        return
    for listed in colocated_candidates(problem, pp=None, virtual=None, group=None):
        if schedule == "plain" or listed["pp"] == 1 or int(listed["virtual"]) > 1:
            yield _first_form(problem, {"schedule": schedule, **listed})


def _first_form(problem: Problem, candidate: Candidate) -> Candidate:
    few = microbatches(problem, candidate) <= FEW_MICROBATCHES
    return {"form": "pipeline", **candidate, "chunks": 2 if few else 1}


def microbatches(problem: Problem, candidate: Candidate) -> int:
    """Micro-batches of one step."""
    data_ranks = problem.cluster.gpus // int(candidate["pp"])
    return ceil(problem.workload.global_batch / (int(candidate["micro_batch"]) * data_ranks))


def chunk_counts(problem: Problem, candidate: Candidate) -> tuple[int, ...]:
    """Parts that are tried for a good pipeline."""
    return (1, 2) if microbatches(problem, candidate) > FEW_MICROBATCHES else (1, 2, 4)


def pipeline_layout(problem: Problem, candidate: Candidate, system: str) -> Layout:
    """Place one candidate on the cluster."""
    schedule, chunks = str(candidate["schedule"]), int(candidate["chunks"])
    if schedule == "folded":
        stages = dualpipev_stages(int(candidate["pp"]))
        layout = replace(folded_layout(problem, candidate, system, stages, False), chunks=chunks)
    else:
        overlap = schedule == "combined"
        layout = colocated_layout(problem, candidate, system=system, chunks=chunks, overlap=overlap)
        layout = replace(layout, serial_exchange=False)
    named: Candidate = {"form": "together", "schedule": schedule, "parts": chunks}
    return replace(
        layout,
        options={**layout.options, "form": "pipeline", "schedule": schedule},
        details={**named, **layout.details},
    )


def pipeline_program(problem: Problem, layout: Layout) -> Program:
    """The order of a pipeline before any look-ahead."""
    options, model = layout.options, problem.model
    moe = [model.is_moe(layer) for layer in range(model.layers)]
    recompute = Recompute.of(options).repeated(disaggregated=False)
    stages, m, p = stages_of(layout), layout.batch.microbatches, int(options["pp"])
    if options["schedule"] == "folded":
        return dualpipev_program(
            ranks=p, microbatches=m, stage_layers=stages, moe=moe, recompute=recompute, chunks=layout.chunks
        )
    v, group = int(options["virtual"]), int(options["group"])
    if options["schedule"] == "combined":
        return combined_program(
            p=p, v=v, m=m, group=group, stage_layers=stages, moe=moe, recompute=recompute, chunks=layout.chunks
        )
    program = colocated_program(
        p=p, v=v, m=m, group=group, stage_layers=stages, moe=moe, chunks=layout.chunks, recompute=recompute
    )
    return split_backward(without_waits(program))


@dataclass(frozen=True)
class _Times:
    """Seconds of one micro-batch through all layers on one GPU, with its exchange hidden, and of that exchange."""

    work_s: float
    exchange_s: float


class _Estimate:
    """A rough step of a pipeline: its work, the time to fill it, and the exchange of lone micro-batches."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._times = cache(self._of)

    def seconds(self, candidate: Candidate) -> float:
        """Estimate of one candidate."""
        p, v, schedule = int(candidate["pp"]), int(candidate["virtual"]), candidate["schedule"]
        times = self._times(int(candidate["micro_batch"]), int(candidate["ep"]))
        m = microbatches(self.problem, candidate)
        filling = (p - 1) / (1.0 if schedule == "folded" else v) * times.work_s / p
        lone = m if schedule == "plain" else 1 + (p - 1) / v
        return m * times.work_s / p + filling + lone * times.exchange_s / p / int(candidate["chunks"])

    def _of(self, sequences: int, ep: int) -> _Times:
        problem = self.problem
        sample: Candidate = {"ep": ep, "pp": 1, "virtual": 1, "micro_batch": sequences, "group": 1}
        prices = LayoutCosts(colocated_layout(problem, sample, system="estimate", overlap=True), problem.costs)
        layers: Sequence[int] = problem.costs.like
        compute, exchange = (
            sum(
                prices.op(kind, phase, layer).seconds
                for layer in layers
                for phase in (Phase.F, Phase.B)
                for kind in kinds
            )
            for kinds in ((Kind.ATTN, Kind.FFN), (Kind.DISPATCH, Kind.COMBINE))
        )
        ends = sum(
            prices.op(kind, phase, -1).seconds for kind in (Kind.EMBED, Kind.HEAD) for phase in (Phase.F, Phase.B)
        )
        return _Times(contended_s(prices, compute + ends, exchange), exchange)
