"""Rates of a calibration from times measured on the machine at hand.

Decides how each number follows from its samples: all fits are least squares of
relative errors. A multiply of r rows takes launch + flops / peak x (1 + half / r);
the attention kernel grows with the keys a query meets plus those of whole tiles; a
transfer takes a latency plus its bytes over a rate. What a step of real operations
takes beyond multiplies and attention, host time included, is spread over its
kernels (`launch_us`) and the bytes they move (`hbm_efficiency`), by a search that
prices every operation with the cost model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagmoe.cost.compute import SCORE_BACKWARD

Array = NDArray[np.float64]


@dataclass(frozen=True)
class MultiplyFit:
    """A multiply reaches `efficiency` of the peak x r / (r + rows_half); `error` is the rms relative error."""

    efficiency: float
    rows_half: float
    error: float


@dataclass(frozen=True)
class AttentionFit:
    """As `Rates` has it."""

    efficiency: float
    dim_half: float
    pad_keys: float
    backward_ratio: float
    error: float


@dataclass(frozen=True)
class LinkFit:
    """A transfer takes `alpha_s` and moves `bytes_per_s`."""

    alpha_s: float
    bytes_per_s: float
    error: float


def relative(columns: Sequence[Array], seconds: Array) -> tuple[Array, float]:
    """Coefficients >= 0 with the least relative errors of `columns` @ x against `seconds`, and their rms."""
    matrix = np.stack(columns, axis=1) / seconds[:, None]
    active = list(range(matrix.shape[1]))
    x = np.zeros(matrix.shape[1])
    while active:
        found, *_ = np.linalg.lstsq(matrix[:, active], np.ones(len(seconds)), rcond=None)
        if (found >= 0.0).all():
            x[active] = found
            break
        active.pop(int(np.argmin(found * matrix[:, active].mean(axis=0))))
    return x, float(np.sqrt(np.mean((matrix @ x - 1.0) ** 2)))


def fit_multiply(rows: Array, flops: Array, seconds: Array, peak_flops: float) -> MultiplyFit:
    """From multiplies of `rows` rows (of one expert) and `flops` FLOPs; a fixed part per call is not reported."""
    x, error = relative([flops, flops / rows, np.ones_like(rows)], seconds)
    per_flop = x[0] if x[0] > 0.0 else float((seconds / flops).min())
    return MultiplyFit(min(1.0, 1.0 / (peak_flops * per_flop)), x[1] / per_flop, error)


def fit_attention(
    seq: Array, heads: Array, width: Array, forward_s: Array, backward_s: Array, peak_flops: float
) -> AttentionFit:
    """From causal attention of one sequence each, forward and backward.

    FLOPs are 4 x width x heads x seq x keys; a kernel of width d reaches
    efficiency x d / (d + dim_half), so seconds are linear in keys x (1 + half / d).
    """
    queries = 4.0 * heads * seq
    keys = seq / 2.0
    columns = [queries * width * keys, queries * keys, queries * width, np.ones_like(seq)]
    x, error = relative(columns, forward_s)
    per_flop = x[0] if x[0] > 0.0 else float((forward_s / columns[0]).min())
    ratio = SCORE_BACKWARD * float(np.exp(np.mean(np.log(forward_s / backward_s))))
    return AttentionFit(
        efficiency=min(1.0, 1.0 / (peak_flops * per_flop)),
        dim_half=x[1] / per_flop,
        pad_keys=x[2] / per_flop,
        backward_ratio=min(1.0, ratio),
        error=error,
    )


def fit_link(nbytes: Array, seconds: Array, most: float) -> LinkFit:
    """From transfers of `nbytes` bytes; no rate is above `most` bytes/s."""
    x, error = relative([np.ones_like(nbytes), nbytes], seconds)
    rate = most if x[1] * most < 1.0 else 1.0 / x[1]
    return LinkFit(float(x[0]), float(rate), error)


def search(
    price: Callable[[float, float], Array], seconds: Array, weights: Array, low: Array, high: Array
) -> tuple[float, float, float]:
    """Two numbers within [low, high], and the weighted rms of the log ratio of `price(a, b)` to `seconds` there.

    Looked for on a grid of logarithms that is made finer around its best point: errors
    of prices that are a maximum of terms have no useful slope.
    """
    begin, end = np.log(low), np.log(high)
    best, error = (begin + end) / 2.0, np.inf
    for _ in range(5):
        grid = [np.linspace(begin[i], end[i], 9) for i in range(2)]
        for a in grid[0]:
            for b in grid[1]:
                ratio = np.log(price(float(np.exp(a)), float(np.exp(b))) / seconds)
                found = float(np.sqrt(np.average(ratio**2, weights=weights)))
                if found < error:
                    best, error = np.array([a, b]), found
        span = (end - begin) / 4.0
        begin, end = np.maximum(np.log(low), best - span / 2.0), np.minimum(np.log(high), best + span / 2.0)
    return float(np.exp(best[0])), float(np.exp(best[1])), error
