"""What a run was told that its record does not name otherwise: every setting that moves numbers and is not its default.

Runs are compared only where these agree: a run with routing skew or with a head
placement of its own never stands in a table beside the plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from bench.config import RunConfig
from bench.identity import plain
from disagmoe.allocator.tuner import DEFAULT_BUDGET
from disagmoe.specs import cluster_names, load_cluster, load_model, model_names

DEFAULTS = {
    "merge": None,
    "ep": 16,
    "uniform_transport": "deepep",
    "contention_scale": 1.0,
    "plans_from": None,
    "budget": DEFAULT_BUDGET,
    "processes": None,
    "repeats": 3,
}
"""Fields of RunConfig with the defaults of conf/config.yaml."""
WORKLOAD_DEFAULTS = {"micro_batch": None, "skew": 1.0, "stragglers": (), "optimizer": "megatron"}
"""Fields of Workload likewise, but for the length and the batch, which a record names."""


def deviations(config: RunConfig) -> dict[str, Any]:
    """Name and plain value of every such setting, in a fixed order."""
    found = {
        **{key: getattr(config.workload, key) for key, default in WORKLOAD_DEFAULTS.items()},
        **{key: getattr(config, key) for key in DEFAULTS},
    }
    defaults = {**WORKLOAD_DEFAULTS, **DEFAULTS}
    changed = {key: plain(value) for key, value in found.items() if value != defaults[key]}
    if "ep" in changed and config.ep is None:
        changed["ep"] = "auto"
    if config.views == ("native",):
        changed.pop("uniform_transport", None)  # nothing uses it
    for name, options in config.system_options.items():
        changed.update({f"system.{name}.{key}": plain(value) for key, value in options.items()})
    return {**changed, **dict(_changed_model(config)), **dict(_changed_cluster(config))}


def _changed_model(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Fields that differ from the shipped model of the same name; its depth is named elsewhere."""
    if config.model.name not in model_names() or config.study is not None:
        return
    shipped = load_model(config.model.name)
    if config.model.layers < shipped.layers:
        shipped = shipped.with_layers(config.model.layers)
    for field in fields(config.model):
        ours = getattr(config.model, field.name)
        if ours != getattr(shipped, field.name) and field.name not in ("layers", "assumptions"):
            yield f"model.{field.name}", plain(ours)


def _changed_cluster(config: RunConfig) -> Iterator[tuple[str, Any]]:
    if config.cluster.name not in cluster_names():
        return
    shipped = load_cluster(config.cluster.name)
    for field in fields(config.cluster):
        ours = getattr(config.cluster, field.name)
        if ours != getattr(shipped, field.name) and field.name != "calibration":
            yield f"cluster.{field.name}", plain(ours)
