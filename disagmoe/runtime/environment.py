"""Joining processes that torchrun or Slurm has started.

Decides what is read from the environment: rank, number of processes, those on
this machine, and where rank 0 keeps the store (MASTER_ADDR and MASTER_PORT; under
Slurm the first host of the job and a port made from its number).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in its __all__

from disagmoe.runtime.child import Context, join, keep_freed_memory, own_device
from disagmoe.runtime.errors import LaunchError, first_line
from disagmoe.runtime.launch import GROUP_TIMEOUT_S

_FIRST_PORT, _PORTS = 20000, 20000  # Slurm: port = 20000 + job number modulo 20000


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a run meet. `hosts_store`: this process keeps the store itself."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    hosts_store: bool
    attempt: str = "0"


def init_from_environment(
    *, device: str = "cpu", group_timeout_s: float = GROUP_TIMEOUT_S, environment: Mapping[str, str] | None = None
) -> Context:
    """Join the group that torchrun or Slurm has started and return this rank's place in it.

    Raises LaunchError for an incomplete environment or a port that is in use,
    PeerLostError naming the ranks that did not arrive.
    """
    keep_freed_memory()
    meeting = read_environment(os.environ if environment is None else environment)
    if meeting.host in ("localhost", "127.0.0.1", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = Context(
        rank=meeting.rank,
        world_size=meeting.world_size,
        local_rank=meeting.local_rank,
        local_size=meeting.local_size,
        device=own_device(device, meeting.local_rank),
        group_timeout_s=group_timeout_s,
    )
    join(PrefixStore(f"disagmoe-{meeting.attempt}", _store(meeting, group_timeout_s)), context)
    return context


def read_environment(environment: Mapping[str, str]) -> Rendezvous:
    """What torchrun, or else Slurm, has put into the environment."""
    if "RANK" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
    else:
        raise LaunchError("neither RANK (torchrun) nor SLURM_PROCID (srun) is set: this process belongs to no group")
    rank, world_size, local_rank = (_number(environment, name) for name in names[:3])
    local_size = _number(environment, names[3]) if names[3] else _slurm_local_size(environment)
    if not 0 <= rank < world_size:
        raise LaunchError(f"{names[0]}={rank} is outside 0 to {world_size - 1} ({names[1]}={world_size})")
    host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_JOB_NODELIST", ""))
    if not host:
        raise LaunchError("MASTER_ADDR is not set: the address of the machine with rank 0 is needed")
    if "MASTER_PORT" in environment or "SLURM_JOB_ID" not in environment:
        port = _number(environment, "MASTER_PORT")
    else:
        port = _FIRST_PORT + _number(environment, "SLURM_JOB_ID") % _PORTS
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Rendezvous(rank, world_size, local_rank, local_size, host, port, rank == 0 and not agent, attempt)


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: "gpu[03-05,9],cpu1" -> "gpu03"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodelist)
    return "" if match is None else match.group(1) + (match.group(2) or "")


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise LaunchError(f"{name}={value!r}: a whole number is needed" if value else f"{name} is not set")
    return int(value)


def _slurm_local_size(environment: Mapping[str, str]) -> int:
    """Tasks of this node from a list as "4(x2),3"."""
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    counts: list[int] = []
    for item in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise LaunchError(f"SLURM_TASKS_PER_NODE={listed!r} cannot be read; for example 8(x2)")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    node = _number(environment, "SLURM_NODEID") if len(counts) > 1 else 0
    if node >= len(counts):
        raise LaunchError(f"SLURM_NODEID={node}, but SLURM_TASKS_PER_NODE={listed!r} lists {len(counts)} nodes")
    return counts[node]


def _store(meeting: Rendezvous, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(
            meeting.host, meeting.port, meeting.world_size, meeting.hosts_store, timeout=timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        where = f"{meeting.host}:{meeting.port}"
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise LaunchError(f"port {where} is in use; set MASTER_PORT to a free one") from None
        raise LaunchError(f"no store at {where}: {first_line(error)}") from None
