"""Choosing a plan: candidates, memory, bounds and a step function that is handed in."""

from disagmoe.allocator.tuner import StepFunction, Trial, Tuned, tune

__all__ = ["StepFunction", "Trial", "Tuned", "tune"]
