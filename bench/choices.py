"""What the groups model, cluster and calibration of the configuration hold: a shipped option, or a path to a file.

Decides what may be set beside a choice: fields of a model and of a cluster, but no
single number of a calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagmoe.cost.calibration import calibration_from_mapping, load_calibration
from disagmoe.specs import (
    ClusterSpec,
    ModelSpec,
    cluster_from_mapping,
    load_cluster,
    load_model,
    model_from_mapping,
)
from disagmoe.specs import fields as read

MODEL_FROM_FILE = "hf"
"""Option of the group `model` that holds no model but a path to one."""
FROM_FILE = "file"
"""Option of the groups `cluster` and `calibration` that holds a path."""


def chosen_path(group: str, mapping: Mapping[str, Any]) -> Path:
    """The path a group option `file` or `hf` carries."""
    value = mapping.get("path")
    if not isinstance(value, str) or value in ("", "???"):
        raise ValueError(f"{group}.path must name a file: {group}=<path>")
    return Path(value).expanduser()


def read_model(mapping: Mapping[str, Any], choice: str | None) -> tuple[ModelSpec, int, Path | None]:
    """The model, its layers before `model.layers=` cut it, and its file."""
    if choice == MODEL_FROM_FILE:
        path = chosen_path("model", mapping)
        model = load_model(str(path))
        return model, model.layers, path / "config.json" if path.is_dir() else path
    path_of = read.shipped("model")
    given = {"name": choice, **mapping}
    layers = given.get("layers")
    if choice in path_of and isinstance(layers, int):
        full = load_model(choice).layers
        if 0 < layers < full:  # the first layers of the whole model, with those of them that are dense or windowed
            return model_from_mapping({**given, "layers": full}).with_layers(layers), full, path_of[choice]
    model = model_from_mapping(given)
    return model, model.layers, path_of.get(choice or "")


def read_cluster(mapping: Mapping[str, Any], choice: str | None) -> tuple[ClusterSpec, Path | None]:
    if choice == FROM_FILE:
        path = chosen_path("cluster", mapping)
        return load_cluster(str(path)), path
    return cluster_from_mapping({"name": choice, **mapping}), read.shipped("cluster").get(choice or "")


def read_calibration(
    mapping: Mapping[str, Any] | None, choice: str | None, cluster: ClusterSpec
) -> tuple[str, Path | None]:
    """Name (or path) and file of the calibration: the one asked for, otherwise the cluster's."""
    name = choice or cluster.calibration
    if choice == FROM_FILE:
        name = str(chosen_path("calibration", mapping or {}))
    loaded = load_calibration(name)  # raises where there is none of this name
    if mapping and choice != FROM_FILE and calibration_from_mapping(mapping, name) != loaded:
        raise ValueError(
            f"the numbers of calibration {name} carry their sources and are not set one by one: "
            "change a copy of its file and use calibration=<path>"
        )
    return name, read.known("calibration").get(name, Path(name))


def other_device(calibration: str, cluster: ClusterSpec) -> str | None:
    """A line where a calibration was made for another device than the cluster has, else None."""
    measured = load_calibration(calibration).device
    if measured == cluster.device:
        return None
    name = Path(calibration).stem
    return (
        f"calibration {name} is of {measured}, cluster {cluster.name} has {cluster.device}: rates are an extrapolation"
    )
