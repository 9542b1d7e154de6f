"""Data dependencies of a Program, derived from its operations.

Nobody writes a dependency list: what an operation waits for follows from its
kind, phase, layer, micro-batch and chunk. This module decides the rules.

- Forward, per micro-batch: EMBED, then for each layer ATTN, DISPATCH, FFN,
  COMBINE, P2P, then HEAD (a STAGE stands alone in its layer). Positions a
  Program does not have are skipped. Backward (phases B and I) is the same chain
  reversed, after the last forward position.
- Between neighbouring positions chunk c waits for chunk c where both have equally
  many chunks, otherwise every chunk waits for all of them; chunk -1 counts as one.
- Experts with as many chunks as both their communications together are two halves:
  see `halves.py`.
- A head in several chunks is spread over workers: see `spread_head.py`.
- W waits for its I. R waits for its F and comes before its B or I. A re-sent
  communication waits for the recompute of what it carries, and a recompute for
  the communication re-sent to it (same layer and micro-batch).
- GRAD_SYNC in phase B waits for the worker's own B and W of that layer (layer -1:
  of all of them). OPTIM waits for every worker's GRAD_SYNC in phase B, as the
  gradient norm is global, and for those of its own gradients that no GRAD_SYNC
  covers. GRAD_SYNC in phase F waits for the worker's OPTIM, or, where the Program
  gathers early, the worker's forwards of that layer (-1: EMBED and HEAD) wait for it. Where a layer lives
  in several replicas of one Program (DualPipe's two directions), its GRAD_SYNC
  waits for the gradients of all of them: their sum is what is reduced.
- A stage-level pair is one unit: what either of its two rows waits for, the first
  waits for. The first carries the duration of the pair, the second has none and
  follows on the same stream, so the results of both are there at the unit's end.
- A P2P, DISPATCH or COMBINE on a compute stream is no transfer but where its worker
  waits for one. Consecutive ones are one batch (batch_isend_irecv and wait): the
  transfers start after the compute before the batch, the compute behind it after
  all of them.
- A forward waits for the backward whose place in memory it takes, where the Program
  bounds what is in flight (`admission.py`).

The order of a stream is not a data dependency and is not in the Graph.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import COMPUTE_KINDS, COMPUTE_STREAMS, RECV_STREAMS, SEND_STREAMS, Kind, Phase
from disagmoe.plan.admission import admission_rows
from disagmoe.plan.edges import BoolArray, Edges, LongArray, compress_edges, join, link, pack_key, sort_order
from disagmoe.plan.halves import Halves, expert_halves, halves_edges
from disagmoe.plan.program import IntArray, Program, among
from disagmoe.plan.spread_head import spread_head_edges
from disagmoe.plan.text import row_token

# Order inside a layer. STAGE replaces the whole layer in a stage-level Program.
# Experts in two halves take two positions.
_POSITION = {Kind.ATTN: 0, Kind.DISPATCH: 1, Kind.FFN: 2, Kind.COMBINE: 4, Kind.P2P: 5, Kind.STAGE: 6}
_POSITIONS = 7
_OFFSET = np.array([_POSITION.get(kind, 0) for kind in Kind], dtype=np.int64)
_CHAIN = np.array([kind not in (Kind.GRAD_SYNC, Kind.OPTIM) for kind in Kind])
_COMPUTE = np.array([kind in COMPUTE_KINDS and kind != Kind.OPTIM for kind in Kind])
# Neighbours of which one is a communication: the recomputes that pass data to each other.
_RECOMPUTE_LINKS = ((Kind.ATTN, Kind.DISPATCH), (Kind.DISPATCH, Kind.FFN), (Kind.FFN, Kind.COMBINE))
_AWAITED = (int(Kind.P2P), int(Kind.DISPATCH), int(Kind.COMBINE))
_NO_PHASE = -1  # of a node that only waits: no rule about phases applies to it


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
    replica: LongArray
    worker: LongArray

    def where(self, kinds: BoolArray | Kind, *phases: Phase) -> LongArray:
        """Nodes of these kinds (a kind, or a flag per kind) in one of these phases."""
        mask = self.kind == int(kinds) if isinstance(kinds, Kind) else kinds[self.kind]
        if phases:
            mask = mask & among(self.phase, phases)
        return np.flatnonzero(mask)


def build_graph(program: Program) -> Graph:
    """Nodes and data dependencies of a Program; PlanError names an unmatched transfer.

    Linear in rows up to sorting; no Python loop over them.
    """
    node, first_row, second_row = _nodes(program)
    columns = ("kind", "phase", "layer", "microbatch", "chunk", "replica", "worker")
    ops = _Ops(*(getattr(program, name)[first_row].astype(np.int64) for name in columns))
    waits = np.flatnonzero(is_wait(program))
    ops.phase[node[waits]] = _NO_PHASE
    of_head, edges = spread_head_edges(program, first_row)
    edges += _microbatch_edges(program, ops, first_row, ~of_head)
    edges += _step_end_edges(ops, program.early_gather)
    edges.append(_admission_edges(program, node))
    if waits.size:
        edges += _wait_edges(program, waits, node, second_row)
    n = first_row.shape[0]
    src, dst = (np.concatenate([e[side] for e in edges]) for side in (0, 1))
    dst = _stage_units(program, node, n)[dst] if (program.pair >= 0).any() else dst
    succ_ptr, succ, indegree = compress_edges(src, dst, n)
    return Graph(
        node=node,
        n_nodes=n,
        succ_ptr=succ_ptr,
        succ=succ,
        indegree=indegree,
        first_row=first_row,
        second_row=second_row,
    )


def data_edges(graph: Graph) -> Edges:
    """The data dependencies of a Graph as an edge list (from, to)."""
    src = np.repeat(np.arange(graph.n_nodes, dtype=np.int64), np.diff(graph.succ_ptr))
    return src, graph.succ.astype(np.int64)


def stream_mask(program: Program, streams: frozenset[int]) -> BoolArray:
    """Rows on one of these streams."""
    return among(program.stream, streams)


def is_wait(program: Program) -> BoolArray:
    """Rows at which compute waits for a pipeline transfer or an exchange."""
    mask: BoolArray = among(program.kind, _AWAITED) & stream_mask(program, frozenset(COMPUTE_STREAMS))
    return mask


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


def _stage_units(program: Program, node: IntArray, n_nodes: int) -> LongArray:
    """The node that does the waiting for each node: of a stage-level pair the first, else itself."""
    rows = np.flatnonzero((program.pair >= 0) & (program.kind == int(Kind.STAGE)))
    unit = np.arange(n_nodes, dtype=np.int64)
    _, first, member = np.unique(program.pair[rows], return_index=True, return_inverse=True)
    unit[node[rows]] = node[rows[first]][member]
    return unit


def _wait_edges(program: Program, waits: NDArray[np.intp], node: IntArray, second_row: IntArray) -> list[Edges]:
    """Transfers after the compute before their batch, and waits after their transfers, on both ends."""
    of, sample = program.sorts
    awaiting = is_wait(sample)
    columns = ("kind", "phase", "layer", "chunk", "replica", "worker")
    operation = pack_key(*(getattr(sample, name) for name in columns))
    awaited = np.unique(operation[awaiting])
    # By sort: which of the awaited operations its rows are a part of, -1 for none.
    found = np.minimum(np.searchsorted(awaited, operation), awaited.shape[0] - 1)
    number = np.where((awaited[found] == operation) & among(sample.kind, _AWAITED), found, -1)
    key = number.astype(np.int64)[of] * (program.n_microbatches + 1) + program.microbatch + 1
    ends = np.flatnonzero((number >= 0)[of] & ~awaiting[of])
    there = np.zeros(awaited.shape[0] * (program.n_microbatches + 1), dtype=np.bool_)
    there[key[ends]] = True
    lost = ~there[key[waits]]
    if lost.any():
        row = int(waits[lost.argmax()])
        raise PlanError(
            f"unmatched wait: {row_token(program, row)} waits for a transfer that its worker has no part in"
        )
    transfer, waiting = join(ends, key[ends], waits, key[waits])
    # The last row before each wait that is no wait, if it is on the same stream.
    at = np.where(is_wait(program), -1, np.arange(len(program)))
    before = np.maximum.accumulate(at)[waiting]
    stream = pack_key(program.worker, program.stream)
    known = (before >= 0) & (stream[before] == stream[waiting])
    as_node = node.astype(np.int64)
    return [
        (as_node[transfer], as_node[waiting]),
        (as_node[before[known]], as_node[transfer[known]]),
    ]


def chain_position(kind: LongArray, layer: LongArray, n_layers: int) -> LongArray:
    """Place of an operation in the forward chain of its micro-batch, counted from 0."""
    at = np.where(kind == int(Kind.EMBED), -1, np.where(kind == int(Kind.HEAD), n_layers, layer))
    return (at + 1) * _POSITIONS + _OFFSET[kind]


def _microbatch_edges(program: Program, ops: _Ops, first_row: IntArray, members: BoolArray) -> list[Edges]:
    """What operations of one micro-batch wait for; worked out on the first where every one has the same rows.

    `members` [nodes] take part in the chain.
    """
    inside, count = np.flatnonzero(ops.microbatch >= 0), program.n_microbatches
    sort = program.sorts.of[first_row[inside]]
    number = np.cumsum(np.bincount(sort, minlength=len(program.sorts.sample)) > 0) - 1
    at = np.full((int(number[-1]) + 1 if number.size else 0, count), -1, dtype=np.int64)
    outside = _CHAIN[ops.kind].sum() > _CHAIN[ops.kind[inside]].sum()
    if at.size != inside.size or outside or ops.microbatch.max(initial=0) >= count:
        return _edges_inside(ops, members)
    at[number[sort], ops.microbatch[inside]] = inside
    if (at < 0).any():  # one operation twice, another one missing
        return _edges_inside(ops, members)
    first = at[:, 0]
    one = _Ops(*(getattr(ops, column.name)[first] for column in fields(ops)))
    return [(at[src].reshape(-1), at[dst].reshape(-1)) for src, dst in _edges_inside(one, members[first])]


def _edges_inside(ops: _Ops, members: BoolArray) -> list[Edges]:
    return [_chain_edges(ops, members), *_recompute_edges(ops), _weight_edges(ops)]


def _chain_edges(ops: _Ops, members: BoolArray) -> Edges:
    """Forward chain, turn, backward chain of every micro-batch; `members` [nodes] take part."""
    nodes = ops.where(_CHAIN, Phase.F, Phase.B, Phase.I)
    nodes = nodes[members[nodes]]
    n_layers = int(ops.layer.max(initial=-1)) + 1
    forward = ops.phase[nodes] == int(Phase.F)
    halves = expert_halves(ops.kind[nodes], ops.layer[nodes], forward, ops.chunk[nodes])
    position = chain_position(ops.kind[nodes], ops.layer[nodes], n_layers)
    position = position + np.where(forward, halves.second, halves.first)
    last = (n_layers + 1) * _POSITIONS + _POSITIONS
    position = np.where(forward, position, 2 * last - position)
    key = ops.microbatch[nodes] * (2 * last + 1) + position
    order = sort_order(key)
    nodes, key = nodes[order], key[order]
    halves = Halves(halves.first[order], halves.second[order])
    starts = np.concatenate([[True], key[1:] != key[:-1]])[: nodes.shape[0]]
    group = np.cumsum(starts) - 1
    group_microbatch = ops.microbatch[nodes[starts]]
    follows = np.concatenate([group_microbatch[1:] == group_microbatch[:-1], [False]])[: group_microbatch.shape[0]]
    waits_for_me = np.where(follows[group] & ~halves.first, group + 1, -1)
    src, dst = link(nodes, waits_for_me, nodes, group, ops.chunk)
    if not halves.first.any():
        return src, dst
    more_src, more_dst = halves_edges(nodes, group, ops.chunk[nodes], halves)
    return np.concatenate([src, more_src]), np.concatenate([dst, more_dst])


def _recompute_edges(ops: _Ops) -> list[Edges]:
    """F before R before B and I of one operation, and re-sent communication."""
    again = ops.where(_CHAIN, Phase.R)
    if not again.size:
        return []
    same_op = pack_key(ops.kind, ops.layer, ops.microbatch)
    same_layer = pack_key(ops.layer, ops.microbatch)
    edges = []
    for src, dst in ((ops.where(_CHAIN, Phase.F), again), (again, ops.where(_CHAIN, Phase.B, Phase.I))):
        edges.append(link(src, same_op[src], dst, same_op[dst], ops.chunk))
    halves = expert_halves(ops.kind[again], ops.layer[again], np.ones(again.shape[0], np.bool_), ops.chunk[again])
    for producer, consumer in _RECOMPUTE_LINKS:
        src = again[(ops.kind[again] == int(producer)) & ~halves.first]
        dst = again[(ops.kind[again] == int(consumer)) & ~halves.second]
        edges.append(link(src, same_layer[src], dst, same_layer[dst], ops.chunk))
    if halves.first.any():
        edges.append(halves_edges(again, 2 * same_layer[again] + halves.second, ops.chunk[again], halves))
    return edges


def _weight_edges(ops: _Ops) -> Edges:
    """W after its I."""
    inputs, weights = ops.where(_CHAIN, Phase.I), ops.where(_CHAIN, Phase.W)
    same_op = pack_key(ops.kind, ops.layer, ops.microbatch)
    return link(inputs, same_op[inputs], weights, same_op[weights], ops.chunk)


def _step_end_edges(ops: _Ops, early_gather: bool) -> list[Edges]:
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
    updated = join(optimizers, ops.worker[optimizers], gathers, ops.worker[gathers])
    if early_gather:
        forwards = ops.where(_COMPUTE, Phase.F)
        updated = join(gathers, of_layer[gathers], forwards, of_layer[forwards])
    elsewhere = []
    if ops.replica.any():
        elsewhere = [_mirror_edges(ops, gradients, of_layer, per_layer)]
        elsewhere += [_mirror_edges(ops, gradients, ops.worker, per_worker)]
    return [
        *elsewhere,
        join(gradients, of_layer[gradients], per_layer, of_layer[per_layer]),
        join(gradients, ops.worker[gradients], per_worker, ops.worker[per_worker]),
        join(reduces, everywhere[reduces], optimizers, everywhere[optimizers]),
        join(bare, ops.worker[bare], optimizers, ops.worker[optimizers]),
        updated,
    ]


def _mirror_edges(ops: _Ops, gradients: LongArray, scope: LongArray, reduces: LongArray) -> Edges:
    """Gradients on other workers that are summed with those a reduction covers.

    A reduction covers the gradients of equal `scope`; their other replicas have
    the same kind and layer.
    """
    same = pack_key(ops.kind, ops.layer)
    # One representative of every (scope, kind, layer), then reductions to what they cover, then to all replicas.
    _, one = np.unique(pack_key(scope[gradients], same[gradients]), return_index=True)
    held = gradients[one]
    covered, reduction = join(held, scope[held], reduces, scope[reduces])
    src, index = join(gradients, same[gradients], np.arange(covered.shape[0]), same[covered])
    apart = scope[src] != scope[covered[index]]
    return src[apart], reduction[index][apart]


def _admission_edges(program: Program, node: IntArray) -> Edges:
    """Forwards that wait until a backward has freed what it holds."""
    before, after = admission_rows(program)
    return node[before].astype(np.int64), node[after].astype(np.int64)
