"""Decides whether a Program can run to its end, and which operations block each other if not.

Operations wait for their data and for the operation before them on each of their
streams. A transfer is a rendezvous: it needs the head of the sender's send stream
and of the receiver's receive stream at once, so both its rows are one node. The
Program runs to its end exactly if these waits have no cycle. In a stage-level
Program an overlapped pair is one unit as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from disagmoe.kernels import topological_sweep
from disagmoe.ops import Kind
from disagmoe.plan.dependencies import Graph, data_edges
from disagmoe.plan.edges import LongArray, compress_edges
from disagmoe.plan.program import Program
from disagmoe.plan.text import row_token

_STARTS = 8  # nodes of a found cycle from which a shorter one is looked for
_SHOWN = 12  # operations of a cycle that a message spells out


def find_deadlock(program: Program, graph: Graph) -> str | None:
    """One cycle of operations that wait for each other, as text; None if the Program runs to its end.

    Example: `A0F1@w0 -> D0F1 w0>w1 -> A0F1@w0` (each must run before the next).
    """
    src, dst = data_edges(graph)
    before, after = _stream_edges(program, graph)
    unit = _units(program, graph)
    if unit is not None:
        src, dst, before, after = unit[src], unit[dst], unit[before], unit[after]
        apart = before != after
        before, after = before[apart], after[apart]
    succ_ptr, succ, indegree = compress_edges(
        np.concatenate([src, before]), np.concatenate([dst, after]), graph.n_nodes
    )
    done = topological_sweep(succ_ptr, succ, indegree)
    if done.all():
        return None
    left = np.flatnonzero(~done)
    waits_on: dict[int, list[int]] = {int(n): [] for n in left}
    for n in left:
        for m in succ[succ_ptr[n] : succ_ptr[n + 1]]:
            waits_on[int(m)].append(int(n))
    return _spell(program, graph, _short_cycle(waits_on))


def _stream_edges(program: Program, graph: Graph) -> tuple[LongArray, LongArray]:
    """(operation, next operation) of every stream, as nodes."""
    same = (program.worker[1:] == program.worker[:-1]) & (program.stream[1:] == program.stream[:-1])
    return graph.node[:-1][same].astype(np.int64), graph.node[1:][same].astype(np.int64)


def _units(program: Program, graph: Graph) -> LongArray | None:
    """The unit of each node, where stage-level pairs make one unit of two nodes; else None."""
    rows = np.flatnonzero((program.pair >= 0) & (program.kind == int(Kind.STAGE)))
    if not rows.size:
        return None
    unit = np.arange(graph.n_nodes, dtype=np.int64)
    _, first, member = np.unique(program.pair[rows], return_index=True, return_inverse=True)
    unit[graph.node[rows]] = graph.node[rows[first]][member]
    return unit


def _short_cycle(waits_on: dict[int, list[int]]) -> list[int]:
    """A cycle in running order. Every node waits on some other one, so walking back must meet itself."""
    walk = [min(waits_on)]
    seen = {walk[0]: 0}
    while (back := min(waits_on[walk[-1]])) not in seen:
        seen[back] = len(walk)
        walk.append(back)
    cycle = walk[seen[back] :]
    candidates = [_cycle_through(n, waits_on) for n in cycle[:_STARTS]]
    return min([c for c in candidates if c] or [cycle], key=len)[::-1]


def _cycle_through(start: int, waits_on: dict[int, list[int]]) -> list[int]:
    """The shortest cycle through a node, walking back; empty if there is none."""
    came: dict[int, int] = {}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        for back in sorted(waits_on[at]):
            if back == start:
                path = [at]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if back not in came:
                came[back] = at
                queue.append(back)
    return []


def _spell(program: Program, graph: Graph, cycle: list[int]) -> str:
    """The cycle with its smallest node first and last; the middle of a long one is counted, not listed."""
    at = cycle.index(min(cycle))
    tokens = [_node_token(program, graph, n) for n in cycle[at:] + cycle[:at]]
    if len(tokens) > _SHOWN:
        half = _SHOWN // 2
        tokens = [*tokens[:half], f"({len(tokens) - 2 * half} more)", *tokens[-half:]]
    return " -> ".join([*tokens, tokens[0]])


def _node_token(program: Program, graph: Graph, node: int) -> str:
    """A node by name; both halves of a stage-level pair."""
    row = int(graph.first_row[node])
    pair = int(program.pair[row])
    if pair < 0 or program.kind[row] != int(Kind.STAGE):
        return row_token(program, row)
    rows: Iterable[int] = np.flatnonzero(program.pair == pair)
    return f"({';'.join(row_token(program, int(r)) for r in rows)})"
