"""Planners of our own system."""

from disagmoe.systems.disagmoe import DisagMoE

__all__ = ["DisagMoE"]
