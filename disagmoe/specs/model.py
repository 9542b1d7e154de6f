"""Which ModelSpec a name, a file or a mapping means.

A model comes from a shipped YAML file (conf/model/), a user's YAML file of the
same form, or a Hugging Face config.json. Unknown keys are errors: a misspelt key
must not leave a default in force.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from disagmoe.specs import fields as read
from disagmoe.specs.architecture import LatentAttention, ModelSpec
from disagmoe.specs.hf import from_hf_config

__all__ = ["LatentAttention", "ModelSpec", "load_model", "model_from_mapping", "model_names"]

HF_OPTION = "hf"
"""conf/model/hf.yaml holds no model but a `path` to one (`model=hf model.path=...`)."""


def model_names() -> tuple[str, ...]:
    """Names of the shipped models, sorted."""
    return tuple(name for name in read.shipped("model") if name != HF_OPTION)


def load_model(name_or_path: str) -> ModelSpec:
    """The model of a shipped name, a YAML file, a config.json or a directory that holds one."""
    files = read.shipped("model")
    files.pop(HF_OPTION, None)
    path = read.find(name_or_path, files, "model")
    data = read.read_file(path, "model")
    name = _name_of(path)
    if path.suffix == ".json" or "model_type" in data:
        return from_hf_config(data, name)
    return model_from_mapping({"name": name, **data})


def model_from_mapping(mapping: Mapping[str, object]) -> ModelSpec:
    """A ModelSpec from a plain mapping of its own field names.

    `windowed_layers` may also be "even", "odd" or "all", `mla` is a nested
    mapping, `title` defaults to the name. A mapping with the single key `path`
    loads that file.
    """
    if "path" in mapping:
        return _from_path(mapping)
    what = f"model {mapping.get('name', '(unnamed)')}"
    known = {field.name: field for field in fields(ModelSpec)}
    required = [key for key, field in known.items() if field.default is MISSING and key != "title"]
    read.check_keys(mapping, known, required, what)
    layers = read.as_int(mapping["layers"], f"{what}: layers")
    values: dict[str, object] = {"title": mapping["name"]}
    for key, value in mapping.items():
        if key == "mla":
            values[key] = None if value is None else _latent_attention(value, what)
        elif key == "windowed_layers":
            values[key] = _layer_set(value, layers, f"{what}: {key}")
        else:
            values[key] = _value(str(known[key].type), value, f"{what}: {key}")
    return ModelSpec(**values)  # type: ignore[arg-type]  # each value was checked against its field's type


def _from_path(mapping: Mapping[str, object]) -> ModelSpec:
    read.check_keys(mapping, ("path", "name"), ("path",), "model")
    path = mapping["path"]
    if not isinstance(path, str) or path in ("", "???"):
        raise ValueError(f"model.path must name a config.json or a YAML file, got {path!r}")
    return load_model(path)


def _value(kind: str, value: object, what: str) -> object:
    """Check `value` against the annotation `kind` of its field."""
    if value is None and kind.endswith("| None"):
        return None
    match kind.removesuffix("| None").strip():
        case "int":
            return read.as_int(value, what)
        case "float":
            return read.as_float(value, what)
        case "bool":
            return read.as_bool(value, what)
        case "str":
            return read.as_str(value, what)
        case "tuple[int, ...]":
            return tuple(read.as_int(item, what) for item in read.as_list(value, what))
        case "tuple[str, ...]":
            return tuple(read.as_str(item, what) for item in read.as_list(value, what))
    raise AssertionError(f"no reader for a field of type {kind}")


def _layer_set(value: object, layers: int, what: str) -> tuple[int, ...]:
    """Layer indices from "even", "odd", "all" (0-based) or a list."""
    named = {"even": range(0, layers, 2), "odd": range(1, layers, 2), "all": range(layers)}
    if isinstance(value, str):
        if value not in named:
            raise ValueError(f"{what} must be even, odd, all or a list of layers, got {value!r}")
        return tuple(named[value])
    return tuple(read.as_int(item, what) for item in read.as_list(value, what))


def _latent_attention(value: object, what: str) -> LatentAttention:
    mapping = read.as_mapping(value, f"{what}: mla")
    keys = [field.name for field in fields(LatentAttention)]
    read.check_keys(mapping, keys, keys, f"{what}: mla")
    sizes = {key: read.as_int(mapping[key], f"{what}: mla.{key}") for key in keys if mapping[key] is not None}
    rank = sizes.pop("q_lora_rank", None)
    if len(sizes) < len(keys) - 1:
        raise ValueError(f"{what}: in mla only q_lora_rank may be null")
    return LatentAttention(q_lora_rank=rank, **sizes)


def _name_of(path: Path) -> str:
    """A name for the model in `path`: its directory's for a config.json, otherwise its own."""
    stem = path.resolve().parent.name if path.name == "config.json" else path.stem
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", stem).strip("-._=")[:80] or "model"
