"""Folded pipelines, two stages per worker: stage s and S-1-s of S lie together (DualPipe, DualPipeV).

Decides which (EP, pp, micro-batch) they can run and how many layers each stage gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from disagmoe.plan.plan import Batch, Layout, Placement
from disagmoe.plan.split import split_layers
from disagmoe.plan.units import Stages
from disagmoe.system import Candidate, NotApplicable, Problem, recompute_of
from disagmoe.systems.pipelines import expert_parallel_sizes, loads_s, micro_batches, pipeline_workers


def folded_candidates(
    problem: Problem, pp: int | None, name: str, *, step: int, stages_per_rank: int
) -> Iterator[Candidate]:
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


def folded_layout(problem: Problem, candidate: Candidate, system: str, stages: Stages, p2p_exposed: bool) -> Layout:
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
