"""The launcher: results, start-ups in a row, ports, what it leaves behind."""

import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from disagmoe.runtime.environment import init_from_environment
from disagmoe.runtime.errors import LaunchError, RankError
from disagmoe.runtime.launch import Pool, spawn


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Runs of other tests may have folders in the usual place."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def total(context, factor):
    value = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(value)
    return context.rank, factor * value


def test_results_come_back_by_rank():
    assert spawn(3, total, (2.0,)) == [(r, torch.tensor([12.0])) for r in range(3)]
    assert spawn(1, lambda context: (context.world_size, context.device.type)) == [(1, "cpu")]


def test_five_start_ups_in_a_row_leave_nothing_behind():
    """All groups are made by all ranks (made by their members only, two of four ranks would hang)."""

    def several_groups(context):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 1, 2, 3])]
        mine = halves[context.rank // 2]
        value = torch.ones(1)
        dist.all_reduce(value, group=mine)
        dist.all_reduce(value, group=halves[2])
        for group in (mine, halves[2]):
            dist.destroy_process_group(group)
        return float(value), threading.active_count()

    spawn(2, total, (1.0,))  # what is opened once is open by now
    before = footprint()
    for _ in range(5):
        assert spawn(4, several_groups, timeout_s=30.0) == [(8.0, 1)] * 4
    assert footprint() == before


def footprint():
    """Threads, open files and temporary folders of this process."""
    folders = [path.name for path in Path(tempfile.gettempdir()).iterdir()]
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), folders  # noqa: PTH208


def test_threads_of_groups_are_given_back(pools):
    first = pools(2).run(threads_after_groups)
    assert pools(2).run(threads_after_groups) == first


def threads_after_groups(context):
    groups = [dist.new_group([0, 1]) for _ in range(6)]
    for group in groups:
        dist.barrier(group)
        dist.destroy_process_group(group)
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def test_an_occupied_port_and_three_runs_at_once():
    """Nothing depends on a port, so torch's default one may be taken."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        with Pool(2) as one, Pool(2) as two, Pool(2) as three:
            for pool in (one, two, three):
                assert pool.run(total, 1.0)[1] == (1, torch.tensor([3.0]))


def test_ranks_listen_on_the_loopback_interface_only():
    assert spawn(2, listening) == [["0100007F"], ["0100007F"]]


def listening(context):
    dist.barrier()
    inodes = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        target = os.readlink(f"/proc/self/fd/{name}") if os.path.lexists(f"/proc/self/fd/{name}") else ""  # noqa: PTH115
        inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return sorted(found)


def test_a_pool_runs_on_until_a_call_fails():
    with Pool(2) as pool:
        assert pool.run(total, 1.0)[0] == (0, torch.tensor([3.0]))
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: KeyError: 'lost'"):
            pool.run(raise_on, 1)
        assert not pool.is_open
        with pytest.raises(LaunchError, match="ended"):
            pool.run(total, 1.0)


def raise_on(context, rank):
    if context.rank == rank:
        raise KeyError("lost")


def test_ranks_die_with_their_launcher():
    """Also when it is killed without a chance to clean up."""
    reading, writing = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        try:
            pool = Pool(2)
            os.write(writing, ",".join(str(pid) for pid in pool.run(own_pid)).encode())
            time.sleep(60.0)
        finally:
            os._exit(1)
    pids = [int(pid) for pid in os.read(reading, 100).decode().split(",")]
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    until = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() and "Z" not in state(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert time.monotonic() < until
    os.close(reading)
    os.close(writing)


def own_pid(context):
    return os.getpid()


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize(("world", "device", "says"), [(0, "cpu", "0 processes"), (2, "tpu", "allowed: cpu, cuda")])
def test_what_cannot_be_started(world, device, says):
    with pytest.raises(LaunchError, match=says):
        spawn(world, own_pid, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_where_there_is_none():
    with pytest.raises(
        RankError, match=r"rank \d of 2 failed: LaunchError: device=cuda, but torch finds no CUDA device"
    ):
        spawn(2, own_pid, device="cuda")


def join_as_torchrun_would(context, port, absent=-1, timeout_s=10.0):
    dist.destroy_process_group()
    if context.rank == absent:
        time.sleep(60.0)
    environment = {
        "RANK": str(context.rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(context.rank), "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    joined = init_from_environment(environment=environment, group_timeout_s=timeout_s)
    return total(joined, 1.0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_joining_by_environment():
    assert spawn(3, join_as_torchrun_would, (free_port(),)) == [(r, torch.tensor([6.0])) for r in range(3)]


def test_a_rank_that_does_not_arrive_is_named():
    says = r"^rank 1 of 3 does not answer, it is in .*; rank \d failed: PeerLostError: rank 1 did not arrive in 1\.5 s"
    with pytest.raises(RankError, match=says):
        spawn(3, join_as_torchrun_would, (free_port(), 1, 1.5), timeout_s=30.0)


def test_joining_at_a_port_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = rf"rank 0 of 3 failed: LaunchError: port 127\.0\.0\.1:{port} is in use; set MASTER_PORT to a free one"
        with pytest.raises(RankError, match=message):
            spawn(3, join_as_torchrun_would, (port,), timeout_s=30.0)
