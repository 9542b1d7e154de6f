"""ClusterSpec: what the model is trained on.

Decides how nodes, GPUs and NICs are described (NICs belong to nodes; nodes need
not be alike) and what bandwidth a GPU owns. Rates are GB/s = 1e9 bytes/s in one
direction, NIC speeds Gbit/s as on the box, memory GiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from disagmoe.specs import fields as read
from disagmoe.specs.devices import device

Node = tuple[int, int, float]
"""(GPUs, NICs, Gbit/s per NIC) of one node."""


@dataclass(frozen=True)
class NodeGroup:
    """`count` equal nodes, each with `gpus` GPUs and `nics` NICs of `nic_gbit` Gbit/s."""

    count: int
    gpus: int
    nics: int
    nic_gbit: float

    def __post_init__(self) -> None:
        for key in ("count", "gpus", "nics"):
            read.as_int(getattr(self, key), f"cluster node group: {key}")
        read.require_positive(
            "cluster node group", count=self.count, gpus=self.gpus, nics=self.nics, nic_gbit=self.nic_gbit
        )


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster of one kind of GPU.

    `nvlink_gbs` is the NVLink bandwidth of a GPU in one direction.
    `spine_oversubscription` divides the bandwidth between nodes (1.0: none).
    `memory_gib` is what a GPU has, `reserve_gib` what stays out of the plan's
    reach (context, fragmentation). `calibration` names the measured efficiencies.
    """

    name: str
    device: str
    groups: tuple[NodeGroup, ...]
    nvlink_gbs: float
    memory_gib: float
    calibration: str
    spine_oversubscription: float = 1.0
    reserve_gib: float = 4.0

    def __post_init__(self) -> None:
        what = f"cluster {self.name}"
        read.check_name(self.name, "cluster")
        device(self.device)
        if not self.groups:
            raise ValueError(f"{what}: groups must hold at least one node group")
        read.require_positive(what, nvlink_gbs=self.nvlink_gbs, memory_gib=self.memory_gib)
        if read.as_float(self.spine_oversubscription, f"{what}: spine_oversubscription") < 1.0:
            raise ValueError(f"{what}: spine_oversubscription must be at least 1, got {self.spine_oversubscription!r}")
        if not 0.0 <= self.reserve_gib < self.memory_gib:
            raise ValueError(
                f"{what}: reserve_gib must lie between 0 and memory_gib {self.memory_gib}, got {self.reserve_gib!r}"
            )
        read.as_str(self.calibration, f"{what}: calibration")

    @property
    def node_list(self) -> tuple[Node, ...]:
        """One (gpus, nics, nic_gbit) per node, in the order of the groups."""
        return tuple((group.gpus, group.nics, group.nic_gbit) for group in self.groups for _ in range(group.count))

    @property
    def nodes(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def gpus(self) -> int:
        return sum(group.count * group.gpus for group in self.groups)

    @property
    def nics(self) -> int:
        return sum(group.count * group.nics for group in self.groups)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the smallest node: what a group inside one node can count on anywhere."""
        return min(group.gpus for group in self.groups)

    @property
    def limit_gib(self) -> float:
        """Memory a plan may use on one GPU."""
        return self.memory_gib - self.reserve_gib

    def nic_gbs_per_gpu(self, node_indices: Iterable[int] | None = None) -> float:
        """NIC bandwidth one GPU owns, GB/s each way: that of the slowest of the given nodes (default: all)."""
        nodes = self.node_list
        chosen = range(len(nodes)) if node_indices is None else tuple(node_indices)
        outside = [index for index in chosen if not 0 <= index < len(nodes)]
        if outside or not chosen:
            raise ValueError(f"cluster {self.name}: node indices must lie in 0 to {len(nodes) - 1}, got {list(chosen)}")
        return min(nics * nic_gbit / 8.0 / gpus for gpus, nics, nic_gbit in (nodes[index] for index in chosen))


def cluster_names() -> tuple[str, ...]:
    """Names of the shipped clusters, sorted."""
    return tuple(read.shipped("cluster"))


def load_cluster(name_or_path: str) -> ClusterSpec:
    """The cluster of a shipped name or of a YAML file."""
    path = read.find(name_or_path, read.shipped("cluster"), "cluster")
    return cluster_from_mapping({"name": path.stem, **read.read_file(path, "cluster")})


def cluster_from_mapping(mapping: Mapping[str, object]) -> ClusterSpec:
    """A ClusterSpec from a plain mapping of its own field names.

    `nvlink_gbs` and `memory_gib` default to the device's. `groups` is a list of
    {count, gpus, nics, nic_gbit}.
    """
    what = f"cluster {mapping.get('name', '(unnamed)')}"
    known = [field.name for field in fields(ClusterSpec)]
    read.check_keys(mapping, known, ("name", "device", "groups", "calibration"), what)
    gpu = device(read.as_str(mapping["device"], f"{what}: device"))
    numbers = {"nvlink_gbs": gpu.nvlink_gbs, "memory_gib": gpu.memory_gib}
    for key in ("nvlink_gbs", "memory_gib", "spine_oversubscription", "reserve_gib"):
        if key in mapping:
            numbers[key] = read.as_float(mapping[key], f"{what}: {key}")
    return ClusterSpec(
        name=read.as_str(mapping["name"], "cluster: name"),
        device=gpu.name,
        groups=tuple(_group(item, what) for item in read.as_list(mapping["groups"], f"{what}: groups")),
        calibration=read.as_str(mapping["calibration"], f"{what}: calibration"),
        **numbers,
    )


def _group(item: object, what: str) -> NodeGroup:
    mapping = read.as_mapping(item, f"{what}: groups entry")
    keys = [field.name for field in fields(NodeGroup)]
    read.check_keys(mapping, keys, keys, f"{what}: groups entry")
    return NodeGroup(
        count=read.as_int(mapping["count"], f"{what}: count"),
        gpus=read.as_int(mapping["gpus"], f"{what}: gpus"),
        nics=read.as_int(mapping["nics"], f"{what}: nics"),
        nic_gbit=read.as_float(mapping["nic_gbit"], f"{what}: nic_gbit"),
    )
