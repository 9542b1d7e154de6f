"""Compiled loops that turn the operations of a Program into the edges of a graph.

Decides nothing: groups of operations and what follows from them are
`plan/dependencies.py`'s. All loops are linear in nodes and edges, as their keys are
small numbers. They have a module of their own beside `kernels.py`, which holds the
loops that have a notion of time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., object])


def _jit(function: Function) -> Function:
    """numba.njit with the settings of `kernels.py`, keeping the function's type."""
    return cast(Function, njit(cache=True, nogil=True, error_model="numpy")(function))


@_jit
def stable_order(key: Longs, n_keys: int) -> Longs:
    """np.argsort(key, kind="stable") of keys from 0 to n_keys - 1, in linear time."""
    at = np.zeros(n_keys + 1, np.int64)
    for i in range(key.shape[0]):
        at[key[i] + 1] += 1
    for k in range(n_keys):
        at[k + 1] += at[k]
    order = np.empty(key.shape[0], np.int64)
    for i in range(key.shape[0]):
        order[at[key[i]]] = i
        at[key[i]] += 1
    return order


@_jit
def _chunk_ranks(group: Longs, chunk: Longs, n_groups: int, n_chunks: int) -> Ints:
    """[n_groups * n_chunks]: how many different chunks up to this one a group has; its last entry counts them all."""
    ranks = np.zeros(n_groups * n_chunks, np.int32)
    for i in range(group.shape[0]):
        ranks[group[i] * n_chunks + chunk[i]] = 1
    for i in range(ranks.shape[0]):
        if i % n_chunks > 0:
            ranks[i] += ranks[i - 1]
    return ranks


@_jit
def link_groups(
    src: Longs,
    src_group: Longs,
    src_chunk: Longs,
    dst: Longs,
    dst_group: Longs,
    dst_chunk: Longs,
    n_groups: int,
    n_chunks: int,
) -> tuple[Longs, Longs]:
    """All (from, to) between members of one group: of equal chunk rank where both have equally many chunks, else all.

    Groups are 0 to n_groups - 1 and chunks 0 to n_chunks - 1, one per member of
    `src` and of `dst`. Sorted as `dst` is, then as `src` is.
    """
    order = stable_order(src_group, n_groups)
    first = np.zeros(n_groups + 1, np.int64)
    for i in range(src.shape[0]):
        first[src_group[i] + 1] += 1
    for g in range(n_groups):
        first[g + 1] += first[g]
    here = _chunk_ranks(src_group, src_chunk, n_groups, n_chunks)
    there = _chunk_ranks(dst_group, dst_chunk, n_groups, n_chunks)
    size = 0
    for i in range(dst.shape[0]):
        size += first[dst_group[i] + 1] - first[dst_group[i]]
    out, into, n = np.empty(size, np.int64), np.empty(size, np.int64), 0
    for i in range(dst.shape[0]):
        row = dst_group[i] * n_chunks
        by_chunk = here[row + n_chunks - 1] == there[row + n_chunks - 1]
        rank = there[row + dst_chunk[i]]
        for k in range(first[dst_group[i]], first[dst_group[i] + 1]):
            j = order[k]
            if not by_chunk or here[row + src_chunk[j]] == rank:
                out[n], into[n] = src[j], dst[i]
                n += 1
    return out[:n], into[:n]


@_jit
def sort_edges(src: Longs, dst: Longs, n_nodes: int) -> tuple[Ints, Ints, Ints]:
    """Edges without repetition as (succ_ptr, succ, indegree), by source, then destination."""
    order = stable_order(dst, n_nodes)
    by_source = stable_order(src[order], n_nodes)
    succ_ptr, indegree = np.zeros(n_nodes + 1, np.int32), np.zeros(n_nodes, np.int32)
    succ, n = np.empty(src.shape[0], np.int32), 0
    before = np.int64(-1)
    for k in range(src.shape[0]):
        edge = order[by_source[k]]
        if k > 0 and src[edge] == src[before] and dst[edge] == dst[before]:
            continue
        succ[n] = dst[edge]
        n += 1
        succ_ptr[src[edge] + 1] += 1
        indegree[dst[edge]] += 1
        before = edge
    for node in range(n_nodes):
        succ_ptr[node + 1] += succ_ptr[node]
    return succ_ptr, succ[:n], indegree
