"""Many configurations at once: systems run on each, in several processes, answers in the order asked.

A task is one system on one configuration in its one view; it is either tuned in
full (from the plan cache where the same was asked before) or given the candidates
to try. Which process does what changes no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.config import RunConfig
from bench.evaluate import Known, Row, cost_model, run_system
from bench.replay import best_candidates, ranked_candidates
from bench.side_by_side import in_order
from disagmoe.system import Candidate


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
    tasks: Sequence[Task],
    progress: Callable[[str], Any] = lambda name: None,
    processes: int | None = None,
    ask: Callable[[Task], tuple[Answer, ...]] | None = None,
) -> list[tuple[Answer, ...]]:
    """The answers to all tasks, in their order, each by `ask` (None: `answer`). Equal tasks are run once."""
    distinct = {_key(task): task for task in tasks}
    found: dict[Any, tuple[Answer, ...]] = {}
    results = in_order([partial(ask or answer, task) for task in distinct.values()], processes)
    for key, result in zip(distinct, results, strict=True):
        progress(distinct[key].name)
        found[key] = result
    return [found[_key(task)] for task in tasks]


def _key(task: Task) -> str:
    return repr((task.config, task.system, task.known))
