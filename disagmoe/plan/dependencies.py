"""Data dependencies of a Program, derived from its operations.

Nobody writes a dependency list: what an operation waits for follows from its
kind, phase, layer, micro-batch and chunk. This module decides the rules.

- Forward, per micro-batch: EMBED, then for each layer ATTN, DISPATCH, FFN,
  COMBINE, P2P, then HEAD (a STAGE stands alone in its layer). Positions a
  Program does not have are skipped. Backward (phases B and I) is the same chain
  reversed, after the last forward position.
- Between neighbouring positions chunk c waits for chunk c where both have equally
  many chunks, otherwise every chunk waits for all of them; chunk -1 counts as one.
- W waits for its I. R waits for its F and comes before its B or I. A re-sent
  communication waits for the recompute of what it carries, and a recompute for
  the communication re-sent to it (same layer and micro-batch).
- GRAD_SYNC in phase B waits for the worker's own B and W of that layer (layer -1:
  of all of them). OPTIM waits for every worker's GRAD_SYNC in phase B, as the
  gradient norm is global, and for those of its own gradients that no GRAD_SYNC
  covers. GRAD_SYNC in phase F waits for the worker's OPTIM.

The order of a stream is not a data dependency and is not in the Graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import COMPUTE_KINDS, RECV_STREAMS, SEND_STREAMS, Kind, Phase
from disagmoe.plan.program import IntArray, Program
from disagmoe.plan.text import row_token

LongArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Edges = tuple[LongArray, LongArray]  # (from, to), node numbers

# Order inside a layer. STAGE replaces the whole layer in a stage-level Program.
_POSITION = {Kind.ATTN: 0, Kind.DISPATCH: 1, Kind.FFN: 2, Kind.COMBINE: 3, Kind.P2P: 4, Kind.STAGE: 5}
_POSITIONS = 6
_OFFSET = np.array([_POSITION.get(kind, 0) for kind in Kind], dtype=np.int64)
_CHAIN = np.array([kind not in (Kind.GRAD_SYNC, Kind.OPTIM) for kind in Kind])
_COMPUTE = np.array([kind in COMPUTE_KINDS and kind != Kind.OPTIM for kind in Kind])
# Neighbours of which one is a communication: the recomputes that pass data to each other.
_RECOMPUTE_LINKS = ((Kind.ATTN, Kind.DISPATCH), (Kind.DISPATCH, Kind.FFN), (Kind.FFN, Kind.COMBINE))
_KEY_LIMIT = 1 << 62


class PlanError(ValueError):
    """A Program that cannot be run as written; the message names the operations."""


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes and data dependencies of a Program.

    A node is one operation; both rows of a transfer are one node. `node` [rows]
    gives the node of each row; `first_row` and `second_row` [n_nodes] lead back:
    the send and the receive row of a transfer, the only row and -1 otherwise.
    Successors of node i are `succ[succ_ptr[i]:succ_ptr[i + 1]]`; `indegree`
    [n_nodes] counts predecessors. Stream order is not included. All int32.
    """

    node: IntArray
    n_nodes: int
    succ_ptr: IntArray
    succ: IntArray
    indegree: IntArray
    first_row: IntArray
    second_row: IntArray


@dataclass(frozen=True, eq=False)
class _Ops:
    """Columns of the nodes (of their first rows), shape [n_nodes], int64."""

    kind: LongArray
    phase: LongArray
    layer: LongArray
    microbatch: LongArray
    chunk: LongArray
    worker: LongArray

    def where(self, kinds: BoolArray | Kind, *phases: Phase) -> LongArray:
        """Nodes of these kinds (a kind, or a flag per kind) in one of these phases."""
        mask = self.kind == int(kinds) if isinstance(kinds, Kind) else kinds[self.kind]
        if phases:
            mask = mask & np.isin(self.phase, [int(p) for p in phases])
        return np.flatnonzero(mask)


def build_graph(program: Program) -> Graph:
    """Nodes and data dependencies of a Program; PlanError names an unmatched transfer.

    Linear in rows up to sorting; no Python loop over them.
    """
    node, first_row, second_row = _nodes(program)
    columns = ("kind", "phase", "layer", "microbatch", "chunk", "worker")
    ops = _Ops(*(getattr(program, name)[first_row].astype(np.int64) for name in columns))
    edges = [_chain_edges(ops), *_recompute_edges(ops), _weight_edges(ops), *_step_end_edges(ops)]
    n = first_row.shape[0]
    succ_ptr, succ, indegree = compress_edges(
        np.concatenate([e[0] for e in edges]), np.concatenate([e[1] for e in edges]), n
    )
    return Graph(
        node=node,
        n_nodes=n,
        succ_ptr=succ_ptr,
        succ=succ,
        indegree=indegree,
        first_row=first_row,
        second_row=second_row,
    )


def compress_edges(src: LongArray, dst: LongArray, n_nodes: int) -> tuple[IntArray, IntArray, IntArray]:
    """Edge list to (succ_ptr, succ, indegree), sorted by source, then destination."""
    # One int64 key per edge: sorting it is deterministic and faster than sorting pairs.
    src, dst = np.divmod(np.sort(src * n_nodes + dst), max(n_nodes, 1))
    succ_ptr = np.zeros(n_nodes + 1, dtype=np.int32)
    np.cumsum(np.bincount(src, minlength=n_nodes), out=succ_ptr[1:])
    return succ_ptr, dst.astype(np.int32), np.bincount(dst, minlength=n_nodes).astype(np.int32)


def data_edges(graph: Graph) -> Edges:
    """The data dependencies of a Graph as an edge list (from, to)."""
    src = np.repeat(np.arange(graph.n_nodes, dtype=np.int64), np.diff(graph.succ_ptr))
    return src, graph.succ.astype(np.int64)


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


def stream_mask(program: Program, streams: frozenset[int]) -> BoolArray:
    """Rows on one of these streams."""
    return np.isin(program.stream, sorted(int(s) for s in streams))


def _nodes(program: Program) -> tuple[IntArray, IntArray, IntArray]:
    """Number the operations: (node of each row, first row, second row)."""
    is_recv = stream_mask(program, frozenset(RECV_STREAMS))
    send = np.flatnonzero(stream_mask(program, frozenset(SEND_STREAMS)))
    recv = np.flatnonzero(is_recv)
    send_row, recv_row = match_transfers(program, send, recv)
    node = (np.cumsum(~is_recv) - 1).astype(np.int32)
    node[recv_row] = node[send_row]
    first_row = np.flatnonzero(~is_recv).astype(np.int32)
    second_row = np.full(first_row.shape[0], -1, dtype=np.int32)
    second_row[node[send_row]] = recv_row
    return node, first_row, second_row


def match_transfers(
    program: Program, send: NDArray[np.intp], recv: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Pair send rows with receive rows of the same Op between the same two workers.

    Returns the rows of both sides in matching order. PlanError names one row
    that finds no partner.
    """
    rows = np.concatenate([send, recv])
    peer, worker = program.peer[rows].copy(), program.worker[rows].copy()
    n = send.shape[0]
    peer[n:], worker[n:] = worker[n:].copy(), peer[n:].copy()  # seen from the sender, both rows are equal
    columns = (getattr(program, name)[rows] for name in ("kind", "phase", "layer", "microbatch", "chunk", "replica"))
    key = pack_key(*columns, worker, peer)
    send_order, recv_order = np.argsort(key[:n], kind="stable"), np.argsort(key[n:], kind="stable")
    sent, received = key[:n][send_order], key[n:][recv_order]
    if sent.shape == received.shape and bool((sent == received).all()):
        return send[send_order], recv[recv_order]
    common = min(sent.shape[0], received.shape[0])
    differ = np.flatnonzero(sent[:common] != received[:common])
    i = int(differ[0]) if differ.size else common
    # The smaller key of the two has no partner: everything before i is matched.
    if i < sent.shape[0] and (i >= received.shape[0] or sent[i] < received[i]):
        row = int(send[send_order[i]])
        raise PlanError(f"unmatched send: {row_token(program, row)} has no receive on worker {int(program.peer[row])}")
    row = int(recv[recv_order[i]])
    raise PlanError(f"unmatched receive: {row_token(program, row)} has no send on worker {int(program.peer[row])}")


def chain_position(kind: LongArray, layer: LongArray, n_layers: int) -> LongArray:
    """Place of an operation in the forward chain of its micro-batch, counted from 0."""
    at = np.where(kind == int(Kind.EMBED), -1, np.where(kind == int(Kind.HEAD), n_layers, layer))
    return (at + 1) * _POSITIONS + _OFFSET[kind]


def _chain_edges(ops: _Ops) -> Edges:
    """Forward chain, turn, backward chain of every micro-batch."""
    nodes = ops.where(_CHAIN, Phase.F, Phase.B, Phase.I)
    n_layers = int(ops.layer.max(initial=-1)) + 1
    position = chain_position(ops.kind[nodes], ops.layer[nodes], n_layers)
    last = (n_layers + 1) * _POSITIONS + _POSITIONS
    position = np.where(ops.phase[nodes] == int(Phase.F), position, 2 * last - position)
    key = ops.microbatch[nodes] * (2 * last + 1) + position
    order = np.argsort(key, kind="stable")
    nodes, key = nodes[order], key[order]
    starts = np.concatenate([[True], key[1:] != key[:-1]])[: nodes.shape[0]]
    group = np.cumsum(starts) - 1
    group_microbatch = ops.microbatch[nodes[starts]]
    follows = np.concatenate([group_microbatch[1:] == group_microbatch[:-1], [False]])[: group_microbatch.shape[0]]
    waits_for_me = np.where(follows[group], group + 1, -1)
    return _link(nodes, waits_for_me, nodes, group, ops.chunk)


def _recompute_edges(ops: _Ops) -> list[Edges]:
    """F before R before B and I of one operation, and re-sent communication."""
    again = ops.where(_CHAIN, Phase.R)
    if not again.size:
        return []
    same_op = pack_key(ops.kind, ops.layer, ops.microbatch)
    same_layer = pack_key(ops.layer, ops.microbatch)
    edges = []
    for src, dst in ((ops.where(_CHAIN, Phase.F), again), (again, ops.where(_CHAIN, Phase.B, Phase.I))):
        edges.append(_link(src, same_op[src], dst, same_op[dst], ops.chunk))
    for producer, consumer in _RECOMPUTE_LINKS:
        src, dst = again[ops.kind[again] == int(producer)], again[ops.kind[again] == int(consumer)]
        edges.append(_link(src, same_layer[src], dst, same_layer[dst], ops.chunk))
    return edges


def _weight_edges(ops: _Ops) -> Edges:
    """W after its I."""
    inputs, weights = ops.where(_CHAIN, Phase.I), ops.where(_CHAIN, Phase.W)
    same_op = pack_key(ops.kind, ops.layer, ops.microbatch)
    return _link(inputs, same_op[inputs], weights, same_op[weights], ops.chunk)


def _step_end_edges(ops: _Ops) -> list[Edges]:
    """Gradients, their reduction, the optimizer, and the gathering of parameters."""
    gradients = ops.where(_COMPUTE, Phase.B, Phase.W)
    reduces, gathers = ops.where(Kind.GRAD_SYNC, Phase.B), ops.where(Kind.GRAD_SYNC, Phase.F)
    optimizers = ops.where(Kind.OPTIM)
    of_layer = pack_key(ops.worker, ops.layer)
    whole = ops.layer[reduces] == -1
    per_layer, per_worker = reduces[~whole], reduces[whole]
    covered = np.isin(of_layer[gradients], of_layer[per_layer]) | np.isin(ops.worker[gradients], ops.worker[per_worker])
    bare = gradients[~covered]
    everywhere = np.zeros_like(ops.worker)
    return [
        _join(gradients, of_layer[gradients], per_layer, of_layer[per_layer]),
        _join(gradients, ops.worker[gradients], per_worker, ops.worker[per_worker]),
        _join(reduces, everywhere[reduces], optimizers, everywhere[optimizers]),
        _join(bare, ops.worker[bare], optimizers, ops.worker[optimizers]),
        _join(optimizers, ops.worker[optimizers], gathers, ops.worker[gathers]),
    ]


def _link(src: LongArray, src_group: LongArray, dst: LongArray, dst_group: LongArray, chunk: LongArray) -> Edges:
    """Edges between nodes of equal group: chunk by chunk where counts agree, else all to all."""
    if not src.size or not dst.size:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    if chunk.min() == chunk.max():
        return _join(src, src_group, dst, dst_group)
    src_rank, src_count = _chunk_ranks(src_group, chunk[src])
    dst_rank, dst_count = _chunk_ranks(dst_group, chunk[dst])
    width = int(chunk.max() - chunk.min()) + 2
    by_chunk_src = src_count == _lookup(dst_group, dst_count, src_group)
    by_chunk_dst = dst_count == _lookup(src_group, src_count, dst_group)
    src_key = src_group * width + np.where(by_chunk_src, src_rank + 1, 0)
    dst_key = dst_group * width + np.where(by_chunk_dst, dst_rank + 1, 0)
    return _join(src, src_key, dst, dst_key)


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


def _join(src: LongArray, src_key: LongArray, dst: LongArray, dst_key: LongArray) -> Edges:
    """All (from, to) with equal keys."""
    order = np.argsort(src_key, kind="stable")
    keys = src_key[order]
    low = np.searchsorted(keys, dst_key, side="left")
    count = np.searchsorted(keys, dst_key, side="right") - low
    skip = np.repeat(low - (np.cumsum(count) - count), count)
    return src[order][np.arange(skip.shape[0]) + skip], np.repeat(dst, count)
