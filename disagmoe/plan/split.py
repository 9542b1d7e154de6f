"""How many layers each virtual stage of a colocated pipeline gets.

What counts is the load of a rank: the layers of all its virtual stages, with the
output head as load of the last and the embedding of the first. A pipeline whose
head is ignored, or whose windowed and full-attention layers fall on the same
ranks, has its slowest rank chosen by accident.

Layers are dealt out one at a time to the least loaded rank, then moved between
stages as long as that lowers the highest load. Exact for layers of one kind; for
mixed layers a local optimum (tests compare it with exhaustive search).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Stages = tuple[tuple[int, ...], ...]
MAX_MOVES = 64
_SPLITS_KEPT = 512
"""Splits that are remembered: a search lays the same candidate out several times."""


def split_layers(
    loads: Sequence[float],
    rank_of_stage: Sequence[int],
    *,
    head_load: float = 0.0,
    embed_load: float = 0.0,
) -> Stages:
    """Contiguous layers of every virtual stage, balanced over ranks.

    `loads` is the time of each layer in any unit; `head_load` and `embed_load`
    are in the same unit and belong to the ranks of the last and the first stage.
    `rank_of_stage` names the rank of each stage (interleaved: stage mod p).
    Every stage gets at least one layer; ValueError where there are too few.
    """
    return _split_layers(tuple(loads), tuple(rank_of_stage), head_load, embed_load)


@lru_cache(maxsize=_SPLITS_KEPT)
def _split_layers(
    loads: tuple[float, ...], rank_of_stage: tuple[int, ...], head_load: float, embed_load: float
) -> Stages:
    stages, layers = len(rank_of_stage), len(loads)
    if layers < stages:
        raise ValueError(f"{layers} layers cannot fill {stages} virtual stages: at least one layer each")
    rank = np.asarray(rank_of_stage)
    ends = np.zeros(int(rank.max()) + 1)
    ends[rank[-1]] += head_load
    ends[rank[0]] += embed_load
    counts = _deal(layers, rank, ends / (sum(loads) / layers))
    counts = _improve(counts, np.asarray(loads, dtype=np.float64), rank, ends)
    bounds = np.concatenate(([0], np.cumsum(counts))).tolist()
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(bounds))


def interleaved_ranks(p: int, v: int) -> tuple[int, ...]:
    """Rank of every virtual stage of an interleaved pipeline: stage s sits on rank s mod p."""
    return tuple(stage % p for stage in range(p * v))


def _deal(layers: int, rank: NDArray[np.int64], ends: NDArray[np.float64]) -> NDArray[np.int64]:
    """Counts per stage: one layer at a time to the least loaded rank, there to its emptiest stage."""
    counts = np.ones(rank.shape[0], dtype=np.int64)
    load = ends + np.bincount(rank, minlength=ends.shape[0])
    for _ in range(layers - rank.shape[0]):
        chosen = int(np.argmin(load))
        mine = np.flatnonzero(rank == chosen)
        counts[mine[np.argmin(counts[mine])]] += 1
        load[chosen] += 1.0
    return counts


def _improve(
    counts: NDArray[np.int64], loads: NDArray[np.float64], rank: NDArray[np.int64], ends: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Move one layer's worth of count from one stage to another while the highest rank load falls.

    All moves are tried at once: [moves, stages] count vectors against prefix sums
    of the loads. Among equal highest loads the smaller sum of squares wins.
    """
    prefix = np.concatenate(([0.0], np.cumsum(loads)))
    member = (rank[:, None] == np.arange(ends.shape[0])[None, :]).astype(np.float64)
    stages = counts.shape[0]
    source, target = (grid.ravel() for grid in np.meshgrid(np.arange(stages), np.arange(stages), indexing="ij"))

    def score(options: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        bounds = np.concatenate((np.zeros((options.shape[0], 1), np.int64), np.cumsum(options, axis=1)), axis=1)
        per_rank = np.diff(prefix[bounds], axis=1) @ member + ends
        return per_rank.max(axis=1), (per_rank**2).sum(axis=1)

    best = score(counts[None, :])
    for _ in range(MAX_MOVES):
        allowed = (source != target) & (counts[source] > 1)
        moves = np.arange(int(allowed.sum()))
        options = np.repeat(counts[None, :], moves.shape[0], axis=0)
        options[moves, source[allowed]] -= 1
        options[moves, target[allowed]] += 1
        if not moves.shape[0]:
            break
        highest, squares = score(options)
        pick = int(np.lexsort((squares, highest))[0])
        gain = best[0][0] - highest[pick]
        if gain <= 1e-12 * best[0][0] and not (gain >= 0.0 and squares[pick] < best[1][0] * (1.0 - 1e-12)):
            break
        counts, best = options[pick], (highest[pick : pick + 1], squares[pick : pick + 1])
    return counts
