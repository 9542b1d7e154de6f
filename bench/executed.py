"""Rows of plans that were run, emulated or measured: what they have in common.

Decides how a row that could not be run ends, that rates count every GPU a run stands
for, and which times are held against the simulation's.
"""

from __future__ import annotations

from bench.config import RunConfig
from bench.evaluate import Outcome, Row, interrupted
from disagmoe.allocator import Tuned
from disagmoe.cost.flops import train_flops_per_token
from disagmoe.specs import ModelSpec
from disagmoe.specs.devices import device

COMPARED = ("step_time_s", "compute_s", "exposed_comm_s", "bubble_s")
"""Times of a row that stand beside those of a simulation."""


def rates(config: RunConfig, model: ModelSpec, tokens: int, step_s: float, gpus: int) -> Row:
    """Rates of a step in which `gpus` GPUs train `model`, as deep as it ran, on so many tokens."""
    seq, rate = config.workload.seq, tokens / step_s
    flops = train_flops_per_token(model, seq)
    return {
        "step_time_s": step_s,
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / gpus,
        "mfu": rate / gpus * flops / (device(config.cluster.device).peak_bf16_tflops * 1e12),
    }


def refused(row: Row, reason: object, tuned: Tuned | None) -> tuple[Row, Outcome]:
    """A row whose plan cannot be run."""
    return {**row, "status": "not_applicable", "reason": str(reason)}, Outcome(None, None, tuned)


def failed(config: RunConfig, row: Row, error: Exception, tuned: Tuned | None) -> tuple[Row, Outcome]:
    """A row whose run ended in an error (a rank that died, a fault of one system), so that the others still run."""
    if interrupted(error):
        raise KeyboardInterrupt from error
    if config.debug:
        raise error
    return {**row, "status": "failed", "reason": f"{type(error).__name__}: {error}"}, Outcome(None, None, tuned)
