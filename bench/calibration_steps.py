"""Steps that a calibration is read from.

Decides which plans are run (Megatron-1F1B on one stage and DisagMoE on one ring, over
all ranks) and what their timelines say: how long each operation computes, and, where
nothing overlaps, how long an exchange keeps what comes after it waiting, from the end
of the compute before it to the start of the compute behind it. That is the host's
work included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from baselines.registry import get_system
from disagmoe.cost.calibration import Calibration
from disagmoe.cost.model import CostModel
from disagmoe.ops import COMPUTE_KINDS, COMPUTE_STREAMS, Kind, Phase
from disagmoe.plan.plan import Plan
from disagmoe.plan.pricing import LayoutCosts
from disagmoe.plan.verify import verify
from disagmoe.specs import ClusterSpec, ModelSpec, Workload
from disagmoe.system import NotApplicable, Problem
from disagmoe.timeline.timeline import Timeline

MICRO_BATCHES = {"cpu": {"megatron_1f1b": 2, "disagmoe": 8}, "cuda": {"megatron_1f1b": 2, "disagmoe": 1}}
"""Systems whose steps are timed, by the kind of device. Of 1F1B on one stage nothing overlaps but the reduction of
gradients, which runs beside the backward of the last micro-batch. DisagMoE overlaps two micro-batches on purpose, so
one alone shows its exchanges; but while one group computes, the other idles, and ranks that share cores then compute
twice as fast as in a step of many. On a CPU it is therefore given many, and only its compute is read."""
ROUNDS = 2
"""Times all cases are measured, one after the other, so that a machine that drifts does not favour one of them."""
FITTED = (Kind.EMBED, Kind.ATTN, Kind.FFN, Kind.HEAD)


@dataclass(frozen=True, eq=False)
class Case:
    """One plan with micro-batches of one sequence; `problem` prices it."""

    plan: Plan
    problem: Problem

    @property
    def sequences(self) -> int:
        return self.problem.workload.global_batch

    @property
    def overlaps(self) -> bool:
        """Whether exchanges run beside the compute of other micro-batches."""
        layout = self.plan.layout
        return layout.placement.disaggregated and layout.batch.microbatches > 1


@dataclass(frozen=True)
class OpSample:
    """Seconds of one operation of a case, over layers and steps (`typical`); `share` of all samples of the case."""

    case: Case
    kind: Kind
    phase: Phase
    layer: int
    seconds: float
    share: float = 0.0


def case_of(name: str, model: ModelSpec, cluster: ClusterSpec, calibration: Calibration, seq: int, wanted: int) -> Case:
    """The first plan of a system with `wanted` micro-batches of one sequence. Else NotApplicable."""
    half = max(1, cluster.gpus // 2)
    for batch in dict.fromkeys((wanted * cluster.gpus, wanted * half)):
        work = Workload(seq=seq, global_batch=batch, micro_batch=1)
        costs = CostModel(model, cluster, calibration, work)
        system = get_system(name, **({"pp": 1} if name == "megatron_1f1b" else {}))
        problem = Problem(model, cluster, work, costs, system.native_transport, "rank", half)
        for candidate in system.candidates(problem):
            if candidate.get("compute_streams", 1) != 1:  # two operations on one device slow each other down
                continue
            layout = system.layout(problem, candidate)
            if layout.batch.microbatches == wanted and layout.placement.gpus_used == cluster.gpus:
                plan = Plan(layout, system.program(problem, layout))
                verify(plan.program)
                return Case(plan, problem)
    raise NotApplicable(f"{name} has no plan of {wanted} micro-batches on {cluster.gpus} ranks")


def op_samples(case: Case, timelines: Sequence[Timeline]) -> list[OpSample]:
    """Compute of a case by kind and phase, and its exchanges where they run alone."""
    found: dict[tuple[Kind, Phase], list[float]] = defaultdict(list)
    layers: dict[tuple[Kind, Phase], int] = {}
    for timeline in timelines:
        for kind, phase, layer, seconds in (*_computes(timeline), *(() if case.overlaps else _exchanges(timeline))):
            if seconds > 0.0:
                found[kind, phase].append(seconds)
                layers.setdefault((kind, phase), layer)
    total = sum(fmean(values) * len(values) for values in found.values())
    return [
        OpSample(case, *key, layers[key], typical(values), fmean(values) * len(values) / total)
        for key, values in found.items()
    ]


def prices(samples: Sequence[OpSample], calibration: Calibration) -> list[float]:
    """What the cost model says of the same operations under a calibration, seconds."""
    return [_layout_costs(x, calibration).op(x.kind, x.phase, x.layer).seconds for x in samples]


def nbytes(sample: OpSample, calibration: Calibration) -> tuple[float, float]:
    """Bytes of an exchange on NVLink and on NICs."""
    transfer = _layout_costs(sample, calibration).op(sample.kind, sample.phase, sample.layer)
    return transfer.nvlink_bytes, transfer.nic_bytes


def _layout_costs(sample: OpSample, calibration: Calibration) -> LayoutCosts:
    problem = sample.case.problem
    costs = CostModel(problem.model, problem.cluster, calibration, problem.workload)
    return LayoutCosts(sample.case.plan.layout, costs)


def _computes(timeline: Timeline) -> Iterator[tuple[Kind, Phase, int, float]]:
    program = timeline.program
    for row in np.flatnonzero(np.isin(program.kind, [int(kind) for kind in FITTED])).tolist():
        op = program.op(row)
        yield op.kind, op.phase, op.layer, float(timeline.end_s[row] - timeline.start_s[row])


def _exchanges(timeline: Timeline) -> Iterator[tuple[Kind, Phase, int, float]]:
    """Exchanges of MoE layers, from the compute before to the compute behind.

    Not the backward ones of the last micro-batch, which share the links with the reduction of
    gradients; what goes to the head is no exchange like the others.
    """
    program = timeline.program
    compute = np.isin(program.stream, [int(s) for s in COMPUTE_STREAMS])
    compute &= np.isin(program.kind, [int(kind) for kind in COMPUTE_KINDS])
    at = {}
    for row in np.flatnonzero(compute).tolist():
        op = program.op(row)
        at[op.kind, op.phase, op.layer, op.microbatch] = row
    exchanged = {(op.layer, op.microbatch) for op in map(program.op, range(len(program))) if op.kind is Kind.DISPATCH}
    for layer, b in sorted(exchanged):
        chain = [
            (Kind.DISPATCH, Phase.F, (Kind.ATTN, layer), (Kind.FFN, layer)),
            (Kind.COMBINE, Phase.F, (Kind.FFN, layer), (Kind.ATTN, layer + 1)),
        ]
        if b + 1 < program.n_microbatches:
            chain += [
                (Kind.COMBINE, Phase.B, (Kind.ATTN, layer + 1), (Kind.FFN, layer)),
                (Kind.DISPATCH, Phase.B, (Kind.FFN, layer), (Kind.ATTN, layer)),
            ]
        for kind, phase, before, after in chain:
            first, then = at.get((before[0], phase, before[1], b)), at.get((after[0], phase, after[1], b))
            if first is not None and then is not None:
                yield kind, phase, layer, float(timeline.start_s[then] - timeline.end_s[first])


def typical(seconds: Sequence[float]) -> float:
    """The mean without the tenth at either end: a step is a sum of many operations, so their mean counts."""
    ordered = sorted(seconds)
    out = len(ordered) // 10
    return fmean(ordered[out : len(ordered) - out])


def with_share(samples: Sequence[OpSample]) -> list[OpSample]:
    """Shares over several cases: every case counts the same."""
    cases = len({id(sample.case) for sample in samples})
    return [replace(sample, share=sample.share / cases) for sample in samples]
