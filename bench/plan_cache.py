"""Tuned plans, kept by content so that a sweep that is run again need not tune again.

The key covers everything that decides a plan: the system with its options, the
model, cluster, workload and calibration, the transport, the search budget and
the sources. What is kept is the chosen candidate and the trials, never a result:
the plan is rebuilt, verified and simulated each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import disk_cache
from bench.identity import ROOT, plain, source_digest, system_digest
from disagmoe.allocator import PeakFunction, StepFunction, Trial, Tuned, tune
from disagmoe.plan.plan import Plan
from disagmoe.system import Problem, System

CACHE = disk_cache.CACHE / "plans"


def tuned(
    system: System,
    problem: Problem,
    step: StepFunction,
    *,
    peak: PeakFunction | None = None,
    budget: int,
    on_trial: Callable[[int], None] | None = None,
    cache: Path | None = CACHE,
) -> Tuned:
    """As `disagmoe.allocator.tune`, from the cache where the same question was answered before."""
    if cache is None:
        return tune(system, problem, step, peak=peak, budget=budget, on_trial=on_trial)
    path = disk_cache.path_of(cache, _question(system, problem, budget))
    kept = _read(path)
    if kept is not None:
        return _rebuild(system, problem, kept)
    found = tune(system, problem, step, peak=peak, budget=budget, on_trial=on_trial)
    values = {key: plain(getattr(found, key)) for key in _KEPT if key != "trials"}
    disk_cache.write(path, {**values, "trials": [plain(trial) for trial in found.trials]})
    return found


def _question(system: System, problem: Problem, budget: int) -> dict[str, Any]:
    options: Any = system
    return {
        "system": [type(system).__module__, type(system).__qualname__, asdict(options)],
        "model": problem.model,
        "cluster": problem.cluster,
        "workload": problem.workload,
        "calibration": problem.costs.calibration,
        "exchange": [problem.transport, problem.merge, problem.ep],
        "budget": budget,
        "sources": [source_digest(ROOT), system_digest(system.name)],
    }


def _read(path: Path) -> dict[str, Any] | None:
    """The kept answer; None where there is none or it is not whole."""
    kept = disk_cache.read(path)
    return kept if isinstance(kept, dict) and set(kept) == set(_KEPT) else None


_KEPT = ("status", "reason", "candidate", "step_s", "needed_gib", "trials")


def _rebuild(system: System, problem: Problem, kept: dict[str, Any]) -> Tuned:
    plan = None
    if kept["candidate"] is not None:
        layout = system.layout(problem, kept["candidate"])
        plan = Plan(layout, system.program(problem, layout))
    trials = tuple(Trial(**trial) for trial in kept["trials"])
    return Tuned(kept["status"], kept["reason"], kept["candidate"], plan, kept["step_s"], kept["needed_gib"], trials)
