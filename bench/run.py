"""One run, from its resolved configuration to its directory in results/.

Decides when a run is already there: its record is whole, no row failed, and it
holds what is asked for now (tables, or figures and traces too).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from bench.config import RunConfig
from bench.identity import Identity, directory_name, identify, plain
from bench.progress import Bar
from bench.publish import locked, publish, remove_stale
from bench.results import RESULTS_FILE, Results, assemble, failed_rows, load, text_of

CONFIG_FILE = Path(".hydra") / "config.yaml"
OVERRIDES_FILE = Path(".hydra") / "overrides.yaml"


@dataclass(frozen=True)
class Outcome:
    """Where a run lies, whether it was there before, and what failed in it (one line per row)."""

    directory: Path
    skipped: bool
    failures: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """How a run was asked for: the command, its overrides, and how much it may print."""

    command: Sequence[str] = ("python", "-m", "bench")
    overrides: Sequence[str] = ()
    tables: bool = True
    bar: bool = True


def execute(config: RunConfig, call: Call | None = None) -> Outcome:
    """Run a configuration unless it is already there, publish it and print its tables.

    Raises ValueError for what the user asked wrongly; nothing is left in
    results/ by a run that raises.
    """
    call = call or Call()
    return once(config, call, Work(finished, _make, failed_rows, _print_tables))


@dataclass(frozen=True)
class Work:
    """How one kind of run is found, made, judged and shown. A record is what its JSON file holds."""

    find: Callable[[Path, RunConfig], Results | None]
    make: Callable[[RunConfig, Identity, Call, Path], Results]
    failures: Callable[[Results], list[str]]
    show: Callable[[Results], None]


def once(config: RunConfig, call: Call, work: Work) -> Outcome:
    """Do the work of a configuration unless its directory is already there; an equal run at the same time waits."""
    identity = identify(config)
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    target = config.results_dir / directory_name(config, identity.run_id)
    made = _make_directory(config.results_dir)
    try:
        with locked(config.results_dir, identity.run_id, on_wait=lambda: _say(f"waiting for an equal run: {target}")):
            remove_stale(config.results_dir, identity.run_id)
            record = None if config.force else work.find(target, config)
            skipped = record is not None
            if record is None:
                record = work.make(config, identity, call, target)
    except BaseException:
        if made and not any(config.results_dir.iterdir()):
            config.results_dir.rmdir()
        raise
    if call.tables:
        work.show(record)
    _say(f"already there: {target} (force=true runs it again)" if skipped else f"results: {target}")
    return Outcome(target, skipped, tuple(work.failures(record)))


def _say(line: str) -> None:
    print(line, flush=True)


def _make_directory(path: Path) -> bool:
    """Make the results directory; True where it was not there."""
    if path.is_dir():
        return False
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"results_dir={path}: cannot be made: {error.strerror}") from None
    return True


def finished(directory: Path, config: RunConfig) -> Results | None:
    """The record of a run that needs no repeating, else None."""
    try:
        results = load(directory)
        stored = yaml.safe_load((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(stored, dict) or failed_rows(results):
        return None
    pictures = stored.get("artifacts") == "all" and stored.get("selection") == plain(config.selection)
    return results if pictures or config.artifacts == "tables" else None


def _make(config: RunConfig, identity: Identity, call: Call, target: Path) -> Results:
    """Evaluate and write everything into a directory that appears at once. Returns the record."""
    from bench import memory_table, report, tuning  # what is slow to load comes here, off the way to an error message
    from bench.evaluate import evaluate

    _say(_announcement(config))
    with Bar(len(config.systems) * len(config.views) + 1, enabled=call.bar) as bar:
        evaluation = evaluate(config, bar)
        results = assemble(config, identity, call.command, evaluation)
        # A cut is no step of the paper's.
        results["paper"] = [] if config.backend == "emulate" else plain(report.compare(results))
        text = text_of(results)

        def build(directory: Path) -> None:
            (directory / RESULTS_FILE).write_text(text, encoding="utf-8")
            write_settings(directory, config, call)
            tuning.write_tuning(directory / tuning.FILE, evaluation)
            memory_table.write_memory_table(directory / memory_table.FILE, evaluation)
            shown = config.artifacts, lambda name: bar(f"report, {name}"), config.selection
            report.write(directory, results, evaluation, *shown)

        publish(target, identity.run_id, build)
    return results


def _announcement(config: RunConfig) -> str:
    workload = config.workload
    return (
        f"{config.model.title}: seq {workload.seq:,}, {workload.global_batch:,} sequences per step "
        f"on {config.cluster.name}, backend {config.backend}, {', '.join(config.systems)}; "
        f"transports: {' and '.join(config.views)}"
    )


def settings(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain values."""
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "warnings"}
    return {key: plain(value) for key, value in values.items()}


def write_settings(directory: Path, config: RunConfig, call: Call) -> None:
    """.hydra/: what the run was resolved to, and what was typed."""
    (directory / CONFIG_FILE).parent.mkdir()
    _write_yaml(directory / CONFIG_FILE, settings(config))
    _write_yaml(directory / OVERRIDES_FILE, list(call.overrides))


def _write_yaml(path: Path, value: Any) -> None:
    path.write_text(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _print_tables(results: Results) -> None:
    from bench import report

    report.print_tables(results)
