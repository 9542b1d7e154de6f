"""Answers of a study, kept by content as they come, so that one that was interrupted goes on where it stopped.

Decides what an answer hangs on: the configuration of its task with the contents of
its calibration, every option of its system, the candidates it was given, and the
sources. Rows that failed are not kept. The plan cache beside it keeps plans that are
built and simulated again; here is what came of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from baselines.registry import get_system
from bench.identity import NOT_IDENTITY, ROOT, canonical, plain, source_digest, system_digest
from bench.points import Answer, Task, answer
from disagmoe.cost.calibration import load_calibration

FOLDER = ROOT / ".cache" / "answers"


def kept(task: Task, folder: Path = FOLDER, ask: Callable[[Task], tuple[Answer, ...]] = answer) -> tuple[Answer, ...]:
    """`ask(task)`, or what it said before; without the long list of ranked candidates."""
    path = folder / f"{_key(task)}.json"
    found = _read(path)
    if found is None:
        found = tuple(replace(one, row=plain(one.row), ranked=()) for one in ask(task))
        if all(one.row["status"] != "failed" for one in found):
            _write(path, found)
    return found


def _key(task: Task) -> str:
    config = task.config
    system: Any = get_system(task.system, **config.system_options.get(task.system, {}))
    question = {
        "configuration": {f.name: getattr(config, f.name) for f in fields(config) if f.name not in NOT_IDENTITY},
        "calibration": load_calibration(config.calibration),
        "system": [type(system).__module__, type(system).__qualname__, asdict(system)],
        "known": task.known,
        "sources": [source_digest(ROOT), system_digest(task.system)],
    }
    return hashlib.sha256(canonical(question).encode()).hexdigest()[:24]


def _read(path: Path) -> tuple[Answer, ...] | None:
    """The kept answer; None where there is none or it is not whole."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return tuple(Answer(one["row"], tuple(one["best"])) for one in rows)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, found: tuple[Answer, ...]) -> None:
    """Keep an answer; a folder that cannot be written is no reason to fail a study."""
    text = json.dumps([{"row": one.row, "best": plain(one.best)} for one in found], allow_nan=False)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
