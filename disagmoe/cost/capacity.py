"""How many rows a capacity-padded exchange gives every expert (Tutel).

Decides the size of the dense buffer [experts, rows, hidden] of one rank, as
tutel/impls/fast_dispatch.py does (extract_critical, https://github.com/microsoft/Tutel).
"""

from __future__ import annotations

from math import ceil


def capacity_rows(fullest: int, tokens: int, experts: int, top_k: int, factor: float, degree: int) -> int:
    """Rows of one expert from one rank with `tokens` tokens, in whole chunks of an overlap degree.

    `factor` > 0 fixes the rows, top_k * int(factor * ceil(tokens / experts)); 0
    follows the `fullest` expert; < 0 follows it up to a factor of that size.
    """
    fixed = top_k * int(abs(factor) * ceil(tokens / experts))
    rows = fixed if factor > 0.0 else fullest if factor == 0.0 else min(fullest, fixed)
    if rows < 1:
        raise ValueError(f"tutel capacity_factor={factor:g} leaves no row per expert for {tokens} tokens of {experts}")
    return -(-rows // degree) * degree
