"""What makes two runs the same: everything that can change a number, and nothing else.

The id covers the resolved configuration, the contents of the data files it was
read from, and the sources of the suite and of every system from outside; for
emulated and measured runs also the machine. The config_id leaves the sources out,
so runs of one configuration can be followed across versions. How a run is shown or
stored counts for neither.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from baselines.native.peers import PEERS
from baselines.registry import get_system, system_class
from bench.config import RunConfig
from bench.machine import machine

ROOT = Path(__file__).resolve().parents[1]
"""Root of the source checkout: holds conf/ and the packages."""

PACKAGES = ("disagmoe", "baselines", "bench")
SOURCE_SUFFIXES = frozenset({".py", ".json"})
NOT_IDENTITY = frozenset({"artifacts", "selection", "force", "debug", "results_dir", "warnings"})
"""Fields of RunConfig that change no number."""

ID_LENGTH = 12
_UNSAFE = re.compile(r"[^A-Za-z0-9._=-]+")


@dataclass(frozen=True)
class Identity:
    """`run_id` names the directory, `config_id` the configuration whatever the sources."""

    run_id: str
    config_id: str


def plain(value: Any) -> Any:
    """`value` as what JSON knows: mappings with string keys, lists, texts, numbers, true, false, null.

    Raises TypeError for anything that has no such form.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Path):
        return value.as_posix()
    raise TypeError(f"a {type(value).__name__} has no plain form")


def canonical(value: Any) -> str:
    """The one JSON text of a value. Raises ValueError at NaN and infinity."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def identify(config: RunConfig) -> Identity:
    """The two ids of a run."""
    resolved = {
        "calibration": Path(config.calibration).stem,
        "systems": {name: _settings(config, name) for name in config.systems},
        "system_options": None,  # the settings above hold them
        "files": sorted(_digest([path.read_bytes()]) for path in config.files),
    }
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    configuration = {key: value for key, value in {**values, **resolved}.items() if key not in NOT_IDENTITY}
    if config.backend != "simulate":
        configuration["machine"] = machine(gpus=config.backend == "measure")
    if config.impl != "equivalent":
        configuration["peers"] = {peer.name: peer.installed for peer in PEERS}
    sources = [source_digest(ROOT), *(system_digest(name) for name in config.systems)]
    return Identity(
        run_id=_digest([canonical(configuration).encode(), canonical(sources).encode()])[:ID_LENGTH],
        config_id=_digest([canonical(configuration).encode()])[:ID_LENGTH],
    )


def _settings(config: RunConfig, name: str) -> Any:
    """Every field of a system's dataclass, defaults included."""
    system: Any = get_system(name, **config.system_options.get(name, {}))
    return asdict(system)


def _digest(parts: Iterable[bytes]) -> str:
    """SHA-256 of a sequence of byte strings, each preceded by its length."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "big"))
        total.update(part)
    return total.hexdigest()


@cache
def source_digest(root: Path) -> str:
    """Digest of the suite's sources under `root`: names and contents, caches left out."""
    parts: list[bytes] = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES and "__pycache__" not in path.parts and path.is_file():
                parts += [path.relative_to(root).as_posix().encode(), path.read_bytes()]
    return _digest(parts)


@cache
def system_digest(name: str) -> str | None:
    """Digest of the file a system from outside the suite is defined in; None for our own."""
    source = inspect.getsourcefile(system_class(name))
    if source is None or any((ROOT / package) in Path(source).resolve().parents for package in PACKAGES):
        return None
    return _digest([Path(source).read_bytes()])


def directory_name(config: RunConfig, run_id: str) -> str:
    """`<model>_<seq>_<backend>_<id>`: one flat name of [A-Za-z0-9._=-], under 200 characters.

    A study, which may be of several models, has its kind in their place.
    """
    what = config.model.name if config.study is None else config.study.kind
    return f"{_UNSAFE.sub('-', what)[:80]}_{config.workload.seq}_{config.backend}_{run_id}"
