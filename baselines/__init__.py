"""Planners of the systems DisagMoE is compared with, and the registry that finds them."""

from baselines.registry import get_system, system_names

__all__ = ["get_system", "system_names"]
