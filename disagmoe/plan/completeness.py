"""Decides whether a Program does all the work of the declared step, once and in one place.

Every (kind, layer) a Program uses is a *slot*. A slot is done by every
micro-batch: forward once per chunk, then backward once per chunk, for compute
kinds either whole (B) or split (I and W); chunk -1 covers all chunks. A slot is in
one chunk or in all of the Program's; where the experts are two halves, each
communication has the chunks of one of them. Which
communication a layer has follows from the Program: what any micro-batch does,
all of them do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import COMPUTE_KINDS, KIND_LETTER, RECV_STREAMS, Kind, Op, Phase
from disagmoe.plan.dependencies import PlanError, is_wait, stream_mask
from disagmoe.plan.edges import BoolArray, LongArray, pack_key
from disagmoe.plan.program import Program, among
from disagmoe.plan.text import op_token, row_token

_STEP_KINDS = (Kind.GRAD_SYNC, Kind.OPTIM)


@dataclass(frozen=True, eq=False)
class _Coverage:
    """How often each phase covers each chunk of each slot and micro-batch.

    `times[phase]` is int [slots, micro-batches, chunks]; `exists[phase]` [slots, 1, chunks]
    flags the chunks a slot has. `kind` and `layer` name the slots.
    """

    kind: LongArray
    layer: LongArray
    times: NDArray[np.int64]
    exists: BoolArray

    def op(self, phase: Phase, index: NDArray[np.intp]) -> str:
        slot, microbatch, chunk = (int(i) for i in index)
        return op_token(Op(Kind(self.kind[slot]), phase, int(self.layer[slot]), microbatch, chunk))


def check_complete(program: Program) -> None:
    """Every layer, micro-batch and chunk: forward once, backward once; R at most once."""
    rows = _work_rows(program)
    if not among(program.phase[rows], (Phase.B, Phase.I, Phase.W)).any():
        raise PlanError("forward-only Program: it has no backward operation (B, or I and W)")
    _check_slots(program)
    cover = _coverage(program, rows)
    forward, backward, inputs, weights, again = (cover.times[p] for p in (Phase.F, Phase.B, Phase.I, Phase.W, Phase.R))
    _demand(cover, Phase.F, forward, 1)
    split = (inputs > 0).any(axis=2, keepdims=True)  # this slot and micro-batch goes by I and W
    _demand(cover, Phase.B, backward, np.where(split, 0, 1))
    _demand(cover, Phase.I, inputs, np.where(split, 1, 0))
    _demand(cover, Phase.W, weights, np.where(split, 1, 0))
    _demand(cover, Phase.R, again, np.minimum(again, 1))


def _work_rows(program: Program) -> NDArray[np.intp]:
    """Rows of micro-batches, a transfer counted at its sender and no row where one waits."""
    is_recv = stream_mask(program, frozenset(RECV_STREAMS))
    return np.flatnonzero(~is_recv & ~is_wait(program) & ~among(program.kind, _STEP_KINDS))


def _check_slots(program: Program) -> None:
    """Each layer has its compute: ATTN and FFN, or STAGE in a stage-level Program."""
    staged = program.kind == int(Kind.STAGE)
    if staged.any():
        if (~staged & ~among(program.kind, _STEP_KINDS)).any():
            raise PlanError("a Program is made of whole stages or of layers' operations, not of both")
        needed: tuple[Kind, ...] = (Kind.STAGE,)
    else:
        needed = (Kind.ATTN, Kind.FFN)
    for kind in needed:
        present = np.zeros(program.n_layers, dtype=np.bool_)
        present[program.layer[program.kind == int(kind)]] = True
        if not present.all():
            layer = int((~present).argmax())
            raise PlanError(
                f"missing operations: {kind.name} of layer {layer} ({KIND_LETTER[kind]}{layer}F0, ...) appears nowhere"
            )


def _coverage(program: Program, rows: NDArray[np.intp]) -> _Coverage:
    """Count what the rows cover."""
    kind, layer, phase, microbatch, chunk = (
        getattr(program, name)[rows].astype(np.int64) for name in ("kind", "layer", "phase", "microbatch", "chunk")
    )
    layers = program.n_layers + 1
    slots, slot = np.unique(kind * layers + layer + 1, return_inverse=True)
    shape = (len(Phase), slots.shape[0], program.n_microbatches, program.n_chunks)
    cell = (phase * shape[1] + slot) * shape[2] + microbatch
    cells = shape[0] * shape[1] * shape[2]
    whole = chunk == -1
    times = np.bincount(cell[~whole] * shape[3] + chunk[~whole], minlength=cells * shape[3]).reshape(shape)
    if whole.any():
        times = times + np.bincount(cell[whole], minlength=cells).reshape(shape[:3])[..., None]
    forward = among(phase, (Phase.F, Phase.R))
    counts = _chunks(slots // layers, slots % layers - 1, slot, forward, chunk, program.n_chunks)
    exists = np.arange(program.n_chunks) < counts[:, :, None]  # [direction, slot, chunk]
    # Each chunk of a P2P leads to another worker, and there need be none to the worker that has the data.
    exists = np.where((slots // layers == int(Kind.P2P))[:, None], times.any(axis=(0, 2)), exists)
    exists = exists[[1 if p in (Phase.F, Phase.R) else 0 for p in Phase]]
    return _Coverage(slots // layers, slots % layers - 1, times, exists[:, :, None, :])


def _chunks(
    kind: LongArray, layer: LongArray, slot: NDArray[np.intp], forward: BoolArray, chunk: LongArray, n_chunks: int
) -> LongArray:
    """Chunks [direction, slots] that each slot (of `kind` and `layer`) must have; direction 1 is forward.

    One, or all, or, of communications that share the chunks of halved experts
    between them, its own number.
    """
    own = np.ones((2, kind.shape[0]), dtype=np.int64)
    np.maximum.at(own, (forward.astype(np.int64), slot), chunk + 1)
    compute = among(kind, COMPUTE_KINDS)
    own[:, compute] = own[:, compute].max(axis=0)
    partner = np.zeros_like(own)
    for one, other in ((Kind.DISPATCH, Kind.COMBINE), (Kind.COMBINE, Kind.DISPATCH)):
        a, b = np.flatnonzero(kind == int(one)), np.flatnonzero(kind == int(other))
        _, at_a, at_b = np.intersect1d(layer[a], layer[b], assume_unique=True, return_indices=True)
        partner[:, a[at_a]] = own[:, b[at_b]]
    whole = own.max(axis=0) == 1  # in one chunk in both directions
    return np.where(whole | (own + partner == n_chunks), own, n_chunks)


def _demand(cover: _Coverage, phase: Phase, times: NDArray[np.int64], wanted: NDArray[np.int64] | int) -> None:
    """Raise for the first slot, micro-batch and chunk that a phase covers too rarely or too often."""
    fault = cover.exists[phase] & (times != wanted)
    if not fault.any():
        return
    index = np.argwhere(fault)[0]
    found, needed = int(times[tuple(index)]), int(np.broadcast_to(wanted, times.shape)[tuple(index)])
    token = cover.op(phase, index)
    if found < needed:
        raise PlanError(f"missing operation: {token} is not in the Program")
    rule = f"{needed} time{'s' if needed != 1 else ''} is right"
    if phase in (Phase.B, Phase.W) and needed == 0:
        rule = "its backward is split into I and W" if phase == Phase.B else "its backward is whole (B), not I and W"
    raise PlanError(f"repeated operation: {token} is covered {found} time{'s' if found != 1 else ''}, {rule}")


def check_recompute(program: Program, policy: Collection[Kind] | None) -> None:
    """R exactly for the kinds of the policy, if there is one (all chunks of every operation)."""
    if policy is None:
        return
    cover = _coverage(program, _work_rows(program))
    wanted = among(cover.kind, policy)[:, None, None]
    _demand(cover, Phase.R, cover.times[Phase.R], np.broadcast_to(wanted, cover.times[Phase.R].shape).astype(np.int64))


def check_homes(program: Program) -> None:
    """A micro-batch passes a layer in one replica, and a layer (of a replica) lives on one worker."""
    rows = _work_rows(program)
    layer, replica = program.layer[rows], program.replica[rows]
    at = _disagreement(pack_key(layer, program.microbatch[rows]), replica)
    if at is not None:
        first, second = (row_token(program, int(rows[i])) for i in at)
        raise PlanError(f"two replicas: {first} and {second} are the same layer and micro-batch")
    # Communication returns the other way in backward, so its two directions are two homes.
    compute = among(program.kind[rows], COMPUTE_KINDS)
    back = ~compute & (program.phase[rows] == int(Phase.B))
    place = pack_key(program.worker[rows], program.peer[rows])
    # Chunks of a spread head, and of the P2P that leads to it, are on workers of their own.
    part = np.where(among(program.kind[rows], (Kind.HEAD, Kind.P2P)), program.chunk[rows], 0)
    at = _disagreement(pack_key(program.kind[rows], layer, replica, back.astype(np.int32), part), place)
    if at is not None:
        first, second = (row_token(program, int(rows[i])) for i in at)
        raise PlanError(f"two places: {first} and {second} are the same layer on different workers")


def _disagreement(key: LongArray, value: NDArray[np.integer]) -> tuple[int, int] | None:
    """Two positions of equal key and different value, None if there are none."""
    order = np.argsort(key, kind="stable")
    key, value = key[order], value[order]
    differs = (key[1:] == key[:-1]) & (value[1:] != value[:-1])
    if not differs.any():
        return None
    i = int(differs.argmax())
    return int(order[i]), int(order[i + 1])


def check_step_end(program: Program) -> None:
    """Step work is alike everywhere: where one gradient is reduced, applied or gathered, all are.

    Layer -1 stands for the whole worker if it has no GRAD_SYNC per layer in that
    phase, else for the embedding and the head.
    """
    kind, phase = program.kind, program.phase
    gradient = among(kind, COMPUTE_KINDS - {Kind.OPTIM})
    gradient &= among(phase, (Phase.B, Phase.W))
    shape = (program.n_workers, program.n_layers + 1)  # column 0 is layer -1
    has = _mark(program, np.flatnonzero(gradient), shape)
    for direction, verb in ((Phase.B, "reduced"), (Phase.F, "gathered")):
        rows = np.flatnonzero((kind == int(Kind.GRAD_SYNC)) & (phase == int(direction)))
        named = _mark(program, rows, shape)
        if (extra := (named & ~has)[:, 1:]).any():
            worker, layer = (int(i) for i in np.argwhere(extra)[0])
            token = op_token(Op(Kind.GRAD_SYNC, direction, layer))
            raise PlanError(f"nothing to do: {token}@w{worker}, this worker has no gradient of layer {layer}")
        whole = named[:, 0] & ~named[:, 1:].any(axis=1)
        if rows.size and (left := has & ~named & ~whole[:, None]).any():
            worker, layer = (int(i) for i in np.argwhere(left)[0])
            token = op_token(Op(Kind.GRAD_SYNC, direction, layer - 1))
            raise PlanError(f"missing operation: {token}@w{worker} is not in the Program, other gradients are {verb}")
    steps = _mark(program, np.flatnonzero(kind == int(Kind.OPTIM)), shape).any(axis=1)
    gathers = _mark(program, np.flatnonzero((kind == int(Kind.GRAD_SYNC)) & (phase == int(Phase.F))), shape).any(axis=1)
    needs = gathers | (has.any(axis=1) & steps.any())
    if (idle := needs & ~steps).any():
        token = op_token(Op(Kind.OPTIM, Phase.F))
        raise PlanError(
            f"missing operation: {token}@w{int(idle.argmax())} is not in the Program, other gradients are applied"
        )


def _mark(program: Program, rows: NDArray[np.intp], shape: tuple[int, int]) -> BoolArray:
    """Flags [workers, layers + 1] of the (worker, layer) of these rows, layer -1 first."""
    marks = np.zeros(shape, dtype=np.bool_)
    marks[program.worker[rows], program.layer[rows] + 1] = True
    return marks
