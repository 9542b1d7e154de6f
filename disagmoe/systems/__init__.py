"""Planners of our own system."""

from disagmoe.systems.disagmoe import DisagMoE
from disagmoe.systems.disagmoe_plus import DisagMoEPlus

__all__ = ["DisagMoE", "DisagMoEPlus"]
