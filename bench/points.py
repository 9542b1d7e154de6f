"""Many configurations at once: systems run on each, in several processes, answers in the order asked.

A task is one system on one configuration in its one view; it is either tuned in
full (from the plan cache where the same was asked before) or given the candidates
to try. Which process does what changes no answer.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from bench.config import RunConfig
from bench.evaluate import Known, Row, cost_model, run_system
from bench.replay import best_candidates, ranked_candidates
from disagmoe.system import Candidate

MAX_PROCESSES = 8


@dataclass(frozen=True)
class Task:
    """`name` says in words what is run; `known` None asks for a full search."""

    name: str
    config: RunConfig
    system: str
    known: Known | None = None


@dataclass(frozen=True)
class Answer:
    """One row of a system, and the candidates behind it: the fastest ones, and all that fit, promising ones first."""

    row: Row
    best: tuple[Candidate, ...] = ()
    ranked: tuple[Candidate, ...] = ()


def answer(task: Task) -> tuple[Answer, ...]:
    """Every row of the task's system."""
    (view,) = task.config.views
    costs = cost_model(task.config)
    return tuple(
        Answer(row)
        if outcome.tuned is None
        else Answer(row, best_candidates(outcome.tuned), ranked_candidates(outcome.tuned))
        for row, outcome in run_system(task.config, costs, task.system, view, known=task.known)
    )


def asked(name: str, config: RunConfig, system: str, known: Known | None = None) -> Task:
    """A task without what the system does not see, so that equal questions are equal."""
    options = {key: value for key, value in config.system_options.items() if key == system}
    return Task(name, replace(config, systems=(system,), system_options=options), system, known)


def answers(
    tasks: Sequence[Task], progress: Callable[[str], Any] = lambda name: None, processes: int | None = None
) -> list[tuple[Answer, ...]]:
    """The answers to all tasks, in their order. Equal tasks are run once."""
    distinct = {_key(task): task for task in tasks}
    found: dict[Any, tuple[Answer, ...]] = {}
    for key, result in zip(distinct, _run(list(distinct.values()), processes), strict=True):
        progress(distinct[key].name)
        found[key] = result
    return [found[_key(task)] for task in tasks]


def _key(task: Task) -> str:
    return repr((task.config, task.system, task.known))


def _run(tasks: Sequence[Task], processes: int | None) -> Iterator[tuple[Answer, ...]]:
    count = min(processes or _cores(), MAX_PROCESSES, len(tasks))
    if count <= 1:
        yield from map(answer, tasks)
        return
    # Fresh processes: a forked one would inherit the locks of the progress display's thread.
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(answer, tasks)


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
