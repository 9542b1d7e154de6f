"""The programs that solve integer programs: how each is started and what it reports.

Decides that one thread and a fixed seed are the default, that a program's files lie
in the private directory it is given, that nothing it prints reaches stdout, and that
a program which cannot be run is one line that names it and how to choose another.
CBC comes with PuLP; HiGHS is used where `highspy` is installed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pulp
from pulp.apis.coin_api import pulp_cbc_path

PROGRAMS = ("cbc", "highs")
"""Solvers in the order in which `auto` tries them."""
EXHAUSTIVE = "exhaustive"
SOLVERS = ("auto", *PROGRAMS, EXHAUSTIVE)
CHOICES = "solver=auto, cbc, cbc:<path to the program>, highs or exhaustive"


class SolverError(ValueError):
    """A solver gave no usable answer."""


class SolverMissing(SolverError):
    """The solver is not there or cannot be run."""


class Infeasible(SolverError):
    """No point satisfies the rows. The allocator names the limit that binds: gpus, sizes, nodes or memory."""

    def __init__(self, message: str, limit: str = "", needed_gib: float | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        self.needed_gib = needed_gib


class Unbounded(SolverError):
    """The objective has no least value: a row is missing."""


class NoAnswer(SolverError):
    """The time limit came before the first feasible point."""


@dataclass(frozen=True)
class Settings:
    """How to solve. `solver` as in SOLVERS, or "cbc:<path>" for another CBC program."""

    solver: str = "auto"
    time_limit_s: float | None = None
    threads: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS and not self.solver.startswith("cbc:"):
            raise ValueError(f"unknown solver {self.solver!r}: choose {CHOICES}")
        if self.time_limit_s is not None and not self.time_limit_s > 0.0:
            raise ValueError(f"time limit of {self.time_limit_s!r} s: must be above 0")
        if self.threads < 1 or not 0 <= self.seed < 2**31:
            raise ValueError(f"threads={self.threads}, seed={self.seed}: at least 1 thread and a seed of 0 to 2^31 - 1")


@dataclass(frozen=True)
class Outcome:
    """What a program reports. `status`: optimal, feasible, infeasible, unbounded or none (no point found)."""

    status: str
    values: Mapping[str, float]
    bound: float


_STATUS_OF_PULP: Mapping[int, str] = {
    pulp.LpSolutionOptimal: "optimal",
    pulp.LpSolutionIntegerFeasible: "feasible",
    pulp.LpSolutionInfeasible: "infeasible",
    pulp.LpSolutionUnbounded: "unbounded",
    pulp.LpSolutionNoSolutionFound: "none",
}


def _missing(name: str, reason: str) -> SolverMissing:
    return SolverMissing(f"solver {name}: {reason}; choose another with {CHOICES}")


def cbc(problem: pulp.LpProblem, settings: Settings, where: Path, name: str) -> Outcome:
    """CBC: the program that comes with PuLP, one on the path, or the one named after the colon."""
    path = name.partition(":")[2] or _cbc_path()
    log = where / "cbc.log"
    solver = pulp.COIN_CMD(
        path=path,
        msg=False,
        timeLimit=settings.time_limit_s,
        gapRel=0.0,
        gapAbs=0.0,
        threads=settings.threads,
        logPath=str(log),
        options=[f"randomSeed {settings.seed}", f"randomCbcSeed {settings.seed}"],
    )
    if not solver.available():
        raise _missing(name, f"{path} is not there or may not be executed")
    solver.tmpDir = str(where)
    try:
        problem.solve(solver)
    except (pulp.PulpSolverError, OSError) as error:
        raise _missing(name, f"{path} failed ({' '.join(str(error).split())})") from None
    status = "infeasible" if problem.status == pulp.LpStatusInfeasible else _STATUS_OF_PULP[problem.sol_status]
    found = {v.name: float(v.varValue or 0.0) for v in problem.variables()}
    lower = re.findall(r"^Lower bound:\s*(\S+)", log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    objective = float(problem.objective.value() or 0.0) if status in ("optimal", "feasible") else -inf
    return Outcome(status, found, objective if status == "optimal" else float(lower[-1]) if lower else -inf)


def highs(problem: pulp.LpProblem, settings: Settings, where: Path, name: str) -> Outcome:
    """HiGHS in this process; its banner goes nowhere."""
    path = where / "problem.mps"
    names = [v.name for v in problem.writeMPS(str(path), rename=1)[0]]
    with _stdout_to_nowhere():
        highspy = _import_highspy(name)
        highspy.Highs.resetGlobalScheduler(True)  # else the thread count of the first solve stays
        model: Any = highspy.Highs()
        options = {
            "output_flag": False,
            "threads": settings.threads,
            "parallel": "off" if settings.threads == 1 else "on",
            "random_seed": settings.seed,
            "mip_rel_gap": 0.0,
            "mip_abs_gap": 0.0,
            "mip_feasibility_tolerance": 1e-9,
            "time_limit": inf if settings.time_limit_s is None else settings.time_limit_s,
        }
        for key, value in options.items():
            model.setOptionValue(key, value)
        model.readModel(str(path))
        model.run()
        status = _status_of_highs(highspy, model)
        info, columns = model.getInfo(), list(model.getSolution().col_value)
    values = dict(zip(names, columns, strict=True)) if status in ("optimal", "feasible") else {}
    return Outcome(status, values, float(info.objective_function_value if status == "optimal" else info.mip_dual_bound))


def _status_of_highs(highspy: ModuleType, model: Any) -> str:
    known = highspy.HighsModelStatus
    status = model.getModelStatus()
    if status == known.kOptimal:
        return "optimal"
    if status == known.kInfeasible:
        return "infeasible"
    if (
        status == known.kUnboundedOrInfeasible
    ):  # presolve stops at "either": without an objective it is one or the other
        for column in range(model.getNumCol()):
            model.changeColCost(column, 0.0)
        model.run()
        return "unbounded" if model.getModelStatus() == known.kOptimal else "infeasible"
    if status == known.kUnbounded:
        return "unbounded"
    feasible = model.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return "feasible" if feasible else "none"


def installed(solver: str) -> bool:
    """Whether "cbc" or "highs" is there; whether it runs shows when it is used."""
    if solver == "highs":
        return find_spec("highspy") is not None
    return pulp.COIN_CMD(path=_cbc_path(), msg=False).available() is not None


def _cbc_path() -> str:
    """The program that comes with PuLP, else one on the path."""
    return pulp_cbc_path if Path(pulp_cbc_path).exists() else "cbc"


def _import_highspy(name: str) -> ModuleType:
    try:
        import highspy
    except ImportError:
        raise _missing(name, "the package highspy is not installed (pip install highspy)") from None
    return highspy


@contextmanager
def _stdout_to_nowhere() -> Iterator[None]:
    """Send what a library prints past Python (file descriptor 1) to nowhere."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
