"""Which copy of a token gets which row of a capacity-padded buffer, and which get none (Tutel).

Decides who is dropped: an expert serves the first choices of all tokens in the
order of the tokens, then the second choices, and so on; whoever comes after its
`capacity` rows is dropped (tutel/impls/fast_dispatch.py, compute_location). A
dropped copy contributes nothing; the gate weights of the others stay as they are.
Chunk c of an overlap degree is the c-th part of every expert's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """The copies of one chunk: `copy` [n] places in the flattened ids [t * k], `row` [n] in the buffer [E * rows]."""

    copy: Tensor
    row: Tensor


@dataclass(frozen=True)
class Seating:
    """`chunks` of `rows` rows per expert each; `dropped` copies have no row."""

    rows: int
    chunks: tuple[Chunk, ...]
    dropped: int


def queue_places(ids: Tensor, experts: int) -> Tensor:
    """Place [t, k] of each copy in the queue of its expert; ids [t, k]."""
    by_choice = ids.t().reshape(-1)
    order = by_choice.argsort(stable=True)
    counts = torch.bincount(by_choice, minlength=experts)
    starts = counts.cumsum(0) - counts
    place = torch.empty_like(by_choice)
    place[order] = torch.arange(by_choice.shape[0], device=ids.device) - starts[by_choice[order]]
    return place.view(ids.shape[1], ids.shape[0]).t()


def seat(ids: Tensor, places: Tensor, capacity: int, degree: int) -> Seating:
    """Rows for the copies whose place is within `capacity` (a multiple of `degree`)."""
    rows = capacity // degree
    expert, place = ids.reshape(-1), places.reshape(-1)
    chunks = []
    for chunk in range(degree):
        copy = torch.nonzero((place >= chunk * rows) & (place < (chunk + 1) * rows)).flatten()
        chunks.append(Chunk(copy, expert[copy] * rows + place[copy] - chunk * rows))
    return Seating(rows, tuple(chunks), expert.shape[0] - sum(chunk.copy.shape[0] for chunk in chunks))
