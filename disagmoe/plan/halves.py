"""Which chunks of the experts' row are its first and which its second half, where it has two.

Where one layer's FFN has as many chunks as the communication before it and the one
after it together, it is two halves (two fused GEMMs with the activation between
them, as in Comet): chunk c of the first half takes what chunk c of the
communication before it brings, and chunk c of the second half makes what chunk c
of the one after it carries away. In between nothing can be cut alike - a block of
the second GEMM needs all rows of the first - so the second half begins after all
of the first, and runs block after block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from disagmoe.ops import Kind
from disagmoe.plan.edges import BoolArray, Edges, LongArray, join


class Halves(NamedTuple):
    """Per operation: belongs to the first, to the second half of a layer's experts (most belong to neither)."""

    first: BoolArray
    second: BoolArray


def chunk_counts(kind: LongArray, layer: LongArray, forward: BoolArray, chunk: LongArray) -> LongArray:
    """Chunks [direction, layer + 1, kind] of DISPATCH, FFN and COMBINE (others count too); direction 1 is forward."""
    counts = np.zeros((2, int(layer.max(initial=-1)) + 2, len(Kind)), dtype=np.int64)
    np.maximum.at(counts, (forward.astype(np.int64), layer + 1, kind), chunk + 1)
    return counts


def expert_halves(kind: LongArray, layer: LongArray, forward: BoolArray, chunk: LongArray) -> Halves:
    """The halves among operations of phases F (`forward`), B and I."""
    if not kind.size or int(chunk.max()) < 1:
        nothing = np.zeros(kind.shape[0], dtype=np.bool_)
        return Halves(nothing, nothing)
    counts = chunk_counts(kind, layer, forward, chunk)
    dispatch, experts, combine = (counts[:, :, int(k)] for k in (Kind.DISPATCH, Kind.FFN, Kind.COMBINE))
    halved = (dispatch > 0) & (combine > 0) & (dispatch + combine == experts)
    before = np.stack([combine[0], dispatch[1]])  # chunks of what comes before the experts, per direction
    at = (forward.astype(np.int64), layer + 1)
    member = (kind == int(Kind.FFN)) & halved[at]
    late = chunk >= before[at]
    return Halves(member & ~late, member & late)


def halves_edges(nodes: LongArray, group: LongArray, chunk: LongArray, halves: Halves) -> Edges:
    """From the first half to the second half's first block, and from each block to the next.

    `group` numbers the positions in the chain: the second half is the group after
    the first. All arguments are aligned with `nodes`.
    """
    late = np.flatnonzero(halves.second)
    late = late[np.lexsort((chunk[late], group[late]))]
    begins = np.concatenate([[True], group[late][1:] != group[late][:-1]])[: late.shape[0]]
    head = late[begins]
    src, dst = join(nodes[halves.first], group[halves.first] + 1, nodes[head], group[head])
    follows = late[~begins]
    previous = late[np.flatnonzero(~begins) - 1]
    return np.concatenate([src, nodes[previous]]), np.concatenate([dst, nodes[follows]])
