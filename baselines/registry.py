"""Which systems exist: the ones shipped here and those of installed packages.

A package adds its own through the entry point group `disagmoe.systems`:

    [project.entry-points."disagmoe.systems"]
    my_system = "my_package.planner:MySystem"

The class is a frozen dataclass that satisfies `disagmoe.system.System`; its
fields are the options a user may set as `system.my_system.<field>=<value>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.metadata import entry_points
from math import isfinite

from baselines.comet import Comet
from baselines.dualpipe import DualPipe, DualPipeV
from baselines.megatron import Megatron1F1B
from baselines.megatron_overlap import Megatron1F1BOverlap
from baselines.tutel import Tutel
from disagmoe.system import System
from disagmoe.systems import DisagMoE, DisagMoEPlus

ENTRY_POINT_GROUP = "disagmoe.systems"
REFERENCE = "megatron_1f1b"
"""The system every speed-up is relative to."""

SHIPPED: Mapping[str, Callable[..., System]] = {
    "megatron_1f1b": Megatron1F1B,
    "megatron_1f1b_overlap": Megatron1F1BOverlap,
    "tutel": Tutel,
    "comet": Comet,
    "dualpipe": DualPipe,
    "dualpipe_v": DualPipeV,
    "disagmoe": DisagMoE,
    "disagmoe_plus": DisagMoEPlus,
}

FIXED_FIELDS = frozenset({"name", "native_transport"})
"""Dataclass fields that describe a system and are not options of it."""


def external_systems() -> dict[str, str]:
    """Name and "module:attribute" of every system installed as an entry point."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def system_names() -> tuple[str, ...]:
    """Every known system: shipped ones first, then outside ones by name."""
    return (*SHIPPED, *sorted(set(external_systems()) - set(SHIPPED)))


def system_class(name: str) -> Callable[..., System]:
    """The class of a system. Raises ValueError with the known names."""
    if name in SHIPPED:
        return SHIPPED[name]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            loaded: Callable[..., System] = point.load()
            return loaded
    raise ValueError(f"unknown system {name!r}: known are {', '.join(system_names())}")


def system_options(name: str) -> tuple[str, ...]:
    """Names of the options a system accepts."""
    cls = system_class(name)
    return tuple(f.name for f in fields(cls) if f.name not in FIXED_FIELDS)  # type: ignore[arg-type]


def get_system(name: str, **options: object) -> System:
    """Make a system with the user's options. Raises ValueError for an unknown name, option or kind of value."""
    cls = system_class(name)
    allowed = system_options(name)
    kinds = {f.name: _kinds(f.type) for f in fields(cls)}  # type: ignore[arg-type]
    for key, value in options.items():
        if key not in allowed:
            raise ValueError(f"unknown option {key!r} of system {name}: allowed are {', '.join(allowed) or 'none'}")
        if set(kinds[key]) <= set(_KINDS) and not any(_KINDS[kind][1](value) for kind in kinds[key]):
            words = " or ".join(_KINDS[kind][0] for kind in kinds[key])
            raise ValueError(f"{name} {key}={value!r}: allowed is {words}")
    return cls(**options)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


_KINDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "int": ("a positive integer", lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0),
    "float": ("a number", _is_number),
    "str": ("a word", lambda v: isinstance(v, str)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "None": ("null", lambda v: v is None),
}
"""What a user may give for a field of this type, in words and as a check; other types are left to the system."""


def _kinds(annotation: object) -> tuple[str, ...]:
    """The parts of a field's type ("int | None" -> int, None), which is text or a type."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return tuple(part.strip() for part in text.split("|"))
