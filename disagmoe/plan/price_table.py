"""Decides which rows of a Program cost the same, so that every different price is worked out once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.model import CostModel
from disagmoe.ops import Kind, Phase
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program

if TYPE_CHECKING:
    from disagmoe.plan.pricing import LayoutCosts

FloatArray = NDArray[np.float64]


def price_table(
    prices: LayoutCosts, program: Program
) -> tuple[NDArray[np.int64], FloatArray, NDArray[np.int8], FloatArray]:
    """Number of each row's price, and seconds, link and NIC bytes by that number; each different one is asked once."""
    layout = prices.layout
    # Chunks cost the same but where they are tiles.
    chunks = program.n_chunks + 1 if layout.tiles is not None else 1
    chunk = program.chunk + 1 if layout.tiles is not None else 0
    alike = _alike(layout, prices.costs, program.n_layers)
    depth = alike.shape[0]
    per_worker = (program.kind == Kind.GRAD_SYNC) | (program.kind == Kind.OPTIM)
    layer = np.where(per_worker, program.layer + 1, alike[program.layer + 1])
    operation = (program.kind.astype(np.int64) * len(Phase) + program.phase) * depth + layer
    shared = len(Kind) * len(Phase) * depth * chunks
    code = np.where(per_worker, shared + operation * program.n_workers + program.worker, operation * chunks + chunk)
    asked = np.flatnonzero(np.bincount(code))
    seconds, nic_bytes = (np.zeros(int(asked[-1]) + 1 if asked.size else 0) for _ in range(2))
    link = np.zeros(seconds.shape[0], dtype=np.int8)
    for number in asked.tolist():
        own = number >= shared
        key, part = divmod(number - shared, program.n_workers) if own else divmod(number, chunks)
        kind_phase, layer_number = divmod(key, depth)
        kind, phase = Kind(kind_phase // len(Phase)), Phase(kind_phase % len(Phase))
        if own:
            transfer = prices.worker_op(kind, phase, layer_number - 1, part)
        else:
            transfer = prices.op(kind, phase, layer_number - 1, part - 1 if chunks > 1 else 0)
        seconds[number], link[number], nic_bytes[number] = transfer.seconds, transfer.link, transfer.nic_bytes
    return code, seconds, link, nic_bytes


def _alike(layout: Layout, costs: CostModel, n_layers: int) -> NDArray[np.int64]:
    """By layer + 1: one more than the first layer that costs the same, as its kind and the workers around it are."""
    placement, like = layout.placement, costs.like
    following = (*placement.attn[1:], -1 - placement.head)
    first: dict[tuple[int, ...], int] = {}
    found = [0]
    for layer in range(n_layers):
        key = (like[layer], placement.attn[layer], placement.ffn[layer], following[layer])
        found.append(first.setdefault(key, layer + 1))
    return np.array(found, dtype=np.int64)
