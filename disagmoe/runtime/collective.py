"""Waiting for a collective, with an error that says among whom."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from disagmoe.runtime.errors import PeerLostError


def finish(work: object, group: dist.ProcessGroup | None, timeout_s: float | None = None) -> None:
    """Wait for an asynchronous collective; `timeout_s` None: the group's own. PeerLostError names its ranks."""
    assert isinstance(work, dist.Work)
    try:
        if timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as reason:
        ranks = ", ".join(str(rank) for rank in dist.get_process_group_ranks(group))
        first = (str(reason).strip().splitlines() or ["no reason given"])[0]
        raise PeerLostError(f"collective over ranks {ranks}: {first}") from None


def sum_over_world(values: Tensor) -> Tensor:
    """A small vector summed over all ranks, on the host (the world group is gloo's)."""
    host = values.cpu()
    if dist.get_world_size() > 1:
        finish(dist.all_reduce(host, async_op=True), None)
    return host
