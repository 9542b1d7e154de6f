"""Arrays that stand for the edges of a graph: keys of rows, and edges between rows of equal key.

All of it is sorting and searching, so that graphs of 10^5 nodes are built in milliseconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagmoe.plan.program import IntArray

LongArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Edges = tuple[LongArray, LongArray]  # (from, to), node numbers

_KEY_LIMIT = 1 << 62


def compress_edges(src: LongArray, dst: LongArray, n_nodes: int) -> tuple[IntArray, IntArray, IntArray]:
    """Edge list to (succ_ptr, succ, indegree), sorted by source, then destination."""
    # One int64 key per edge: sorting it is deterministic and faster than sorting pairs.
    src, dst = np.divmod(np.sort(src * n_nodes + dst), max(n_nodes, 1))
    succ_ptr = np.zeros(n_nodes + 1, dtype=np.int32)
    np.cumsum(np.bincount(src, minlength=n_nodes), out=succ_ptr[1:])
    return succ_ptr, dst.astype(np.int32), np.bincount(dst, minlength=n_nodes).astype(np.int32)


def pack_key(*columns: NDArray[np.integer]) -> LongArray:
    """One int64 per row, equal where all columns are equal; sorts like the tuple of columns."""
    key = np.zeros(columns[0].shape[0], dtype=np.int64)
    span = 1
    for column in columns:
        low = int(column.min(initial=0))
        width = int(column.max(initial=0)) - low + 1
        if span * width >= _KEY_LIMIT:
            values, key = np.unique(key, return_inverse=True)
            span = values.shape[0]
        key = key * width + (column.astype(np.int64) - low)
        span *= width
    return key


def link(src: LongArray, src_group: LongArray, dst: LongArray, dst_group: LongArray, chunk: LongArray) -> Edges:
    """Edges between nodes of equal group: chunk by chunk where counts agree, else all to all."""
    if not src.size or not dst.size:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    if chunk.min() == chunk.max():
        return join(src, src_group, dst, dst_group)
    src_rank, src_count = _chunk_ranks(src_group, chunk[src])
    dst_rank, dst_count = _chunk_ranks(dst_group, chunk[dst])
    width = int(chunk.max() - chunk.min()) + 2
    by_chunk_src = src_count == _lookup(dst_group, dst_count, src_group)
    by_chunk_dst = dst_count == _lookup(src_group, src_count, dst_group)
    src_key = src_group * width + np.where(by_chunk_src, src_rank + 1, 0)
    dst_key = dst_group * width + np.where(by_chunk_dst, dst_rank + 1, 0)
    return join(src, src_key, dst, dst_key)


def _chunk_ranks(group: LongArray, chunk: LongArray) -> tuple[LongArray, LongArray]:
    """Rank of each chunk among the distinct chunks of its group, and how many those are."""
    width = int(chunk.max() - chunk.min()) + 1
    distinct, inverse = np.unique(group * width + (chunk - chunk.min()), return_inverse=True)
    owner = distinct // width
    start = np.searchsorted(owner, owner, side="left")
    count = np.searchsorted(owner, owner, side="right") - start
    rank = np.arange(distinct.shape[0]) - start
    return rank[inverse], count[inverse]


def _lookup(keys: LongArray, values: LongArray, wanted: LongArray) -> LongArray:
    """values[i] for some i with keys[i] == wanted, -1 where there is none."""
    distinct, index = np.unique(keys, return_index=True)
    at = np.minimum(np.searchsorted(distinct, wanted), distinct.shape[0] - 1)
    return np.where(distinct[at] == wanted, values[index[at]], -1)


def join(src: LongArray, src_key: LongArray, dst: LongArray, dst_key: LongArray) -> Edges:
    """All (from, to) with equal keys."""
    order = np.argsort(src_key, kind="stable")
    keys = src_key[order]
    low = np.searchsorted(keys, dst_key, side="left")
    count = np.searchsorted(keys, dst_key, side="right") - low
    skip = np.repeat(low - (np.cumsum(count) - count), count)
    return src[order][np.arange(skip.shape[0]) + skip], np.repeat(dst, count)
