"""The hardware at hand as a cluster, and what a measured run takes for granted on it.

Decides how many ranks there are (those that torchrun or Slurm started, else one per
GPU, else four processes on the CPU), how the cost model sees them, and the defaults
of `backend=measure`: expert parallelism over half of the ranks, so that every system
has a plan, and eight micro-batches of one sequence on as many data ranks. What is
set on the command line stays as it is.

On a CPU ranks are devices of the kind that the calibration is for; GPUs must be of a
kind that disagmoe/specs/devices.py knows. How nodes are connected cannot be seen
from here: one NIC of 400 Gbit/s per GPU is taken, unless a cluster file says
otherwise. The calibration is this machine's own where there is one (`make calibrate`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.choices import FROM_FILE, chosen_path
from bench.machine import gpu_names
from disagmoe.cost.calibration import load_calibration
from disagmoe.specs import fields as read
from disagmoe.specs.devices import device, device_names

OWN_CALIBRATION = "local"
CPU_RANKS = 4
CPU_MEMORY_GIB = 8.0
MICRO_BATCHES = 8
NIC_GBIT = 400.0
SHIPPED_CALIBRATIONS = {"H800": "h800", "H100": "h100", "H200": "h100", "H20": "h100"}
_DEFAULT_EP = 16


def launched(environment: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """(processes, processes per node) that torchrun or srun started; None where this process is alone."""
    found = os.environ if environment is None else environment
    if "RANK" in found and "WORLD_SIZE" in found:
        return int(found["WORLD_SIZE"]), int(found.get("LOCAL_WORLD_SIZE", found["WORLD_SIZE"]))
    tasks = int(found.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_PROCID" in found and tasks > 1:
        return tasks, max(1, tasks // int(found.get("SLURM_STEP_NUM_NODES", "1")))
    return None


def adapt(
    values: Mapping[str, Any], choices: Mapping[str, str | None], overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Values and choices of a measured run with the hardware at hand filled in. Raises ValueError."""
    filled, chosen = dict(values), dict(choices)
    if any(re.match(r"[+~]*cluster[.=@]", override) for override in overrides):
        ranks = sum(int(group["count"]) * int(group["gpus"]) for group in values["cluster"].get("groups", ()))
    else:
        ranks = rank_count(values.get("processes"))
        filled["cluster"], chosen["cluster"] = cluster_at_hand(ranks, _calibration_asked(values, choices)), "local"
    if not ranks:  # a cluster file: its defaults are those of a planned run
        return filled, chosen
    half = max(1, ranks // 2)
    if values["ep"] == _DEFAULT_EP:
        filled["ep"] = half
    filled["batch"] = MICRO_BATCHES * half if values["batch"] is None else values["batch"]
    filled["micro_batch"] = 1 if values["micro_batch"] is None else values["micro_batch"]
    return filled, chosen


def _calibration_asked(values: Mapping[str, Any], choices: Mapping[str, str | None]) -> str | None:
    """Name or path of the calibration on the command line; a user's own are paths by now."""
    choice = choices.get("calibration")
    return str(chosen_path("calibration", values["calibration"])) if choice == FROM_FILE else choice


def rank_count(asked: int | None) -> int:
    """How many ranks a measured run has here. Raises ValueError where the launcher started another number."""
    started = launched()
    if started is None:
        return asked or len(gpu_names()) or CPU_RANKS
    if asked not in (None, started[0]):
        raise ValueError(f"processes={asked}, but {started[0]} were started; leave it out under torchrun or srun")
    return started[0]


def cluster_at_hand(ranks: int, calibration: str | None) -> dict[str, Any]:
    """`ranks` ranks of this hardware as the content of a cluster file.

    `calibration` is the name or path of the one asked for; of a path the content has the name of the file only.
    Raises ValueError where there is no such calibration.
    """
    found = gpu_names()
    per_node = (launched() or (ranks, ranks))[1]
    nodes = -(-ranks // per_node)
    common = {"name": "local", "groups": [{"count": nodes, "gpus": per_node, "nics": per_node, "nic_gbit": NIC_GBIT}]}
    if found:
        kind = known_gpu(found[0])
        own = own_calibration(kind)
        named = calibration or own or SHIPPED_CALIBRATIONS.get(kind)
        if named is None:
            raise ValueError(f"no calibration for {kind} is shipped: run `make calibrate` first, or name one")
        return {**common, "device": kind, "calibration": _name_of(named)}
    named = calibration or own_calibration("cpu") or "laptop"
    kind = load_calibration(named).device
    kind = kind if device(kind).name in ("cpu", "laptop") else "laptop"
    limits = {"memory_gib": CPU_MEMORY_GIB, "reserve_gib": 0.25}
    return {**common, "device": kind, "calibration": _name_of(named), **limits}


def _name_of(calibration: str) -> str:
    return calibration if calibration in read.known("calibration") else Path(calibration).stem


def own_calibration(kind: str) -> str | None:
    """The calibration that `make calibrate` wrote for devices of this kind."""
    if OWN_CALIBRATION not in read.own("calibration"):
        return None
    return OWN_CALIBRATION if load_calibration(OWN_CALIBRATION).device == kind else None


def known_gpu(name: str) -> str:
    """The device that a GPU's own name means: "NVIDIA H100 80GB HBM3" is an H100. Raises ValueError."""
    words = re.split(r"[\s-]+", name.upper())
    for known in device_names():
        if known.upper() in words:
            return known
    raise ValueError(
        f"this GPU calls itself {name!r}, which is none of {', '.join(device_names())}: "
        "add it to disagmoe/specs/devices.py, or give cluster=<file>"
    )
