"""Initial values: a function of the seed and the global name of a parameter, of nothing else.

So placement, number of expert ranks and rank never change them: expert 17 of
layer 3 starts alike wherever it lives, and no two experts start alike. Values are
drawn in fp32 and cast, so an fp64 model starts where the fp32 one does.

Matrices are normal with standard deviation 0.02, those that write into the
residual stream with 0.02 / sqrt(2 * layers) (GPT-2); norms are 1; biases, sinks
and the router's correction bias are 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02
ZEROS = ("bias", "correction_bias", "sinks")
RESIDUAL_WRITERS = ("wo", "w2")


def initial_value(name: str, shape: Sequence[int], *, seed: int, layers: int) -> Tensor:
    """The fp32 starting value of the parameter `name` (shape as given) of a model of `layers` layers."""
    path = name.split(".")
    last = path[-1]
    if last == "weight" and path[-2].endswith("norm"):
        return torch.ones(*shape)
    if last in ZEROS or (last.startswith("b") and len(shape) == 1):
        return torch.zeros(*shape)
    deviation = STANDARD_DEVIATION / math.sqrt(2 * layers) if last in RESIDUAL_WRITERS else STANDARD_DEVIATION
    return standard_normal(name, shape, seed=seed).mul_(deviation)


def standard_normal(name: str, shape: Sequence[int], *, seed: int) -> Tensor:
    """Standard normal fp32 values that depend on `seed` and `name` only.

    The key is 128 bits of a hash: torch's CPU generator keeps 32 bits of its
    seed, too few for the 44,544 expert matrices of a large model to stay distinct.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    return torch.from_numpy(np.random.Generator(bits).standard_normal(tuple(shape), dtype=np.float32))
