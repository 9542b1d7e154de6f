"""Small problems that several tests plan for."""

from __future__ import annotations

from disagmoe.cost.calibration import load_calibration
from disagmoe.cost.model import CostModel
from disagmoe.specs import ClusterSpec, NodeGroup, Workload, load_cluster, load_model
from disagmoe.system import Problem


def small_cluster(nodes: int = 4, gpus: int = 8, nics: int = 8, memory_gib: float = 79.6) -> ClusterSpec:
    """H800 nodes of any size with 400 Gbit/s NICs."""
    group = NodeGroup(count=nodes, gpus=gpus, nics=nics, nic_gbit=400.0)
    return ClusterSpec(
        name="small", device="H800", groups=(group,), nvlink_gbs=200.0, memory_gib=memory_gib, calibration="h800"
    )


def problem(
    model: str = "tiny",
    cluster: ClusterSpec | str | None = None,
    *,
    seq: int = 4096,
    global_batch: int = 128,
    micro_batch: int | None = None,
    transport: str = "nccl",
    merge: str = "none",
    ep: int | None = 16,
    skew: float = 1.0,
    layers: int | None = None,
    stragglers: tuple[tuple[int, float], ...] = (),
) -> Problem:
    where = load_cluster(cluster) if isinstance(cluster, str) else cluster or small_cluster()
    what = load_model(model)
    if layers is not None:
        what = what.with_layers(min(layers, what.layers))
    work = Workload(seq=seq, global_batch=global_batch, micro_batch=micro_batch, skew=skew, stragglers=stragglers)
    costs = CostModel(what, where, load_calibration(where.calibration), work)
    return Problem(what, where, work, costs, transport, merge, ep)
