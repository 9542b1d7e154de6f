"""Answers on disk, kept by the content of their question: plans, depths and answers of studies.

Decides what a cache may do to a run: nothing. What cannot be read is asked again, what
cannot be written is not kept, and a file is there whole or not at all, whoever else
writes it at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from bench.identity import ROOT, canonical

CACHE = ROOT / ".cache"


def path_of(folder: Path, question: object) -> Path:
    """The file that holds the answer to a question."""
    return folder / f"{hashlib.sha256(canonical(question).encode()).hexdigest()[:24]}.json"


def read(path: Path) -> Any:
    """What is kept in a file; None where there is none or it is not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write(path: Path, answer: object) -> None:
    """Keep an answer, as JSON."""
    text = json.dumps(answer, allow_nan=False)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
