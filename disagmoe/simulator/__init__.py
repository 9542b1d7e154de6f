"""Plan plus prices -> Timeline: what would run when, on any cluster."""

from disagmoe.simulator.engine import DeadlockError, simulate

__all__ = ["DeadlockError", "simulate"]
