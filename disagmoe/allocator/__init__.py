"""Choosing a plan: candidates, memory, bounds, a division of the cluster, and a step function that is handed in."""

from disagmoe.allocator.allocation import Allocation, AllocationModel, allocation_model
from disagmoe.allocator.local_search import Axis, Found, Space, local_search
from disagmoe.allocator.milp import allocate, solve
from disagmoe.allocator.ring import RingMemory, ring_candidates, ring_space, sizes_of
from disagmoe.allocator.shapes import Shape, Sizes
from disagmoe.allocator.solvers import Infeasible, Settings, SolverError
from disagmoe.allocator.tuner import PeakFunction, StepFunction, Trial, Tuned, tune

__all__ = [
    "Allocation",
    "AllocationModel",
    "Axis",
    "Found",
    "Infeasible",
    "PeakFunction",
    "RingMemory",
    "Settings",
    "Shape",
    "Sizes",
    "SolverError",
    "Space",
    "StepFunction",
    "Trial",
    "Tuned",
    "allocate",
    "allocation_model",
    "local_search",
    "ring_candidates",
    "ring_space",
    "sizes_of",
    "solve",
    "tune",
]
