"""Arrays that stand for the edges of a graph: keys of rows, and edges between rows of equal key.

Decides how keys become the small numbers that the compiled loops of
`graph_kernels.py` count with, so that graphs of 10^5 nodes are built in milliseconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagmoe.graph_kernels import link_groups, sort_edges, stable_order
from disagmoe.plan.program import IntArray

LongArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Edges = tuple[LongArray, LongArray]  # (from, to), node numbers

_KEY_LIMIT = 1 << 62
_SPARSE = 16
"""Possible keys per row (and a million more) above which keys are renumbered: counting them would take longer."""


def compress_edges(src: LongArray, dst: LongArray, n_nodes: int) -> tuple[IntArray, IntArray, IntArray]:
    """Edge list to (succ_ptr, succ, indegree), sorted by source, then destination; repeated edges count once."""
    return sort_edges(src, dst, n_nodes)


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
    low = int(chunk.min())
    groups, count = _numbered(src_group, dst_group)
    return link_groups(
        src, groups[0], chunk[src] - low, dst, groups[1], chunk[dst] - low, count, int(chunk.max()) - low + 1
    )


def join(src: LongArray, src_key: LongArray, dst: LongArray, dst_key: LongArray) -> Edges:
    """All (from, to) with equal keys."""
    if not src.size or not dst.size:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    keys, count = _numbered(src_key, dst_key)
    whole = (np.zeros(side.shape[0], dtype=np.int64) for side in (src, dst))
    return link_groups(_long(src), keys[0], next(whole), _long(dst), keys[1], next(whole), count, 1)


def sort_order(key: LongArray) -> LongArray:
    """As np.argsort(key, kind="stable")."""
    if not key.size:
        return np.empty(0, dtype=np.int64)
    keys, count = _numbered(key)
    return stable_order(keys[0], count)


def _numbered(*keys: LongArray) -> tuple[list[LongArray], int]:
    """The keys as numbers from 0 in the same order, equal where they are equal, and how many numbers there may be."""
    low = min(int(key.min()) for key in keys)
    span = max(int(key.max()) for key in keys) - low + 1
    rows = sum(key.shape[0] for key in keys)
    if span <= _SPARSE * rows + (1 << 20):
        return [_long(key - low) for key in keys], span
    values, number = np.unique(np.concatenate(keys), return_inverse=True)
    ends = np.cumsum([key.shape[0] for key in keys])[:-1]
    return [_long(part) for part in np.split(number, ends)], values.shape[0]


def _long(values: NDArray[np.integer]) -> LongArray:
    return np.ascontiguousarray(values, dtype=np.int64)
