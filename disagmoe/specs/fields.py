"""Strict reading of plain mappings (from YAML, JSON or Hydra) into specs.

Decides what a well-formed entry is: no unknown key, no missing key, no value of
the wrong kind. Every refusal is one line that names the value, the rule and what
is allowed, because the command line prints it as it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import yaml

CONF = Path(__file__).resolve().parents[2] / "conf"
"""Root of the shipped configuration files."""

OWN_CONF = CONF.with_name("conf.local")
"""Root of what a user adds for one machine, as `make calibrate` does."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,79}")
"""Names end up in directory names, so they are kept to these characters."""


def check_keys(mapping: Mapping[str, object], allowed: Iterable[str], required: Iterable[str], what: str) -> None:
    """Raise ValueError at unknown or missing keys of `mapping`; `what` names the entry."""
    known = sorted(allowed)
    unknown = sorted(str(key) for key in mapping if key not in known)
    if unknown:
        raise ValueError(f"{what}: unknown key {', '.join(unknown)}; known keys: {', '.join(known)}")
    missing = sorted(set(required) - {str(key) for key in mapping})
    if missing:
        raise ValueError(f"{what}: missing key {', '.join(missing)}")


def as_int(value: object, what: str) -> int:
    """An integer as such: neither a bool nor a string nor a fraction."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{what} must be an integer, got {value!r}")


def as_float(value: object, what: str) -> float:
    """A finite number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf:
        return float(value)
    raise ValueError(f"{what} must be a finite number, got {value!r}")


def as_bool(value: object, what: str) -> bool:
    """true or false, not a number or a word standing for one."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"{what} must be true or false, got {value!r}")


def as_str(value: object, what: str) -> str:
    """A non-empty string."""
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"{what} must be a non-empty string, got {value!r}")


def as_list(value: object, what: str) -> list[object]:
    """A list (or tuple), returned as a list."""
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError(f"{what} must be a list, got {value!r}")


def as_mapping(value: object, what: str) -> Mapping[str, object]:
    """A mapping with string keys."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return cast(Mapping[str, object], value)
    raise ValueError(f"{what} must be a mapping of named values, got {value!r}")


def require_positive(what: str, **values: float) -> None:
    """Raise ValueError unless every value is finite and above zero."""
    for key, value in values.items():
        if isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{what}: {key} must be positive, got {value!r}")


def check_name(name: str, what: str) -> None:
    """Raise ValueError unless `name` may serve as part of a directory name."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{what}: name {name!r} may hold only letters, digits and . _ = - (at most 80)")


def read_file(path: Path, what: str) -> Mapping[str, object]:
    """Read a .json, .yaml or .yml file that holds one mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{what}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{what}: {path} does not parse: {reason}") from None
    return as_mapping(data, f"{what}: content of {path}")


def shipped(group: str) -> dict[str, Path]:
    """Name -> file of the configurations shipped in conf/<group>/, sorted by name."""
    return {path.stem: path for path in sorted((CONF / group).glob("*.yaml"))}


def own(group: str) -> dict[str, Path]:
    """The same for the user's own configurations, in conf.local/<group>/ (not tracked by git)."""
    return {path.stem: path for path in sorted((OWN_CONF / group).glob("*.yaml"))}


def known(group: str) -> dict[str, Path]:
    """Shipped configurations and the user's own; a shipped name stays what it is."""
    return {**own(group), **shipped(group)}


def find(name_or_path: str, names: Mapping[str, Path], what: str) -> Path:
    """The file that a shipped name or a path means. Raises ValueError listing the names."""
    if name_or_path in names:
        return names[name_or_path]
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir() and (path / "config.json").is_file():
        return path / "config.json"
    if name_or_path and path.is_file():
        return path
    known = ", ".join(names)
    if "/" in name_or_path or path.suffix in {".json", ".yaml", ".yml"}:
        raise ValueError(f"{what}: no such file {name_or_path!r}; known names: {known}")
    raise ValueError(f"unknown {what} {name_or_path!r}; known: {known}, or a path to a file")
