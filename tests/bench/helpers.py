"""A resolved configuration and an evaluation without planning or simulating."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.config import RunConfig, resolve
from tests.bench.report.sample import ok_row

CONF = Path(__file__).resolve().parents[2] / "conf"
CHOICES = {"model": "tiny", "cluster": "laptop", "calibration": None}


def group(name: str, option: str) -> Any:
    """The content of one option of a configuration group."""
    return yaml.safe_load((CONF / name / f"{option}.yaml").read_text(encoding="utf-8"))


def values(**changes: Any) -> dict[str, Any]:
    """What Hydra hands over for the tiny model on the laptop, with `changes`."""
    plain = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    del plain["defaults"], plain["hydra"]
    plain |= {"model": group("model", "tiny"), "cluster": group("cluster", "laptop"), "seq": 512, "batch": 32, "ep": 2}
    unknown = set(changes) - set(plain) - {"calibration"}
    assert not unknown, unknown
    return {**copy.deepcopy(plain), **changes}


def config(results_dir: Path = Path("results"), **changes: Any) -> RunConfig:
    """A resolved run of the tiny model."""
    return resolve(values(results_dir=str(results_dir), **changes), CHOICES)


@dataclass
class FakeOutcome:
    layout: None = None
    timeline: None = None
    tuned: None = None
    memory: None = None


@dataclass
class FakeEvaluation:
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    views: dict[str, Any] = field(default_factory=dict)
    layers: int | None = None
    execution: dict[str, Any] = field(default_factory=dict)

    @property
    def outcomes(self) -> list[FakeOutcome]:
        return [FakeOutcome() for _ in self.rows]


def evaluation(config: RunConfig, *, failed: bool = False) -> FakeEvaluation:
    """A row per view and system that took ten seconds; with `failed`, the last row failed."""
    rows = [ok_row(name, view, (6.0, 1.0, 3.0, 1.0)) for view in config.views for name in config.systems]
    if failed:
        numbers = {key: None for key, value in rows[-1].items() if isinstance(value, int | float)}
        rows[-1] |= {**numbers, "status": "failed", "reason": "out of luck", "exposed_by_kind_s": None, "pools": None}
        rows[-1] |= {"plan": None, "maximum": None}
    return FakeEvaluation(rows)
