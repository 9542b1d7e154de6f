"""What of a rank's state is saved: pieces of parameters and moments as runs of a flat global tensor.

Decides the layout of a checkpoint. Every parameter is saved under its global name
as a flat tensor, and its two AdamW moments likewise; every rank writes what its
shards have of them and nothing twice. A rank of another placement reads what *its*
shards have. Buffers (correction biases) are written by the first rank that holds
them. Planners of torch.distributed.checkpoint do the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from disagmoe.runtime.buckets import Bucket
from disagmoe.runtime.step import StepRunner


@dataclass(frozen=True)
class Chunk:
    """Values `start` up to start + len(data) of the flat tensor `name` of `size` values; `data` is a view."""

    name: str
    start: int
    size: int
    data: Tensor

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.name, torch.Size([self.start]))

    @property
    def bounds(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.data.numel()]))


def shard_chunks(runner: StepRunner) -> list[Chunk]:
    """What this rank's shards have of parameters and moments."""
    assert runner.optimizer is not None
    chunks: list[Chunk] = []
    state = zip(runner.optimizer.buckets, runner.optimizer.first, runner.optimizer.second, strict=True)
    for bucket, first, second in state:
        values = bucket.values[bucket.shard]
        for kind, flat in (("model", values), ("first", first), ("second", second)):
            chunks += _cut(bucket, flat, kind)
    return chunks


def buffer_chunks(runner: StepRunner, *, saving: bool) -> list[Chunk]:
    """Buffers of this rank; `saving`: only those that it is the first to hold."""
    site = runner.site
    first = site.me == site.me._replace(replica=0, local=0)
    if saving and not first:
        return []
    pieces = runner.holdings.pieces()
    flat = (
        (name, piece.value.view(-1)) for name, piece in pieces.items() if not isinstance(piece.tensor, nn.Parameter)
    )
    return [Chunk(f"model/{name}", 0, value.numel(), value) for name, value in flat]


def _cut(bucket: Bucket, shard: Tensor, kind: str) -> Iterator[Chunk]:
    """The pieces of a bucket that lie in this rank's shard, in part or whole."""
    own = bucket.own
    for run in bucket.runs:
        start, stop = max(run.start, own.start), min(run.stop, own.stop)
        if start < stop:
            data = shard[start - own.start : stop - own.start]
            yield Chunk(f"{kind}/{run.name}", run.offset + start - run.start, run.whole, data)


class ChunkSavePlanner(SavePlanner):
    """Writes the chunks of this rank."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = {chunk.index: chunk for chunk in chunks}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the chunks say all."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(chunk) for chunk in self._chunks.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._chunks[dataclasses.replace(write_item.index, index=None)].data


class ChunkLoadPlanner(LoadPlanner):
    """Fills the chunks of this rank from whatever chunks were saved."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = {(chunk.name, chunk.start): chunk for chunk in chunks}
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items: list[ReadItem] = []
        for chunk in self._chunks.values():
            saved = self._metadata.state_dict_metadata.get(chunk.name)
            if not isinstance(saved, TensorStorageMetadata):
                raise ValueError(f"{chunk.name} is not in the checkpoint")
            if saved.size != torch.Size([chunk.size]) or saved.properties.dtype != chunk.data.dtype:
                raise ValueError(
                    f"{chunk.name} has {list(saved.size)} values of {saved.properties.dtype} in the checkpoint, "
                    f"the run needs {chunk.size} of {chunk.data.dtype}"
                )
            items += create_read_items_for_chunk_list(chunk.name, saved, [chunk.bounds])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} holds no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        data = self._chunks[index.fqn, index.offset[0]].data
        return data.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: what `resolve_tensor` gave is the storage itself (on a GPU the reader copied into it)."""


def _write_item(chunk: Chunk) -> WriteItem:
    properties = TensorProperties(dtype=chunk.data.dtype)
    data = TensorWriteData(chunk=chunk.bounds, properties=properties, size=torch.Size([chunk.size]))
    return WriteItem(index=chunk.index, type=WriteItemType.SHARD, tensor_data=data)
