"""Answers of a study, kept by content as they come, so that one that was interrupted goes on where it stopped.

Decides what an answer hangs on: the configuration of its task with the contents of
its calibration, every option of its system, the candidates it was given, and the
sources. Rows that failed are not kept. The plan cache beside it keeps plans that are
built and simulated again; here is what came of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from baselines.registry import get_system
from bench import disk_cache
from bench.identity import NOT_IDENTITY, ROOT, plain, source_digest, system_digest
from bench.points import Answer, Task, answer
from disagmoe.cost.calibration import load_calibration

FOLDER = disk_cache.CACHE / "answers"


def kept(task: Task, folder: Path = FOLDER, ask: Callable[[Task], tuple[Answer, ...]] = answer) -> tuple[Answer, ...]:
    """`ask(task)`, or what it said before; without the long list of ranked candidates."""
    path = disk_cache.path_of(folder, _question(task))
    found = _read(path)
    if found is None:
        found = tuple(replace(one, row=plain(one.row), ranked=()) for one in ask(task))
        if all(one.row["status"] != "failed" for one in found):
            disk_cache.write(path, [{"row": one.row, "best": plain(one.best)} for one in found])
    return found


def _question(task: Task) -> dict[str, Any]:
    config = task.config
    system: Any = get_system(task.system, **config.system_options.get(task.system, {}))
    return {
        "configuration": {f.name: getattr(config, f.name) for f in fields(config) if f.name not in NOT_IDENTITY},
        "calibration": load_calibration(config.calibration),
        "system": [type(system).__module__, type(system).__qualname__, asdict(system)],
        "known": task.known,
        "sources": [source_digest(ROOT), system_digest(task.system)],
    }


def _read(path: Path) -> tuple[Answer, ...] | None:
    """The kept answer; None where there is none or it is not whole."""
    try:
        return tuple(Answer(one["row"], tuple(one["best"])) for one in disk_cache.read(path))
    except (KeyError, TypeError):
        return None
