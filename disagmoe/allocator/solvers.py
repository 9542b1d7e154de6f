"""Integer programs by key, and how far a solver's answer is trusted.

Decides that a solver's word is never taken as it is: values of whole variables are
rounded only where they are whole within TOLERANCE, and every row of whole numbers is
checked again after rounding. Variables are named by count, so no name of a user
reaches a solver, and files lie in a private directory outside the work tree.

`auto` takes the first program that runs. Where none does, SolverMissing says why; the
allocator then searches exhaustively (`disagmoe.allocator.exhaustive`), as it does
when asked to.
"""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import fsum, isfinite
from pathlib import Path

import pulp

from disagmoe.allocator import engines
from disagmoe.allocator.engines import (
    EXHAUSTIVE,
    PROGRAMS,
    SOLVERS,
    Infeasible,
    NoAnswer,
    Settings,
    SolverError,
    SolverMissing,
    Unbounded,
    installed,
)

__all__ = [
    "EXHAUSTIVE",
    "PROGRAMS",
    "SOLVERS",
    "Answer",
    "Infeasible",
    "IntegerProgram",
    "NoAnswer",
    "Settings",
    "SolverError",
    "SolverMissing",
    "Terms",
    "Unbounded",
    "installed",
    "whole",
]

TOLERANCE = 1e-5
"""How far from a whole number a solver's value may lie."""

Key = Hashable
Terms = Iterable[tuple[Key, float]]


@dataclass(frozen=True)
class Answer:
    """A point. `proven` is False where a time limit ended the search; nothing is below `bound`."""

    values: Mapping[Key, float]
    counts: Mapping[Key, int]
    proven: bool
    bound: float
    solver: str
    skipped: tuple[str, ...] = ()


def whole(value: float, what: Key) -> int:
    """A solver's value of a whole variable: 2.9999999 is 3, 1e-8 is 0, 2.4 an error."""
    if not isfinite(value) or abs(value - round(value)) > TOLERANCE:
        raise SolverError(f"the solver gave {what} = {value!r}, which is not integral within {TOLERANCE:g}")
    return round(value)


@dataclass(frozen=True)
class _Row:
    terms: tuple[tuple[Key, float], ...]
    sense: str
    bound: float

    def holds(self, counts: Mapping[Key, int]) -> bool:
        """True where the row holds, or where a variable of it is not a whole one."""
        if any(key not in counts for key, _ in self.terms):
            return True
        left = fsum(factor * counts[key] for key, factor in self.terms)
        slack = 1e-9 * max(1.0, abs(self.bound))
        return {
            "<=": left <= self.bound + slack,
            ">=": left >= self.bound - slack,
            "==": abs(left - self.bound) <= slack,
        }[self.sense]


class IntegerProgram:
    """Variables by any key, rows of (key, factor) pairs, one objective per solve."""

    def __init__(self) -> None:
        self._bounds: dict[Key, tuple[float, float | None, bool]] = {}
        self._rows: list[_Row] = []

    def whole(self, key: Key, low: int, high: int) -> None:
        """A whole variable between two bounds."""
        self._declare(key, low, high, True)

    def real(self, key: Key) -> None:
        """A real variable of at least 0."""
        self._declare(key, 0.0, None, False)

    def _declare(self, key: Key, low: float, high: float | None, is_whole: bool) -> None:
        if key in self._bounds:
            raise ValueError(f"variable {key!r} is there already")
        self._bounds[key] = (low, high, is_whole)

    def row(self, terms: Terms, sense: str, bound: float) -> None:
        """Add sum(factor x variable) `sense` bound, with sense "<=", ">=" or "=="."""
        self._rows.append(_Row(tuple(terms), sense, float(bound)))

    def minimise(self, terms: Terms, settings: Settings) -> Answer:
        """A point with the least objective. Raises a SolverError; SolverMissing lists what `auto` tried."""
        objective = tuple(terms)
        auto = settings.solver == "auto"
        skipped: list[str] = []
        for name in PROGRAMS if auto else (settings.solver,):
            try:
                with tempfile.TemporaryDirectory(prefix="disagmoe-solver-") as directory:
                    return self._solve(objective, name, settings, Path(directory), tuple(skipped))
            except SolverMissing as reason:
                if not auto:
                    raise
                skipped.append(str(reason))
        raise SolverMissing("; ".join(skipped))

    def _solve(
        self,
        objective: tuple[tuple[Key, float], ...],
        name: str,
        settings: Settings,
        where: Path,
        skipped: tuple[str, ...],
    ) -> Answer:
        problem = pulp.LpProblem("disagmoe", pulp.LpMinimize)
        variable = {
            key: problem.add_variable(f"x{i}", low, high, pulp.LpInteger if is_whole else pulp.LpContinuous)
            for i, (key, (low, high, is_whole)) in enumerate(self._bounds.items())
        }

        def expression(terms: Terms) -> pulp.LpAffineExpression:
            return pulp.LpAffineExpression([(variable[key], factor) for key, factor in terms])

        problem += expression(objective)
        for row in self._rows:
            left = expression(row.terms)
            problem += (
                left <= row.bound
                if row.sense == "<="
                else left >= row.bound
                if row.sense == ">="
                else left == row.bound
            )
        engine = engines.highs if name == "highs" else engines.cbc
        outcome = engine(problem, settings, where, name)
        _raise_for(outcome.status, name, settings)
        values = {key: outcome.values.get(variable[key].name, 0.0) for key in self._bounds}
        counts = {key: whole(values[key], key) for key, (_, _, is_whole) in self._bounds.items() if is_whole}
        broken = [row for row in self._rows if not row.holds(counts)]
        if broken:
            raise SolverError(f"{name}: after rounding, {len(broken)} of its rows do not hold; first: {broken[0]}")
        return Answer(values, counts, outcome.status == "optimal", outcome.bound, name, skipped)


def _raise_for(status: str, name: str, settings: Settings) -> None:
    if status == "infeasible":
        raise Infeasible(f"{name}: no point satisfies every row")
    if status == "unbounded":
        raise Unbounded(f"{name}: the objective has no least value")
    if status == "none":
        raise NoAnswer(f"{name}: no feasible point within {settings.time_limit_s} s; allow more time or another solver")
