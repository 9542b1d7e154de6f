"""Where a worker's step goes: compute, exposed communication, bubble.

Decides the accounting. Everything is measured as the length of unions of
intervals, so operations side by side are never counted twice:

    COMP        some compute operation runs          COMM   bytes of some transfer or collective move
    compute     = |COMP|                             overlapped = |COMM and COMP|
    exposed     = |COMM without COMP|                bubble     = neither
    step        = compute + exposed + bubble

Waiting for a peer is not COMM: it is `wait_s`, a part of the bubble.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from disagmoe.ops import COMPUTE_KINDS, Kind
from disagmoe.plan.plan import Placement
from disagmoe.timeline.timeline import Timeline

FloatArray = NDArray[np.float64]

EXPOSED_KINDS = {"dispatch": Kind.DISPATCH, "combine": Kind.COMBINE, "p2p": Kind.P2P, "grad_sync": Kind.GRAD_SYNC}
"""Time exposed by several kinds at once goes to the first of these, so that the parts sum to the whole."""

TOLERANCE = 1e-9  # of the step, for the accounting identity

# How many intervals of each category are open is counted in one integer, ten bits per category.
_BITS = 10
_FIELD = (1 << _BITS) - 1
_COMPUTE, _WAIT = 0, len(EXPOSED_KINDS) + 1
_ANY_COMM = (1 << _BITS * len(EXPOSED_KINDS)) - 1  # after shifting compute away
_CATEGORY = np.array(
    [_COMPUTE if k in COMPUTE_KINDS else 1 + list(EXPOSED_KINDS.values()).index(k) for k in Kind], dtype=np.int64
)


class AccountingError(ValueError):
    """A Timeline whose intervals do not add up to its step."""


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step by what happened in them; see the module docstring for the definitions.

    `comm_s` = overlapped + exposed. `wait_s` is the part of the bubble in which a
    transfer of this worker was posted but had not started; None where an executed
    run does not know its posts (exposed then includes wait).
    """

    step_s: float
    compute_s: float
    overlapped_s: float
    exposed_s: float
    bubble_s: float
    wait_s: float | None
    exposed_by_kind_s: Mapping[str, float]

    @property
    def comm_s(self) -> float:
        return self.overlapped_s + self.exposed_s

    @property
    def stall_s(self) -> float:
        """Exposed communication plus bubble: what a pipeline can only shift from one to the other."""
        return self.exposed_s + self.bubble_s

    @property
    def exposed_tokens_s(self) -> float:
        """Exposed time of token and pipeline transfers: dispatch, combine and P2P without gradient sync."""
        return sum(s for name, s in self.exposed_by_kind_s.items() if name != "grad_sync")

    def as_row(self) -> dict[str, float | dict[str, float] | None]:
        """The fields of a result row."""
        return {
            "compute_s": self.compute_s,
            "overlapped_comm_s": self.overlapped_s,
            "exposed_comm_s": self.exposed_s,
            "bubble_s": self.bubble_s,
            "wait_s": self.wait_s,
            "stall_s": self.stall_s,
            "exposed_by_kind_s": dict(self.exposed_by_kind_s),
        }


@dataclass(frozen=True)
class WorkerMetrics(Breakdown):
    """The Breakdown of one worker (index into Placement.workers)."""

    worker: int


@dataclass(frozen=True)
class Summary:
    """A step over all workers.

    `mean` and `pools` are means weighted by GPUs, so step = compute + exposed +
    bubble holds in them too. `maximum` takes every field from the worker where it
    is largest; its fields do not add up. `pools` has the attention and the expert
    workers of a disaggregated placement apart ("A", "F") and is empty otherwise.
    """

    mean: Breakdown
    maximum: Breakdown
    pools: Mapping[str, Breakdown]

    def as_row(self) -> dict[str, object]:
        """The fields of a result row, with "pools" (null unless disaggregated)."""
        pools = {name: pool.as_row() for name, pool in self.pools.items()}
        return {**self.mean.as_row(), "maximum": self.maximum.as_row(), "pools": pools or None}


def worker_metrics(timeline: Timeline) -> tuple[WorkerMetrics, ...]:
    """The Breakdown of every worker; AccountingError where intervals are impossible or do not add up."""
    program, step = timeline.program, timeline.step_s
    _check_intervals(timeline)
    bounds = np.searchsorted(program.worker, np.arange(program.n_workers + 1))
    category = _CATEGORY[program.kind]
    return tuple(
        _account(
            worker,
            step,
            timeline.start_s[low:high],
            timeline.end_s[low:high],
            timeline.post_s[low:high],
            category[low:high],
        )
        for worker, (low, high) in enumerate(pairwise(bounds.tolist()))
    )


def summarize(metrics: Sequence[WorkerMetrics], placement: Placement) -> Summary:
    """GPU-weighted means, maxima and pools over the workers of one step."""
    if len(metrics) != len(placement.workers):
        raise ValueError(f"{len(metrics)} workers were measured, but the placement has {len(placement.workers)}")
    gpus = [w.gpus for w in placement.workers]
    pools: dict[str, Breakdown] = {}
    if placement.disaggregated:
        for name in sorted({w.pool for w in placement.workers}):
            members = [i for i, w in enumerate(placement.workers) if w.pool == name]
            pools[name] = _combine([metrics[i] for i in members], _mean([gpus[i] for i in members]))
    return Summary(_combine(metrics, _mean(gpus)), _combine(metrics, max), pools)


def _check_intervals(timeline: Timeline) -> None:
    """Every row must start at or after 0 and end, at a known time, no earlier than it starts."""
    bad = ~((timeline.start_s >= 0.0) & (timeline.end_s >= timeline.start_s) & np.isfinite(timeline.end_s))
    if bad.any():
        row = int(np.argmax(bad))
        raise AccountingError(
            f"{timeline.program.op(row)} on worker {timeline.program.worker[row]} runs from {timeline.start_s[row]} s "
            f"to {timeline.end_s[row]} s; need 0 <= start <= end"
        )


def _account(
    worker: int, step: float, start: FloatArray, end: FloatArray, post: FloatArray, category: NDArray[np.int64]
) -> WorkerMetrics:
    """Cut one worker's step at every start and end, and sum the pieces by what is open in them."""
    comm = category != _COMPUTE
    posts_known = not bool(np.isnan(post[comm]).any())
    waits = np.flatnonzero(comm & (post < start))
    opens = np.left_shift(np.int64(1), _BITS * category)
    wait = np.full(waits.shape[0], 1 << _BITS * _WAIT, dtype=np.int64)
    times = np.concatenate([[0.0], start, end, np.maximum(post[waits], 0.0), start[waits], [step]])
    change = np.concatenate([[0], opens, -opens, wait, -wait, [0]])
    order = np.argsort(times, kind="stable")
    seconds = np.diff(times[order])
    is_open = np.cumsum(change[order])[:-1]

    def total(mask: NDArray[np.bool_]) -> float:
        return float(seconds[mask].sum())

    computing = (is_open & _FIELD) > 0
    communicating = (is_open >> _BITS & _ANY_COMM) > 0
    idle = ~(computing | communicating)
    unclaimed, by_kind = ~computing, {}
    for i, name in enumerate(EXPOSED_KINDS):
        mine = unclaimed & ((is_open >> _BITS * (1 + i) & _FIELD) > 0)
        by_kind[name] = total(mine)
        unclaimed &= ~mine
    metrics = WorkerMetrics(
        step_s=step,
        compute_s=total(computing),
        overlapped_s=total(computing & communicating),
        exposed_s=total(communicating & ~computing),
        bubble_s=total(idle),
        wait_s=total(idle & (is_open >> _BITS * _WAIT > 0)) if posts_known else None,
        exposed_by_kind_s=by_kind,
        worker=worker,
    )
    _check_identity(metrics)
    return metrics


def _check_identity(m: WorkerMetrics) -> None:
    """step = compute + exposed + bubble, and exposed = the sum of its kinds."""
    parts = m.compute_s + m.exposed_s + m.bubble_s
    kinds = math.fsum(m.exposed_by_kind_s.values())
    if not (abs(m.step_s - parts) <= TOLERANCE * m.step_s and abs(m.exposed_s - kinds) <= TOLERANCE * m.step_s):
        raise AccountingError(
            f"worker {m.worker}: compute {m.compute_s} + exposed {m.exposed_s} (by kind {kinds}) + bubble {m.bubble_s} "
            f"is not the step of {m.step_s} s"
        )


def _mean(weights: Sequence[int]) -> Callable[[list[float]], float]:
    """The weighted mean as a function of values."""
    whole = math.fsum(weights)

    def mean(values: list[float]) -> float:
        return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / whole

    return mean


def _combine(metrics: Sequence[Breakdown], join: Callable[[list[float]], float]) -> Breakdown:
    """Join the breakdowns of several workers field by field."""
    waits = [m.wait_s for m in metrics if m.wait_s is not None]
    return Breakdown(
        step_s=join([m.step_s for m in metrics]),
        compute_s=join([m.compute_s for m in metrics]),
        overlapped_s=join([m.overlapped_s for m in metrics]),
        exposed_s=join([m.exposed_s for m in metrics]),
        bubble_s=join([m.bubble_s for m in metrics]),
        wait_s=join(waits) if len(waits) == len(metrics) else None,
        exposed_by_kind_s={name: join([m.exposed_by_kind_s[name] for m in metrics]) for name in EXPOSED_KINDS},
    )
