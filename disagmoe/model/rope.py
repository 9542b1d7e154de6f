"""Rotary position embedding (arXiv 2104.09864), in both orders of pairs, with optional YaRN.

Positions count from the start of each sequence. Frequencies and angles are
computed in fp64 and cast once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from disagmoe.model.conventions import Conventions, Yarn
from disagmoe.model.parts import accumulation_dtype


def rotation(seq: int, width: int, rules: Conventions, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [seq, width / 2] for heads of `width`, on the device of `like`, in at least fp32."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width
    frequencies = rules.rope_theta**-exponents
    scale = 1.0
    if rules.yarn is not None:
        frequencies = frequencies * _stretch(width, rules.rope_theta, rules.yarn, like.device)
        scale = rules.yarn.rotation_scale
    angles = torch.arange(seq, dtype=torch.float64, device=like.device).outer(frequencies)
    dtype = accumulation_dtype(like.dtype)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _stretch(width: int, theta: float, yarn: Yarn, device: torch.device) -> Tensor:
    """Factor [width / 2] on each frequency: 1 where it turns often, 1 / factor where rarely, linear between."""

    def pair_turning(times: float) -> float:
        return width * math.log(yarn.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float64, device=device)
    slowed = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
    return slowed / yarn.factor + (1 - slowed)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate x [..., seq, heads, width] by cosine and sine [seq, width / 2], in the type of x."""
    cosine, sine = cosine.unsqueeze(-2), sine.unsqueeze(-2)
    wide = x.to(cosine.dtype)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    rotated = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return rotated.to(x.dtype)
