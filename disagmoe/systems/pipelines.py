"""What all colocated pipelines share, the baselines' and our own: how a problem is cut into pp x data ranks.

World = pp x D (tp = cp = 1). The D ranks of a pipeline stage take different
sequences; expert parallelism divides them (EP must divide D), it is no factor of
the world size. Layers are dealt to virtual stages with the output head counted
as load, so that no system loses to an unlucky split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from disagmoe.cost.comet import TileSplit
from disagmoe.cost.model import CostModel
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Kind, Phase
from disagmoe.plan.bounds import layer_times_s
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.orders import grouped_table, groups, warmup
from disagmoe.plan.plan import Batch, Layout, Placement, Worker
from disagmoe.plan.pricing import LayoutCosts
from disagmoe.plan.program import Program
from disagmoe.plan.split import interleaved_ranks, split_layers
from disagmoe.system import RECOMPUTE_LEVELS, SELECTIVE_LEVELS, Candidate, NotApplicable, Problem, recompute_of

VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
MICRO_BATCHES = (1, 2, 4, 8)
AUTO_EP = (8, 16, 32, 64)
"""EP sizes tried where the tuner may choose; within a node up to eight nodes."""


REPLAYS: dict[str, tuple[Candidate, ...]] = {
    "exposed": RECOMPUTE_LEVELS,
    "hidden": (*SELECTIVE_LEVELS, {"recompute": "full", "recompute_combine": "never"}),
}
"""Recompute levels of the overlapping systems by their option `replay`. "exposed" is Megatron-Core's: a layer is
repeated as a whole before its backward (https://github.com/NVIDIA/Megatron-LM/pull/6311). "hidden" leaves out the
repeat of the combine, so that the repeat overlaps with the other micro-batch (see `plan/pairs.py`)."""


def replay_levels(name: str, replay: str) -> tuple[Candidate, ...]:
    """Levels of one system's option `replay`. ValueError names what is allowed."""
    if replay not in REPLAYS:
        raise ValueError(f"{name} replay={replay!r}: allowed are {', '.join(REPLAYS)}")
    return REPLAYS[replay]


def expert_parallel_sizes(problem: Problem) -> tuple[int, ...]:
    """The EP size asked for, or the largest the cluster and the model allow; several where the tuner may choose."""
    most = min(problem.cluster.gpus, problem.model.experts)
    if problem.ep is not None:
        return (min(problem.ep, most),)
    return tuple(size for size in AUTO_EP if size <= most) or (most,)


def colocated_candidates(
    problem: Problem, *, pp: int | None, virtual: int | None, group: int | None
) -> Iterator[dict[str, str | int | float]]:
    """(EP, pp, virtual stages, micro-batch) with EP dividing the data ranks of a stage."""
    world, layers = problem.cluster.gpus, problem.model.layers
    placeable = False
    if pp is not None and group is not None and group < pp:
        raise NotApplicable(f"group={group} micro-batches per virtual stage: at least pp={pp} are needed")
    for ep in expert_parallel_sizes(problem):
        depths = [d for d in range(1, min(world, layers) + 1) if world % d == 0 and (world // d) % ep == 0]
        for depth in [d for d in depths if pp in (None, d) and (group is None or group >= d)]:
            placeable = True
            virtuals = [v for v in VIRTUAL_STAGES if v * depth <= layers and (depth > 1 or v == 1)]
            for v in (virtual,) if virtual else virtuals:
                for b in micro_batches(problem, world // depth):
                    yield {"ep": ep, "pp": depth, "virtual": v, "micro_batch": b, "group": group or depth}
    if not placeable:
        wanted = "no pp" if pp is None else f"pp={pp} is none that"
        ep = expert_parallel_sizes(problem)[0]
        raise NotApplicable(
            f"{wanted} divides {world} GPUs into at most {layers} stages of a multiple of EP {ep} ranks"
        )


def micro_batches(problem: Problem, data_ranks: int) -> list[int]:
    """Sequences per attention rank and micro-batch that the tuner tries."""
    if problem.workload.micro_batch is not None:
        return [problem.workload.micro_batch]
    most = max(1, problem.workload.global_batch // data_ranks)
    return [b for b in MICRO_BATCHES if b <= most]


def colocated_layout(
    problem: Problem,
    candidate: Candidate,
    *,
    system: str,
    variant: str = "",
    chunks: int = 1,
    tiles: TileSplit | None = None,
    capacity_padded: bool = False,
    load: float | None = None,
    two_level: bool = False,
    overlap: bool = False,
) -> Layout:
    """Place a candidate: one worker per pipeline rank, layers dealt to its virtual stages.

    They are dealt by their times, or with "split" = "count" as if all took the same.

    With `overlap` the exchange of one micro-batch hides behind the compute of
    another; without it only the experts of the same layer can hide it. The other
    switches are those of the Layout.
    """
    p, v, b = int(candidate["pp"]), int(candidate["virtual"]), int(candidate["micro_batch"])
    workers = pipeline_workers(problem, p)
    data_ranks = workers[0].gpus
    nowhere = (0,) * problem.model.layers
    bare = Layout(
        system=system,
        variant=variant,
        placement=Placement(workers, attn=nowhere, ffn=nowhere, embed=0, head=p - 1),
        batch=Batch(ceil(problem.workload.global_batch / (b * data_ranks)), b, data_ranks),
        ep=int(candidate["ep"]),
        transport=problem.transport,
        merge=problem.merge,
        chunks=chunks,
        tiles=tiles,
        capacity_padded=capacity_padded,
        load=load,
        two_level=two_level,
        serial_exchange=not overlap,
    )
    ranks = interleaved_ranks(p, v)
    try:
        even = _dealt(bare, candidate, split_layers([1.0] * problem.model.layers, ranks))
    except ValueError as reason:
        raise NotApplicable(str(reason)) from reason
    loads, head, embed = loads_s(even, problem.costs, overlap=overlap)
    if candidate.get("split") == "count":
        loads = [sum(loads) / len(loads)] * len(loads)
    return _dealt(bare, candidate, split_layers(loads, ranks, head_load=head, embed_load=embed))


def _dealt(bare: Layout, candidate: Candidate, stages: tuple[tuple[int, ...], ...]) -> Layout:
    """The layout with its layers on the virtual stages, which go round the workers."""
    p, v, group = (int(candidate[key]) for key in ("pp", "virtual", "group"))
    owner = [0] * len(bare.placement.attn)
    for stage, layers in enumerate(stages):
        for layer in layers:
            owner[layer] = stage % p
    sizes, recompute = [len(layers) for layers in stages], recompute_of(candidate)
    return replace(
        bare,
        placement=replace(bare.placement, attn=tuple(owner), ffn=tuple(owner)),
        options={
            "pp": p,
            "virtual": v,
            "group": group,
            "stages": ",".join(map(str, sizes)),
            "in_flight_P0": _in_flight(p, v, bare.batch.microbatches, group, sizes),
            **recompute,
        },
        details={
            "pp": p,
            "virtual_stages": v,
            "dp": bare.batch.data_ranks,
            "ep": bare.ep,
            "micro_batch": bare.batch.sequences,
            "group": group,
            "layers_per_stage": f"{min(sizes)}-{max(sizes)}",
            **recompute,
        },
    )


def pipeline_workers(problem: Problem, p: int) -> tuple[Worker, ...]:
    """One worker per pipeline rank, each with its share of the GPUs."""
    cluster = problem.cluster
    data_ranks = cluster.gpus // p
    nodes = max(1, -(-data_ranks // cluster.gpus_per_node))
    return tuple(Worker(f"P{r}", "AF", data_ranks, nodes, cluster.nic_gbs_per_gpu()) for r in range(p))


def expert_parallel_nodes(problem: Problem, candidate: Candidate) -> int:
    """Nodes the expert-parallel group of a candidate lies on."""
    stage = pipeline_workers(problem, int(candidate["pp"]))[0]
    return max(1, -(-int(candidate["ep"]) * stage.nodes // stage.gpus))


def loads_s(layout: Layout, costs: CostModel, *, overlap: bool = False) -> tuple[list[float], float, float]:
    """Seconds of one micro-batch on a rank: of every layer, of the output head and of the embedding.

    A layer takes the longer of its compute and its exchange where one micro-batch
    overlaps another, else its compute and what its experts leave of the exchange.
    """
    prices = LayoutCosts(layout, costs)

    def seconds(kind: Kind, layer: int = -1) -> float:
        return sum(prices.op(kind, phase, layer).seconds for phase in (Phase.F, Phase.B))

    if overlap:
        of_kind = {}
        for layer in sorted(set(costs.like)):
            compute = seconds(Kind.ATTN, layer) + seconds(Kind.FFN, layer)
            of_kind[layer] = max(compute, seconds(Kind.DISPATCH, layer) + seconds(Kind.COMBINE, layer))
    else:
        of_kind = {layer: sum(times.values()) for layer, times in layer_times_s(prices).items()}
    layers = [of_kind[first] for first in costs.like]
    return layers, seconds(Kind.HEAD), seconds(Kind.EMBED)


def _in_flight(p: int, v: int, m: int, group: int, layers: Sequence[int]) -> int:
    """Layers of all micro-batches that the first rank holds when its first backward starts."""
    sizes = groups(m, p, group)
    chunk, _ = grouped_table(v, sizes)
    forwards = min(warmup(p, v, 0, max(sizes), m * v) + 1, m * v)
    return sum(layers[int(c) * p] for c in chunk[:forwards])


def stages_of(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Contiguous layers of each virtual stage, from the layout's own counts."""
    counts = [int(c) for c in str(layout.options["stages"]).split(",")]
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(bounds))


def pipeline_program(problem: Problem, layout: Layout) -> Program:
    """The interleaved 1F1B Program of a colocated layout, chunked where the layout says so."""
    model = problem.model
    return colocated_program(
        p=int(layout.options["pp"]),
        v=int(layout.options["virtual"]),
        m=layout.batch.microbatches,
        group=int(layout.options["group"]),
        stage_layers=stages_of(layout),
        moe=[model.is_moe(layer) for layer in range(model.layers)],
        chunks=layout.chunks,
        recompute=Recompute.of(layout.options).repeated(disaggregated=False),
    )
