"""Flat storage for what is reduced together, and the reduction itself.

Decides where parameters and gradients lie. All parameters that the same ranks
hold and the same GRAD_SYNC reduces are one *bucket*: parameters and gradients are
views of two flat tensors, so nothing is copied before a reduction. The holders
divide a bucket into equal *shards*: `reduce` leaves the summed gradient of its
shard on every rank (reduce-scatter), the optimizer updates the shard, `gather`
hands the new values round (all-gather). Optimizer state therefore exists once per
set of holders, and all holders get the same bits.

Parameters with weight decay come first in a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disagmoe.model import Piece
from disagmoe.runtime.collective import all_gather, finish, reduce_scatter
from disagmoe.runtime.head_shard import Fragment
from disagmoe.runtime.holdings import Share


class Run(NamedTuple):
    """A piece inside a bucket: values from `start`, of the given shape; `label` also says which rows it has.

    In the flat form of the whole parameter, of `whole` values, it begins at `offset`.
    """

    name: str
    start: int
    shape: torch.Size
    label: str
    offset: int
    whole: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


def _run(piece: Piece, start: int) -> Run:
    shape = piece.value.shape
    if not isinstance(piece, Fragment):
        return Run(piece.name, start, shape, piece.name, 0, shape.numel())
    per_row = shape[1:].numel()
    return Run(piece.name, start, shape, piece.label, piece.first * per_row, piece.rows * per_row)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices (and stacks of them), not to norms, biases and sinks."""
    return parameter.dim() > 1 and not name.rsplit(".", 1)[-1].startswith("b")


@dataclass
class Bucket:
    """Parameters of one Share. `decayed` values from the start take weight decay; `size` without padding."""

    share: Share
    group: dist.ProcessGroup | None
    values: Tensor
    gradients: Tensor
    runs: tuple[Run, ...]
    decayed: int
    size: int
    shard: slice

    @classmethod
    def build(
        cls, share: Share, members: Iterable[tuple[nn.Parameter, list[Piece]]], group: dist.ProcessGroup | None
    ) -> Bucket:
        """Move parameters into flat storage and give them gradients (zero) there."""
        ordered = sorted(members, key=lambda member: not decays(member[1][0].name, member[0]))
        runs: list[Run] = []
        start = decayed = 0
        for parameter, pieces in ordered:
            for piece in pieces:
                view = piece.value
                assert view.is_contiguous()
                offset = int(view.storage_offset()) - int(parameter.storage_offset())
                runs.append(_run(piece, start + offset))
            start += parameter.numel()
            if decays(pieces[0].name, parameter):
                decayed = start
        ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        length = -(-start // ranks)
        first = ordered[0][0]
        values = torch.zeros(length * ranks, dtype=first.dtype, device=first.device)
        gradients = torch.zeros_like(values)
        position = 0
        for parameter, _ in ordered:
            place = slice(position, position + parameter.numel())
            values[place].copy_(parameter.detach().flatten())
            parameter.data = values[place].view(parameter.shape)
            parameter.grad = gradients[place].view(parameter.shape)
            position = place.stop
        shard = slice(rank * length, (rank + 1) * length)
        return cls(share, group, values, gradients, tuple(runs), decayed, start, shard)

    @property
    def own(self) -> range:
        """The values that this rank's shard has, padding left out."""
        return range(self.shard.start, max(self.shard.start, min(self.shard.stop, self.size)))

    def clear(self) -> None:
        """Set all gradients to zero."""
        self.gradients.zero_()

    def reduce(self) -> None:
        """Sum the gradient over the holders; afterwards it is complete in this rank's shard."""
        if self.group is not None:
            summed = torch.empty_like(self.gradients[self.shard])
            finish(reduce_scatter(summed, self.gradients, self.group), self.group)
            self.gradients[self.shard].copy_(summed)

    def square_norm(self) -> float:
        """Sum of squares of the reduced gradient in this rank's shard: over all ranks, every parameter once."""
        return float(torch.linalg.vector_norm(self.gradients[self.shard], dtype=torch.float64)) ** 2

    def gather(self) -> None:
        """Hand the shards' values round; afterwards every holder has all of them."""
        self._gather(self.values)

    def gather_gradients(self) -> None:
        """Make the reduced gradient complete on every holder. For inspection."""
        self._gather(self.gradients)

    def _gather(self, flat: Tensor) -> None:
        if self.group is not None:
            finish(all_gather(flat, flat[self.shard].clone(), self.group), self.group)
