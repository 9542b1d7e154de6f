"""Decides how sizes are written in reports: as people of this field say them."""

from __future__ import annotations


def length(seq: int) -> str:
    """ "32K" for whole multiples of 1,024, else the number."""
    return f"{seq // 1024}K" if seq % 1024 == 0 else f"{seq:,}"
