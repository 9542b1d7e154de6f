"""Waiting for a collective, with an error that says among whom."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from disagmoe.runtime.errors import PeerLostError

# Renamed in torch 2.13.
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum `whole` [ranks * n] over the group; `output` [n] gets this rank's part."""
    work = _reduce_scatter(output, whole, group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work


def all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to collect `part` [n, ...] of every rank of the group in `output`, one after the other."""
    work = _all_gather(output, part.contiguous(), group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work


def finish(work: dist.Work, group: dist.ProcessGroup | None) -> None:
    """Wait for an asynchronous collective, at most the group's time-out. PeerLostError names its ranks."""
    try:
        work.wait()
    except RuntimeError as reason:
        ranks = ", ".join(str(rank) for rank in dist.get_process_group_ranks(group))
        first = (str(reason).strip().splitlines() or ["no reason given"])[0]
        raise PeerLostError(f"collective over ranks {ranks}: {first}") from None


def sum_over_world(values: Tensor) -> Tensor:
    """A small vector summed over all ranks, on the host (the world group is gloo's)."""
    host = values.cpu()
    if dist.get_world_size() > 1:
        work = dist.all_reduce(host, async_op=True)
        assert work is not None
        finish(work, None)
    return host
