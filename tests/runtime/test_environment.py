"""What torchrun and Slurm put into the environment."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from disagmoe.runtime.environment import Rendezvous, first_host, read_environment
from disagmoe.runtime.errors import LaunchError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "9", "SLURM_NTASKS": "11", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_JOB_ID": "1234567",
}  # fmt: skip


def test_torchrun():
    assert read_environment(TORCHRUN) == Rendezvous(5, 8, 1, 4, "node0", 29400, False, "2")
    alone = {k: v for k, v in TORCHRUN.items() if not k.startswith("TORCHELASTIC")} | {"RANK": "0"}
    assert read_environment(alone) == Rendezvous(0, 8, 1, 4, "node0", 29400, True)


def test_slurm():
    assert read_environment(SLURM) == Rendezvous(9, 11, 1, 3, "gpu07", 20000 + 1234567 % 20000, False)
    assert read_environment(SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "7"}).port == 7


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("gpu[03-05,9],cpu1", "gpu03"), ("a,b", "a"), ("n7", "n7"), ("rack1-n[12]", "rack1-n12"), ("", "")],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "neither RANK .* nor SLURM_PROCID"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, "MASTER_PORT is not set"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR is not set"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE='many'"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 is outside 0 to 7"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4x2"}, "'4x2' cannot be read"),
        (SLURM | {"SLURM_NODEID": "3"}, "lists 3 nodes"),
    ],
)
def test_an_incomplete_environment_is_one_clear_line(environment, says):
    with pytest.raises(LaunchError, match=says) as caught:
        read_environment(environment)
    assert "\n" not in str(caught.value)


SCRIPT = """
import pathlib, sys
import torch, torch.distributed as dist
from disagmoe.runtime.environment import init_from_environment
context = init_from_environment()
value = torch.tensor([context.rank + 1.0])
dist.all_reduce(value)
said = f"rank {context.rank} of {context.world_size}, {context.local_size} here: {value.item():g}"
pathlib.Path(sys.argv[1], f"rank{context.rank}").write_text(said)  # two processes on one pipe may share a line
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_itself(tmp_path):
    """One command on one machine, on the loopback interface."""
    script = tmp_path / "join.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *address, str(script), str(tmp_path)],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert said == ["rank 0 of 2, 2 here: 3", "rank 1 of 2, 2 here: 3"]
