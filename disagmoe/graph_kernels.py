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
    begins, indegree = np.zeros(n_nodes + 1, np.int32), np.zeros(n_nodes, np.int32)
    for edge in range(src.shape[0]):
        begins[src[edge] + 1] += 1
    for node in range(n_nodes):
        begins[node + 1] += begins[node]
    succ, at = np.empty(src.shape[0], np.int32), begins[:-1].copy()
    for k in range(src.shape[0]):
        edge = order[k]
        node, place = src[edge], at[src[edge]]
        if place > begins[node] and succ[place - 1] == dst[edge]:
            continue
        succ[place] = dst[edge]
        at[node] += 1
        indegree[dst[edge]] += 1
    succ_ptr = np.zeros(n_nodes + 1, np.int32)
    for node in range(n_nodes):
        n = succ_ptr[node]
        for k in range(begins[node], at[node]):
            succ[n] = succ[k]
            n += 1
        succ_ptr[node + 1] = n
    return succ_ptr, succ[: succ_ptr[n_nodes]], indegree


@_jit
def _place(key: int, keys: Longs, slots: Ints) -> int:
    """The slot of a key in an open-addressed table: where it is (slots >= 0), or where it would go."""
    mask = slots.shape[0] - 1
    at = ((key * np.int64(-7046029254386353131)) >> np.int64(33)) & mask
    while slots[at] >= 0 and keys[slots[at]] != key:
        at = (at + 1) & mask
    return int(at)


@_jit
def distinct_rows(columns: Ints) -> tuple[Ints, Ints]:
    """Number equal columns of [columns, rows] by first appearance: (number of each row, first row of each number).

    The product of the columns' ranges must be below 2^62.
    """
    n_columns, n_rows = columns.shape
    key = np.zeros(n_rows, np.int64)
    for c in range(n_columns):
        low, high = columns[c].min(), columns[c].max()
        for i in range(n_rows):
            key[i] = key[i] * (high - low + 1) + (columns[c, i] - low)
    number, first, keys = np.empty(n_rows, np.int32), np.empty(n_rows, np.int32), np.empty(n_rows, np.int64)
    slots, n = np.full(1024, -1, np.int32), 0
    for i in range(n_rows):
        if i > 0 and key[i] == key[i - 1]:
            number[i] = number[i - 1]
            continue
        at = _place(key[i], keys, slots)
        if slots[at] < 0:
            slots[at], keys[n], first[n] = n, key[i], i
            n += 1
            number[i] = n - 1
            if 2 * n > slots.shape[0]:
                slots = np.full(2 * slots.shape[0], -1, np.int32)
                for k in range(n):
                    slots[_place(keys[k], keys, slots)] = k
        else:
            number[i] = slots[at]
    return number, first[:n].copy()
