"""Independent reference: what stage-level orders with overlapped pairs do in time, in plain Python.

Shares no code with the package's dependencies or its compiled loop. A unit is
(forward, backward): each a (phase, stage, micro-batch) or None; a unit with both
starts when the inputs of both are there and gives both results at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagmoe.ops import Phase
from disagmoe.plan.units import Stages, UnitOrder

Action = tuple[str, int, int, int]  # phase, stage, micro-batch, chunk
Unit = tuple[Action, ...]


def units(order: UnitOrder, worker: int, stages: Stages) -> list[Unit]:
    """One worker's order as plain values, the forward of a pair first."""
    found = []
    for f, fm, phase, b, bm in zip(*(column.tolist() for column in order), strict=True):
        unit: list[Action] = []
        if f >= 0:
            unit.append(("F", stages.of[worker][f], fm, f))
        if b >= 0:
            unit.append((Phase(phase).name, stages.of[worker][b], bm, b))
        found.append(tuple(unit))
    return found


def makespan(orders: Sequence[Sequence[Unit]], n_stages: int, seconds: Callable[[Unit], float]) -> float | None:
    """When the last unit ends, None where the orders deadlock."""
    end: dict[tuple[str, int, int], float] = {}

    def inputs(action: Action) -> list[tuple[str, int, int]]:
        phase, stage, microbatch, _ = action
        if phase == "F":
            return [("F", stage - 1, microbatch)] if stage else []
        if phase == "W":
            return [("I", stage, microbatch)]
        return [("I", stage + 1, microbatch)] if stage + 1 < n_stages else [("F", stage, microbatch)]

    at, clock = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for w, order in enumerate(orders):
            while at[w] < len(order):
                needs = [n for action in order[at[w]] for n in inputs(action)]
                if any(n not in end for n in needs):
                    break
                clock[w] = max([clock[w], *(end[n] for n in needs)]) + seconds(order[at[w]])
                for phase, stage, microbatch, _ in order[at[w]]:
                    for result in {"F": ("F",), "W": ("W",), "I": ("I",), "B": ("I", "W")}[phase]:
                        assert (result, stage, microbatch) not in end, "done twice"
                        end[result, stage, microbatch] = clock[w]
                at[w] += 1
                moved = True
    return max(clock) if all(at[w] == len(o) for w, o in enumerate(orders)) else None
