"""Decides what the chunks of an output head that is spread over several workers wait for.

Chunk g of HEAD holds a part of the vocabulary. The rows after the last layer are
on one worker and are passed on from there by P2Ps of the last layer, whose chunk
says which part of the head they lead to. Unlike elsewhere in the chain, what waits
for what follows from the places:

- A P2P and a HEAD, forward, wait for the P2P that arrives at their worker, or,
  where none does, for what the last layer ends with.
- Every HEAD chunk in backward waits for all of them in forward: the softmax needs
  the maximum and the sum over the whole vocabulary.
- Backward, a P2P waits for the HEAD of its worker and the P2P that arrives there
  (their gradients are added), and the last layer for all that arrives at its worker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import Kind, Phase
from disagmoe.plan.edges import BoolArray, Edges, LongArray, join
from disagmoe.plan.program import IntArray, Program, among


def spread_head_edges(program: Program, first_row: IntArray) -> tuple[BoolArray, list[Edges]]:
    """Which nodes belong to a spread head, [nodes], and their edges; none where the head is on one worker.

    `first_row` [nodes] is the row (of a transfer: the send row) of each node.
    """
    kind, chunk = program.kind[first_row], program.chunk[first_row]
    head = kind == int(Kind.HEAD)
    if not (head & (chunk > 0)).any() or np.ptp(program.worker[first_row][head]) == 0:
        return np.zeros(first_row.shape[0], dtype=np.bool_), []
    in_last = program.layer[first_row] == program.n_layers - 1
    passes = in_last & (kind == int(Kind.P2P))
    ends = in_last & (kind == int(Kind.COMBINE))
    ends = ends if ends.any() else in_last & (kind == int(Kind.FFN))
    microbatch = program.microbatch[first_row].astype(np.int64)
    here = microbatch * program.n_workers + program.worker[first_row]
    there = np.where(passes, microbatch * program.n_workers + program.peer[first_row], here)
    forward = program.phase[first_row] == int(Phase.F)
    back = among(program.phase[first_row], (Phase.B, Phase.I))

    def at(mask: NDArray[np.bool_]) -> LongArray:
        return np.flatnonzero(mask)

    sources, takers = at(forward & (ends | passes)), at(forward & (passes | head))
    scores, gradients = at(forward & head), at(back & head)
    returns, receivers = at(back & (head | passes)), at(back & (passes | ends))
    # Where the P2P that should lead there is missing, data comes from or goes to the last layer: verify objects.
    lost = takers[~np.isin(here[takers], there[sources])]
    stray = returns[~np.isin(there[returns], here[receivers])]
    before, after = at(forward & ends), at(back & ends)
    return head | passes, [
        join(sources, there[sources], takers, here[takers]),
        join(before, microbatch[before], lost, microbatch[lost]),
        join(scores, microbatch[scores], gradients, microbatch[gradients]),
        join(returns, there[returns], receivers, here[receivers]),
        join(stray, microbatch[stray], after, microbatch[after]),
    ]
