"""The cut of a full-size plan that a few processes can run: fewer layers, micro-batches and ranks, the same prices.

Decides what stands for what. The system's own planner lays out the first 8 layers
with 8 micro-batches on 4 or 8 ranks, with the choices of the full-size plan (order,
chunks, streams, recompute). Every operation then takes as long as the same
operation of the full-size plan: of the same layer, in the full-size expert-parallel
group, on full-size micro-batches. What really moves are tensors of a small model of
the same structure. A rank stands for the GPUs of a worker of the full-size plan
divided by the ranks it has here, so tokens per second and GPU can be compared
between systems; the seconds of their steps cannot, as their batches differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.cut_sizes import MICROBATCHES, cut_layers, smaller
from disagmoe.cost.model import CostModel
from disagmoe.ops import Kind, Phase
from disagmoe.plan.plan import Layout, Placement, Plan
from disagmoe.plan.pricing import Pricing, price
from disagmoe.plan.program import Program
from disagmoe.plan.verify import verify
from disagmoe.specs import ClusterSpec, ModelSpec, load_model
from disagmoe.specs.cluster import NodeGroup
from disagmoe.system import Candidate, NotApplicable, Problem, System

_EXCHANGES = (int(Kind.DISPATCH), int(Kind.COMBINE))

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CutPlan:
    """`plan` on few ranks with the `pricing` (full-size seconds) of the layout `full`, made of `candidate`.

    `model` is the small model that runs. `stands_for` is the placement of the cut with
    the GPUs of the full-size workers, `sequences` the batch of one step at full size.
    """

    plan: Plan
    pricing: Pricing
    full: Layout
    candidate: Candidate
    model: ModelSpec
    stands_for: Placement
    sequences: int

    @property
    def gpus(self) -> int:
        """GPUs of the full-size plan that the ranks of the cut stand for."""
        return self.full.placement.replicas * sum(worker.gpus for worker in self.stands_for.workers)

    @property
    def sizes(self) -> dict[str, str | int]:
        """The shape of the cut, in words of its own."""
        workers = self.plan.layout.placement.workers
        ranks = {worker.pool: worker.gpus for worker in workers}
        if self.plan.layout.placement.disaggregated:
            groups = {pool: sum(worker.pool == pool for worker in workers) for pool in ("A", "F")}
            unequal = {"F groups": groups["F"]} if groups["F"] != groups["A"] else {}
            return {"p": groups["A"], **unequal, "A:F": f"{ranks['A']}:{ranks['F']}"}
        return {"pp": len(workers), "ep": self.plan.layout.ep}

    @property
    def smallest_exchange_s(self) -> float | None:
        """The shortest dispatch or combine, undisturbed; None where nothing is exchanged."""
        exchanged = np.isin(self.plan.program.kind, _EXCHANGES) & (self.pricing.duration_s > 0.0)
        return float(self.pricing.duration_s[exchanged].min()) if exchanged.any() else None


def cut_candidate(system: System, problem: Problem, full: Layout, candidate: Candidate, processes: int) -> Candidate:
    """The candidate behind a full-size plan, with the sizes of its cut. Raises NotApplicable."""
    size = "p" if full.placement.disaggregated else "pp"
    if size not in candidate:
        raise NotApplicable(f"no cut of this plan: its candidate names no {size} to make smaller")
    usual = problem.ep if getattr(system, "free_groups", "off") == "on" else None
    return smaller(candidate, full, usual, cut_layers(problem.model), processes)


def lay_out(system: System, problem: Problem, full: Layout, candidate: Candidate, processes: int) -> Plan:
    """The plan of a cut by its own planner, `candidate` with the sizes of the cut. Raises NotApplicable."""
    model = problem.model.with_layers(cut_layers(problem.model))
    cluster = _cluster(problem.cluster, processes, candidate)
    data_ranks = int(candidate["m"]) if full.placement.disaggregated else 2 * (processes // 4)
    workload = replace(
        problem.workload,
        global_batch=MICROBATCHES * full.batch.sequences * data_ranks,
        micro_batch=full.batch.sequences,
        stragglers=(),
    )
    costs = CostModel(model, cluster, problem.costs.calibration, workload)
    ep = int(candidate["n" if full.placement.disaggregated else "ep"])
    there = replace(problem, model=model, cluster=cluster, workload=workload, costs=costs, ep=ep)
    return _laid_out(system, there, candidate, processes)


def make_cut(system: System, problem: Problem, full: Layout, candidate: Candidate, processes: int) -> CutPlan:
    """The cut of the plan that `system` made of `candidate`. NotApplicable where its planner cannot make one."""
    sizes = cut_candidate(system, problem, full, candidate, processes)
    plan = lay_out(system, problem, full, sizes, processes)
    placement = plan.layout.placement
    twins = _workers(placement, full.placement)
    return CutPlan(
        plan=plan,
        pricing=_price(plan, full, twins, problem.costs),
        full=full,
        candidate=candidate,
        model=small_model(problem.model.with_layers(cut_layers(problem.model))),
        stands_for=replace(
            placement,
            workers=tuple(
                replace(worker, gpus=full.placement.workers[twin].gpus)
                for worker, twin in zip(placement.workers, twins, strict=True)
            ),
        ),
        sequences=MICROBATCHES * full.batch.sequences * full.batch.data_ranks,
    )


def _laid_out(system: System, there: Problem, candidate: Candidate, processes: int) -> Plan:
    """The plan of a cut by its own planner. Raises NotApplicable."""
    try:
        layout = system.layout(there, candidate)
        program = system.program(there, layout)
        verify(program)
    except ValueError as reason:
        raise NotApplicable(f"no cut of this plan on {processes} ranks: {reason}") from reason
    if (program.kind == int(Kind.STAGE)).any():
        raise NotApplicable("its Program has whole stages for operations: only those of layers can be executed")
    if layout.batch.microbatches != MICROBATCHES or layout.placement.gpus_used != processes:
        raise NotApplicable(
            f"no cut of this plan: its planner makes {layout.batch.microbatches} micro-batches "
            f"on {layout.placement.gpus_used} of {processes} ranks"
        )
    # One hop is enough to move small tensors: prices know of nodes.
    return Plan(replace(layout, merge="rank" if layout.merge == "node" else layout.merge), program)


def small_model(model: ModelSpec) -> ModelSpec:
    """A small model with the dense and MoE layers of `model`: what its Program needs to run."""
    tiny = load_model("tiny")
    dense = {"dense_layers": model.dense_layers, "dense_width": 96} if model.dense_layers else {}
    return replace(tiny, name="tiny", layers=model.layers, **dense)  # type: ignore[arg-type]


def _cluster(cluster: ClusterSpec, processes: int, candidate: Candidate) -> ClusterSpec:
    """Two nodes that hold the ranks, otherwise as the first node of `cluster`.

    They have room for as many F-groups as A-groups, since planners place both before they take some away.
    """
    node, half = cluster.groups[0], processes // 2
    p_f = int(candidate.get("p_f", 0))
    room = half * max(1, int(candidate["p"]) // p_f) if p_f else half
    return replace(cluster, groups=(NodeGroup(2, room, room, node.nic_gbit),))


def _workers(cut: Placement, full: Placement) -> list[int]:
    """For every worker of the cut the worker of the full-size plan whose GPUs it stands for."""
    ends = {cut.embed: full.embed, cut.head: full.head}
    found = []
    for w, worker in enumerate(cut.workers):
        alike = [i for i, other in enumerate(full.workers) if other.pool == worker.pool]
        mine = [i for i, other in enumerate(cut.workers) if other.pool == worker.pool]
        found.append(ends.get(w, alike[mine.index(w) % len(alike)]))
    return found


def _price(plan: Plan, full: Layout, twins: list[int], costs: CostModel) -> Pricing:
    """The price of every row of the cut: that of the rows of the full-size plan it stands for."""
    program = plan.program
    owner, chunk = _stand_ins(plan, full)
    last = program.n_layers - 1
    layer = program.layer.astype(np.int64)
    to_the_head = (program.kind == int(Kind.COMBINE)) & (layer == last)
    layer = np.where(to_the_head, costs.model.layers - 1, layer)
    worker = _asked(program, plan.layout.placement, full.placement, twins)
    columns = {
        name: getattr(program, name)[owner].astype(np.int32)
        for name in ("stream", "kind", "phase", "microbatch", "replica", "peer", "pair")
    }
    shadow = Program(
        n_workers=len(full.placement.workers),
        n_layers=costs.model.layers,
        n_microbatches=program.n_microbatches,
        n_chunks=max(program.n_chunks, int(chunk.max(initial=0)) + 1),
        worker=worker[owner],
        layer=layer[owner].astype(np.int32),
        chunk=chunk.astype(np.int32),
        **columns,
    )
    priced = price(full, shadow, costs)
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    share = _step_end_share(program, plan.layout.placement, full.placement, twins)
    return Pricing(
        duration_s=np.add.reduceat(priced.duration_s, first) * share,
        link=priced.link[first],
        slows_compute=priced.slows_compute[first],
        slowed_by_compute=priced.slowed_by_compute[first],
        wire_bytes=np.add.reduceat(priced.wire_bytes, first) * share,
    )


def _stand_ins(plan: Plan, full: Layout) -> tuple[Ints, Ints]:
    """Rows of the full-size plan: the row of the cut that each stands behind, ascending, and its chunk."""
    program = plan.program
    rows, chunks = np.arange(len(program), dtype=np.int64), program.chunk.astype(np.int64)
    here, there = plan.layout.tiles, full.tiles
    if here is None or there is None or here.groups == there.groups:
        return rows, chunks
    parts: Mapping[int, list[int]] = _arrivals(here.groups, there.groups)
    back = np.isin(program.phase, (int(Phase.B), int(Phase.I)))
    owners, found = [], []
    for row, chunk in enumerate(chunks.tolist()):
        kind = Kind(program.kind[row])
        arriving = kind is Kind.FFN or (kind is Kind.DISPATCH and not back[row]) or (kind is Kind.COMBINE and back[row])
        if arriving and kind in (Kind.FFN, Kind.DISPATCH, Kind.COMBINE) and chunk >= 0:
            behind = parts.get(chunk, [chunk - here.groups + there.groups])
        else:
            behind = [chunk]
        owners += [row] * len(behind)
        found += behind
    return np.array(owners, dtype=np.int64), np.array(found, dtype=np.int64)


def _arrivals(groups: int, full: int) -> dict[int, list[int]]:
    """Arrival groups of the full-size plan behind each of the cut's: own tokens apart, the others near-equally."""
    others = np.array_split(np.arange(1, full), max(1, groups - 1))
    return {0: [0], **{1 + i: part.tolist() for i, part in enumerate(others)}}


def _asked(program: Program, cut: Placement, full: Placement, twins: list[int]) -> NDArray[np.int32]:
    """The worker of the full-size plan that says what a row costs: for one layer's parameters their owner there."""
    worker = np.array(twins, dtype=np.int32)[program.worker]
    of_layer = (program.kind == int(Kind.GRAD_SYNC)) & (program.layer >= 0)
    experts = np.array([w.pool == "F" for w in cut.workers])[program.worker]
    owner = np.where(experts, np.array(full.ffn)[program.layer], np.array(full.attn)[program.layer])
    return np.where(of_layer, owner, worker).astype(np.int32)


def _step_end_share(program: Program, cut: Placement, full: Placement, twins: list[int]) -> NDArray[np.float64]:
    """Of what a worker of the full-size plan updates and gathers, the part that belongs to the cut's layers; else 1."""

    def held(placement: Placement, worker: int) -> int:
        holders = placement.holders(worker)
        return sum((a in holders) or (f in holders) for a, f in zip(placement.attn, placement.ffn, strict=True))

    shares = [min(1.0, held(cut, w) / max(1, held(full, twin))) for w, twin in enumerate(twins)]
    whole = program.kind == int(Kind.OPTIM)
    if not program.early_gather:  # else parameters are gathered layer by layer
        whole |= (program.kind == int(Kind.GRAD_SYNC)) & (program.phase == int(Phase.F))
    return np.where(whole, np.array(shares)[program.worker], 1.0)
