"""Small plans for tests of groups and wiring, made by hand."""

from __future__ import annotations

from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.plan import Batch, Layout, Placement, Plan, Worker


def ring(p: int, m: int, n: int, *, layers: int = 2, dp: int = 1, head: str = "last_f", nodes: int = 1) -> Plan:
    """AF-Pipe of depth p, M:N ranks per group, two micro-batches; each group on `nodes` nodes of its own."""
    workers = tuple(
        Worker(f"{pool}{i}", pool, gpus, min(gpus, nodes), 50.0)
        for pool, gpus in (("A", m), ("F", n))
        for i in range(p)
    )
    heads = {"last_f": (p + (layers - 1) % p,), "next_a": (layers % p,), "spread": tuple(range(p, 2 * p))}[head]
    placement = Placement(
        workers=workers,
        attn=tuple(layer % p for layer in range(layers)),
        ffn=tuple(p + layer % p for layer in range(layers)),
        embed=0,
        head=heads[0],
        replicas=dp,
        head_shards=heads if len(heads) > 1 else (),
    )
    program = af_pipe_program(p=p, layers=layers, m=2, group=4 * p, order="megatron", head=head)
    return Plan(_layout(placement, n), program)


def stages(p: int, gpus: int, ep: int, *, layers: int = 2, mirror: bool = False, dp: int = 1) -> Plan:
    """A colocated pipeline of p stages with `gpus` ranks each, of which `ep` share the experts."""
    workers = tuple(Worker(f"S{i}", "AF", gpus, 1, 50.0) for i in range(p))
    homes = tuple(layer * p // layers for layer in range(layers))
    placement = Placement(workers, homes, homes, 0, p - 1, replicas=dp, mirror=mirror)
    program = colocated_program(
        p=p, v=1, m=2, group=None, stage_layers=[[x for x in range(layers) if homes[x] == s] for s in range(p)],
        moe=[True] * layers,
    )  # fmt: skip
    return Plan(_layout(placement, ep), program)


def _layout(placement: Placement, ep: int) -> Layout:
    batch = Batch(microbatches=2, sequences=1, data_ranks=placement.workers[0].gpus * placement.replicas)
    return Layout("test", "", placement, batch, ep, "nccl", "rank")
