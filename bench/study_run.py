"""A study, from its resolved configuration to its directory in results/.

Same rules as for a run: one directory per identity, published whole, skipped where
it is already there and nothing in it failed. The record is `study.json`; the
tables and pictures beside it are made from it alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonschema

from bench import ablation, claims, crossing, sensitivity
from bench.choices import other_device
from bench.config import RunConfig
from bench.deviations import deviations
from bench.identity import Identity, plain
from bench.progress import Bar
from bench.publish import publish
from bench.results import STUDY_FILE, InvalidResults, Results, run_block
from bench.run import Call, Outcome, Work, once, write_settings
from bench.study import PLUS_ABLATION, SENSITIVITY
from bench.verdicts import study_entries

SCHEMA_NAME = "disagmoe.study/1"
SCHEMA_FILE = Path(__file__).resolve().parent / "schema" / "study.schema.json"


def execute(config: RunConfig, call: Call) -> Outcome:
    """Conduct a study unless it is already there, publish it and print its tables."""
    return once(config, call, Work(_find, _make, failures, _print))


def load_study(directory: Path) -> Results:
    """The record of a study directory. Raises ValueError (one line) where there is none or it is broken."""
    path = directory / STUDY_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _validate(record)
    except FileNotFoundError:
        raise ValueError(f"{directory}: no {STUDY_FILE}") from None
    except (OSError, ValueError, InvalidResults) as error:
        raise ValueError(f"{directory}: {STUDY_FILE} cannot be read: {error}") from None
    assert isinstance(record, dict)
    return record


def failures(record: Results) -> list[str]:
    """One line of every point at which a system broke."""
    broken = [point for point in record["points"] if point["status"] == "failed"]
    return [f"{point['model']} {point['axis']}={point['setting']}: {point['reason']}" for point in broken]


def _find(directory: Path, config: RunConfig) -> Results | None:
    try:
        record = load_study(directory)
    except ValueError:
        return None
    return None if failures(record) else record


def _make(config: RunConfig, identity: Identity, call: Call, target: Path) -> Results:
    from bench.report import study as report  # matplotlib is slow to load

    assert config.study is not None
    names = ", ".join(model.name for model in config.study.models)
    print(f"{config.study.kind} of {names}: seq {config.workload.seq:,} on {config.cluster.name}", flush=True)
    with Bar(_parts(config), enabled=call.bar) as bar:
        found = plain(_conduct(config, bar))
        record = {**_header(config, identity, call), **found}
        record["notes"] += found.get("remarks", [])
        record.pop("remarks", None)
        record["paper"] = [asdict(entry) for entry in study_entries(record)]
        text = json.dumps(record, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        _validate(record)

        def build(directory: Path) -> None:
            (directory / STUDY_FILE).write_text(text, encoding="utf-8")
            write_settings(directory, config, call)
            report.write(directory, record)

        publish(target, identity.run_id, build)
    return record


def _parts(config: RunConfig) -> int:
    """How many parts the progress bar counts; looking for crossings is one."""
    if config.study is not None and config.study.kind == PLUS_ABLATION:
        return ablation.parts(config)
    if config.study is None or config.study.kind != SENSITIVITY:
        return len(claims.points(config))
    return 1 + sum(len(sensitivity.tasks_at(config, place)) for place in sensitivity.places(config))


def _conduct(config: RunConfig, progress: sensitivity.Progress) -> dict[str, Any]:
    assert config.study is not None
    if config.study.kind == PLUS_ABLATION:
        return ablation.conduct(config, progress)
    if config.study.kind != SENSITIVITY:
        return claims.conduct(config, progress)
    standings = sensitivity.measure(config, progress)
    found = crossing.crossings(config, standings, lambda name: progress(f"crossings, {name}"))
    points = [sensitivity.point(*pair) for pair in standings.items()]
    return {"points": points, "crossings": found, "remarks": sensitivity.remarks(standings)}


def _header(config: RunConfig, identity: Identity, call: Call) -> dict[str, Any]:
    assert config.study is not None
    values = {
        "schema": SCHEMA_NAME,
        "run": run_block(identity, call.command, config.tag),
        "kind": config.study.kind,
        "models": [
            {"name": m.name, "title": m.title, "layers": m.layers, "of": sensitivity.full_layers(config, m)}
            for m in config.study.models
        ],
        "axes": [{"axis": axis, "settings": settings} for axis, settings in config.study.axes],
        "plans": config.study.plans,
        "bases": sensitivity.base_settings(config),
        "cluster": config.cluster,
        "workload": config.workload,
        "backend": config.backend,
        "calibration": Path(config.calibration).stem,
        "view": config.views[0],
        "systems": config.systems,
        "settings": deviations(config),
        "notes": [line for line in [other_device(config.calibration, config.cluster)] if line]
        + [f"{model.name}: {text}" for model in config.study.models for text in model.assumptions],
        "crossings": [],
    }
    return {key: plain(value) for key, value in values.items()}


def _validate(record: Results) -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(record))
    if error is not None:
        raise InvalidResults(f"{STUDY_FILE} at {error.json_path}: {error.message}")


def _print(record: Results) -> None:
    from bench.report import study as report

    report.print_study(record)
