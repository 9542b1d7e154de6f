"""The machine a run was executed on: what emulated and measured numbers depend on besides their configuration.

Decides which facts those are: the device, how many cores this process may use, the
host's name and the version of torch. Simulated numbers depend on none of them.
"""

from __future__ import annotations

import os
import platform
import subprocess
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
    names = gpu_names() if gpus else ()
    return Machine(names[0] if names else _processor(), cores, platform.node(), installed)


@cache
def gpu_names() -> tuple[str, ...]:
    """Names of this machine's GPUs, asked for without making a CUDA context: ranks may still be forked."""
    import torch  # slow to load, and only asked for where a run uses it anyway

    count = torch.cuda.device_count()
    if not count:
        return ()
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30, stdin=subprocess.DEVNULL)
        names = [line.strip() for line in told.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError):
        names = []
    return tuple((names or ["unknown GPU"])[:1] * count)


def _processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
