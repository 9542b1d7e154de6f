"""Workload: how much is trained in one step, and how unevenly.

Decides how sizes are written (`32k` = 32,768), the default global batch, and
which batches, skews and stragglers are valid.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from disagmoe.specs.architecture import ModelSpec
from disagmoe.specs.fields import as_float, as_int

TOKENS_PER_STEP = 8_388_608
BATCH_MULTIPLE = 128
MAX_SIZE = 1 << 40

_SIZE = re.compile(r"(?P<number>[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)(?:e\+?(?P<exponent>[0-9]{1,2})|(?P<unit>[km]))?")
_UNITS = {None: 1, "k": 1024, "m": 1024**2}
_ALLOWED = "allowed: a positive integer such as 4096, 32_768, 1e4, 32k or 1.5k (k = 1024, m = 1024k)"


def parse_size(value: str | float, what: str = "size") -> int:
    """A positive whole number from the spellings people use.

    `32k`, `32K`, `32768`, `32_768` and `32768.0` are all 32,768; `1e4` is 10,000
    and `1.5k` is 1,536. Zero, negative and fractional sizes, other units and
    hexadecimal raise ValueError, as does anything above 2**40.
    """
    exact = _exact(value)
    if exact is None or exact.denominator != 1 or exact <= 0:
        raise ValueError(f"{what}={value!r} is no size; {_ALLOWED}")
    if exact > MAX_SIZE:
        raise ValueError(f"{what}={value!r} is larger than {MAX_SIZE}; {_ALLOWED}")
    return int(exact)


def _exact(value: object) -> Fraction | None:
    """The number that `value` spells, without rounding; None where it spells none."""
    if isinstance(value, int | float):
        return Fraction(value) if -math.inf < value < math.inf and not isinstance(value, bool) else None
    if not isinstance(value, str):
        return None
    match = _SIZE.fullmatch(value.strip().lower())
    if match is None:
        return None
    scale: int = 10 ** int(match["exponent"] or 0) * _UNITS[match["unit"]]
    return Fraction(match["number"].replace("_", "")) * scale


def default_global_batch(seq: int) -> int:
    """Sequences per step: 8,388,608 tokens, rounded up to a multiple of 128 sequences."""
    if seq <= 0:
        raise ValueError(f"seq must be positive, got {seq!r}")
    sequences = -(-TOKENS_PER_STEP // seq)
    return -(-sequences // BATCH_MULTIPLE) * BATCH_MULTIPLE


OPTIMIZERS = ("megatron", "precision_aware")
"""Recipes of what is kept per parameter: Megatron-Core's default, and the lighter one (disagmoe/plan/memory.py)."""


@dataclass(frozen=True)
class Workload:
    """One training step.

    `seq` is tokens per sequence, `global_batch` sequences per step,
    `micro_batch` sequences per attention rank (None: left to tuning). `skew` is
    the ratio of the busiest expert rank's load to the mean. `stragglers` holds
    (GPU index, slowdown factor >= 1); see `slowdowns`. `optimizer` is one of OPTIMIZERS.
    """

    seq: int
    global_batch: int
    micro_batch: int | None = None
    skew: float = 1.0
    stragglers: tuple[tuple[int, float], ...] = ()
    optimizer: str = "megatron"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer}: allowed: {', '.join(OPTIMIZERS)}")
        for key in ("seq", "global_batch", "micro_batch"):
            value = getattr(self, key)
            if (value is not None or key != "micro_batch") and as_int(value, f"workload: {key}") <= 0:
                raise ValueError(f"workload: {key} must be positive, got {value}")
        if as_float(self.skew, "workload: skew") < 1.0:
            raise ValueError(f"workload: skew is max/mean load and at least 1, got {self.skew!r}")
        gpus = [as_int(gpu, "workload: straggler GPU") for gpu, _ in self.stragglers]
        if len(set(gpus)) < len(gpus) or min(gpus, default=0) < 0:
            raise ValueError(f"workload: straggler GPUs must be distinct and not negative, got {gpus}")
        for gpu, slowdown in self.stragglers:
            if as_float(slowdown, "workload: straggler slowdown") < 1.0:
                raise ValueError(f"workload: slowdown of GPU {gpu} must be at least 1, got {slowdown!r}")

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.seq * self.global_batch

    def slowdowns(self, gpus: Sequence[int], replicas: int = 1) -> tuple[float, ...]:
        """Factor by which each worker computes slower than without stragglers (1.0: not at all).

        `gpus[w]` are the GPUs of worker w in each of `replicas` copies of all workers.
        GPUs are numbered worker by worker within a copy, copy after copy; those
        behind the last copy are idle. A worker is a symmetric group that waits for
        its slowest GPU, and copies wait for each other.
        """
        factors = [1.0] * len(gpus)
        behind = list(accumulate(gpus))
        for gpu, slowdown in self.stragglers:
            replica, place = divmod(gpu, behind[-1])
            if replica < replicas:
                worker = bisect_right(behind, place)
                factors[worker] = max(factors[worker], slowdown)
        return tuple(factors)


def context_warning(model: ModelSpec, seq: int) -> str | None:
    """A one-line warning where `seq` is longer than the model was configured for, else None."""
    if model.max_position is None or seq <= model.max_position:
        return None
    return f"seq {seq} exceeds max_position {model.max_position} of {model.title}; costs are computed all the same"
