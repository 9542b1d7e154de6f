"""Clusters and devices: shipped files, mixed nodes, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from disagmoe.specs import (
    ClusterSpec,
    NodeGroup,
    cluster_from_mapping,
    cluster_names,
    device,
    device_names,
    load_cluster,
)

MINE: dict[str, object] = {
    "name": "mine",
    "device": "H100",
    "groups": [{"count": 2, "gpus": 8, "nics": 4, "nic_gbit": 400}],
    "calibration": "h100",
}


@pytest.mark.parametrize(
    ("name", "gpus", "nodes", "device_name", "nvlink_gbs", "memory_gib", "calibration"),
    [
        ("h800_128", 128, 16, "H800", 200.0, 79.6, "h800"),
        ("h800_64", 64, 8, "H800", 200.0, 79.6, "h800"),
        ("h800_32", 32, 4, "H800", 200.0, 79.6, "h800"),
        ("h100_128", 128, 16, "H100", 450.0, 79.6, "h100"),
        ("h200_64", 64, 8, "H200", 450.0, 140.4, "h100"),
    ],
)
def test_shipped_clusters(
    name: str, gpus: int, nodes: int, device_name: str, nvlink_gbs: float, memory_gib: float, calibration: str
) -> None:
    cluster = load_cluster(name)
    assert (cluster.name, cluster.gpus, cluster.nodes, cluster.device) == (name, gpus, nodes, device_name)
    assert (cluster.nvlink_gbs, cluster.memory_gib, cluster.calibration) == (nvlink_gbs, memory_gib, calibration)
    assert cluster.nics == gpus
    assert cluster.gpus_per_node == 8
    assert cluster.nic_gbs_per_gpu() == 50.0
    assert cluster.limit_gib == pytest.approx(memory_gib - 4.0)


def test_laptop_is_one_node_of_eight() -> None:
    laptop = load_cluster("laptop")
    assert (laptop.gpus, laptop.nodes, laptop.nics, laptop.calibration) == (8, 1, 1, "laptop")
    assert laptop.nic_gbs_per_gpu() == 1.0
    assert 4 < laptop.limit_gib < 16
    assert "laptop" in cluster_names()


def test_mixed_nodes_share_their_nics() -> None:
    groups = (NodeGroup(1, 8, 4, 400.0), NodeGroup(1, 4, 4, 400.0), NodeGroup(1, 4, 2, 400.0))
    cluster = replace(load_cluster("h100_128"), groups=groups)
    assert [cluster.nic_gbs_per_gpu([node]) for node in range(3)] == [25.0, 50.0, 25.0]
    assert cluster.nic_gbs_per_gpu([1, 2]) == 25.0
    assert cluster.nic_gbs_per_gpu() == 25.0
    assert cluster.node_list == ((8, 4, 400.0), (4, 4, 400.0), (4, 2, 400.0))
    assert (cluster.gpus, cluster.nodes, cluster.nics, cluster.gpus_per_node) == (16, 3, 10, 4)
    for outside in ([3], [-1], []):
        with pytest.raises(ValueError, match="node indices must lie in 0 to 2"):
            cluster.nic_gbs_per_gpu(outside)


def test_a_users_file_and_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in MINE.items() if key != "name"}))
    cluster = load_cluster(str(path))
    assert cluster == cluster_from_mapping(MINE | {"name": "ours"})
    assert (cluster.nvlink_gbs, cluster.memory_gib, cluster.reserve_gib) == (450.0, 79.6, 4.0)
    assert cluster.spine_oversubscription == 1.0


def test_shipped_files_are_plain_mappings_of_the_fields() -> None:
    for name in cluster_names():
        assert isinstance(load_cluster(name), ClusterSpec)


def _with_group(**change: object) -> dict[str, object]:
    return {"groups": [{"count": 2, "gpus": 8, "nics": 4, "nic_gbit": 400} | change]}


REFUSED = {
    "device": ({"device": "Foo"}, "unknown device 'Foo'; known: .*H800"),
    "key": ({"nvlink": 5}, "cluster mine: unknown key nvlink; known keys: .*nvlink_gbs"),
    "no groups": ({"groups": []}, "at least one node group"),
    "groups no list": ({"groups": 5}, "groups must be a list"),
    "no NICs": (_with_group(nics=0), "nics must be positive, got 0"),
    "no GPUs": (_with_group(gpus=0), "gpus must be positive, got 0"),
    "negative count": (_with_group(count=-1), "count must be positive, got -1"),
    "NIC speed": (_with_group(nic_gbit=0), "nic_gbit must be positive"),
    "half a GPU": (_with_group(gpus=0.5), "gpus must be an integer, got 0.5"),
    "group key": (_with_group(nic_gbs=50), "unknown key nic_gbs"),
    "NVLink": ({"nvlink_gbs": 0}, "nvlink_gbs must be positive"),
    "not a number": ({"memory_gib": float("nan")}, "memory_gib must be a finite number, got nan"),
    "reserve": ({"reserve_gib": 80.0}, "reserve_gib must lie between 0 and memory_gib 79.6, got 80.0"),
    "spine": ({"spine_oversubscription": 0.5}, "must be at least 1, got 0.5"),
    "empty calibration": ({"calibration": ""}, "calibration must be a non-empty string"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    change, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason) as error:
        cluster_from_mapping(MINE | change)
    assert "\n" not in str(error.value)


def test_a_cluster_without_a_calibration_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster mine: missing key calibration"):
        cluster_from_mapping({key: value for key, value in MINE.items() if key != "calibration"})


def test_unknown_cluster_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown cluster 'nope'; known: .*h800_128"):
        load_cluster("nope")


def test_device_peaks_are_dense_bf16() -> None:
    assert device("H800").peak_bf16_tflops == 989.0
    assert device("h800") is device("H800")
    assert device("A100").peak_bf16_tflops == 312.0
    assert (device("H800").nvlink_gbs, device("H100").nvlink_gbs) == (200.0, 450.0)
    assert {"A100", "H100", "H800", "H200", "laptop"} <= set(device_names())


@pytest.mark.parametrize("name", ["Foo", "MI355X", ""])
def test_unknown_devices_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown device '{name}'; known: A100"):
        device(name)
