"""The record of a run: what goes into results.json, and when such a file counts as done.

Everything but the `run` block is a function of the configuration and the sources,
so two runs of one configuration write equal bytes there.
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import jsonschema

from bench.config import RunConfig
from bench.deviations import deviations
from bench.identity import ROOT, Identity, plain
from disagmoe.specs import parameters

SCHEMA_NAME = "disagmoe.results/1"
SCHEMA_FILE = Path(__file__).resolve().parent / "schema" / "results.schema.json"
RESULTS_FILE = "results.json"
STUDY_FILE = "study.json"
"""The record of a directory that holds a study instead of one comparison."""
VERSIONED = ("disagmoe-suite", "numpy", "numba", "pulp", "hydra-core")

Results = dict[str, Any]


class InvalidResults(RuntimeError):
    """What was computed breaks the schema: a fault of the suite, never of the user."""


class Evaluated(Protocol):
    """What an evaluation contributes: rows in table order, notes for every table, who uses which transport, on what."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def views(self) -> Mapping[str, Any]: ...

    @property
    def layers(self) -> int | None: ...

    @property
    def execution(self) -> Mapping[str, Any]: ...


def assemble(config: RunConfig, identity: Identity, command: Sequence[str], evaluation: Evaluated) -> Results:
    """The record of a run, but for the comparison with the paper (which reads the record)."""
    count = parameters(config.model)
    record = {
        "schema": SCHEMA_NAME,
        "run": run_block(identity, command, config.tag),
        "model": {**plain(config.model), "parameters_total": count.total, "parameters_active": count.active_all},
        "cluster": config.cluster,
        "workload": config.workload,
        "backend": config.backend,
        "calibration": Path(config.calibration).stem,
        "depth": {"used": evaluation.layers or config.model.layers, "of": config.full_layers},
        "execution": evaluation.execution or None,
        "settings": deviations(config),
        "notes": evaluation.notes,
        "views": evaluation.views,
        "rows": evaluation.rows,
    }
    return {key: plain(value) for key, value in record.items()}


def run_block(identity: Identity, command: Sequence[str], tag: str) -> dict[str, Any]:
    """Where, when and with what a run was made."""
    return {
        "id": identity.run_id,
        "config_id": identity.config_id,
        "command": shlex.join(command),
        "tag": tag,
        "git": git_state(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in VERSIONED}},
        "host": {"name": platform.node(), "system": platform.platform(terse=True)},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout and whether tracked files differ from it; None outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()


def text_of(results: Results) -> str:
    """results.json: strict JSON in one canonical form. Raises InvalidResults."""
    try:
        text = json.dumps(results, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    except ValueError as error:
        raise InvalidResults(f"results hold a number that JSON has no form for: {error}") from error
    validate(results)
    return text


def validate(results: Results) -> None:
    """Check a record against bench/schema/results.schema.json. Raises InvalidResults naming the place."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(results))
    if error is not None:
        raise InvalidResults(f"results.json at {error.json_path}: {error.message}")


def load(directory: Path) -> Results:
    """The record in a run directory. Raises ValueError (one line) where there is none or it is broken."""
    path = directory / RESULTS_FILE
    try:
        results = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        raise ValueError(f"{directory}: no {RESULTS_FILE}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory}: {RESULTS_FILE} cannot be read: {error}") from None
    try:
        validate(results)
    except InvalidResults as error:
        raise ValueError(f"{directory}: {error}") from None
    return results  # type: ignore[no-any-return]  # validated just above


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def failed_rows(results: Results) -> list[str]:
    """One line "<view> <system>: <reason>" of every row that failed."""
    return [f"{row['view']} {row['system']}: {row['reason']}" for row in results["rows"] if row["status"] == "failed"]
