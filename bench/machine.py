"""The machine a run was executed on: what emulated and measured numbers depend on besides their configuration.

Decides which facts those are: the device, how many cores this process may use, the
host's name and the version of torch. Simulated numbers depend on none of them.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """`device` is the GPU's name, or the processor's where there is none or none is used."""

    device: str
    cores: int
    host: str
    torch: str


@cache
def machine(*, gpus: bool) -> Machine:
    """This machine. `gpus`: the run uses GPUs where there are any. Raises ValueError without torch."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        raise ValueError(
            "backend=emulate and backend=measure need torch, which is not installed here; "
            "allowed without it: backend=simulate"
        ) from None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine((_gpu() if gpus else None) or _processor(), cores, platform.node(), installed)


def _gpu() -> str | None:
    import torch  # slow to load, and only asked for where a run uses it anyway

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
