"""The hardware at hand as a cluster, and the defaults of a measured run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import at_hand
from bench.at_hand import adapt, cluster_at_hand, known_gpu, launched, rank_count
from bench.config import resolve
from disagmoe.specs import cluster_from_mapping
from disagmoe.specs import fields as read
from tests.bench.helpers import CHOICES, values


@pytest.fixture(autouse=True)
def no_gpus_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(at_hand, "gpu_names", lambda: ())
    monkeypatch.setattr(read, "OWN_CONF", tmp_path / "conf.local")
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def as_typed(**changes: Any) -> dict[str, Any]:
    """What Hydra hands over where nothing but the model is chosen."""
    return values(backend="measure", batch=None, micro_batch=None, ep=16, **changes)


def test_four_processes_half_of_them_expert_parallel_and_eight_micro_batches_for_two_data_ranks() -> None:
    filled, chosen = adapt(as_typed(), CHOICES, ["backend=measure"])
    config = resolve(filled, chosen)
    assert (config.cluster.name, config.cluster.gpus, config.cluster.device) == ("local", 4, "laptop")
    assert (config.ep, config.workload.global_batch, config.workload.micro_batch) == (2, 16, 1)
    assert config.calibration == "laptop"


def test_what_is_set_stays() -> None:
    filled, chosen = adapt(as_typed(processes=8) | {"ep": 4, "batch": 24, "micro_batch": 3}, CHOICES, ["ep=4"])
    config = resolve(filled, chosen)
    assert (config.cluster.gpus, config.ep, config.workload.global_batch, config.workload.micro_batch) == (8, 4, 24, 3)


def test_a_named_cluster_is_kept_and_its_devices_are_the_ranks() -> None:
    filled, chosen = adapt(as_typed(), CHOICES, ["cluster=laptop"])
    assert chosen["cluster"] == "laptop" and (filled["ep"], filled["batch"]) == (4, 32)


def test_ones_own_calibration_of_a_cpu_makes_the_ranks_devices_of_its_kind(tmp_path: Path) -> None:
    """Its rates are fractions of that device's peak; of any other they mean nothing."""
    mine = tmp_path / "mine.yaml"
    laptop = (read.CONF / "calibration" / "laptop.yaml").read_text(encoding="utf-8")
    mine.write_text(laptop.replace("device: laptop", "device: cpu"), encoding="utf-8")
    filled, chosen = adapt(
        as_typed() | {"calibration": {"path": str(mine)}}, {**CHOICES, "calibration": "file"}, ["backend=measure"]
    )
    config = resolve(filled, chosen)
    assert (config.cluster.device, config.cluster.calibration) == ("cpu", "mine")
    assert config.calibration == str(mine)


def test_torchrun_and_srun_say_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}) == (16, 8)
    assert launched({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}) == (4, 2)
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script before its srun
    assert launched({}) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rank_count(None) == 2
    with pytest.raises(ValueError, match="processes=4, but 2 were started"):
        rank_count(4)


def test_gpus_are_one_rank_each_of_a_known_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_hand, "gpu_names", lambda: ("NVIDIA H100 80GB HBM3",) * 8)
    assert rank_count(None) == 8
    cluster = cluster_from_mapping(cluster_at_hand(8, None))
    assert (cluster.device, cluster.calibration, cluster.nics, cluster.memory_gib) == ("H100", "h100", 8, 79.6)
    assert known_gpu("NVIDIA H200") == "H200" and known_gpu("NVIDIA A100-SXM4-80GB") == "A100"
    with pytest.raises(ValueError, match="'NVIDIA L4', which is none of A100"):
        known_gpu("NVIDIA L4")
    monkeypatch.setattr(at_hand, "gpu_names", lambda: ("NVIDIA A100-SXM4-80GB",))
    with pytest.raises(ValueError, match="no calibration for A100 is shipped"):
        cluster_at_hand(1, None)


def test_several_nodes_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_hand, "gpu_names", lambda: ("NVIDIA H800",) * 8)
    monkeypatch.setattr(at_hand, "launched", lambda: (16, 8))
    cluster = cluster_from_mapping(cluster_at_hand(16, None))
    assert (cluster.nodes, cluster.gpus, cluster.nic_gbs_per_gpu()) == (2, 16, 50.0)
