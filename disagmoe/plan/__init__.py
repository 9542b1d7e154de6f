"""Plans: what runs where and in which order, as data that can be drawn, verified, simulated and executed.

Importing this package loads NumPy only; `disagmoe.plan.verify` and the
generators are imported by name.
"""

from disagmoe.plan.dependencies import Graph, PlanError, build_graph
from disagmoe.plan.plan import Batch, Layout, Placement, Plan, Worker
from disagmoe.plan.program import Program, Row
from disagmoe.plan.text import from_text, op_token, row_token, stage_text, to_text

__all__ = [
    "Batch",
    "Graph",
    "Layout",
    "Placement",
    "Plan",
    "PlanError",
    "Program",
    "Row",
    "Worker",
    "build_graph",
    "from_text",
    "op_token",
    "row_token",
    "stage_text",
    "to_text",
]
