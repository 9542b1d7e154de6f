"""What a study asks: one kind of question, put to some models with a list of settings per axis.

A study is a run that evaluates many points around one configuration and writes
one directory. This module decides which kinds there are and which axes and
settings each takes; `sensitivity.py` answers the first, `ablation.py` the last and
`claims.py` all others, which share their axes: a kind of one group of axes is that
part of `claims` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baselines.colocated import REPLAYS
from disagmoe.cost.calibration import MERGES, TRANSPORTS
from disagmoe.plan.af_ring import HEADS
from disagmoe.specs import ModelSpec, load_model
from disagmoe.specs import fields as read
from disagmoe.systems.disagmoe import STREAMS
from disagmoe.systems.disagmoe_plus import SWITCHES
from disagmoe.systems.pools import NIC_RULES

Setting = float | int | str

SENSITIVITY, CLAIMS = "sensitivity", "claims"
RATIO_SWEEP, VIRTUAL_STAGES, TOPK_EP, MICROBATCHES = "ratio_sweep", "virtual_stages", "topk_ep", "microbatches"
PLUS_ABLATION = "plus_ablation"
FREE = "free"
"""NICs as the tuner likes, beside the rules."""


@dataclass(frozen=True)
class Study:
    """`models` in the order of the report, the one chosen on the command line first; `axes` in their order.

    `plans` is how many of the base's plans a baseline tries at the other points (None:
    a search at each); in the ablation, how many plans a switch that is searched for
    alone times per round (None: as many as any system).
    """

    kind: str
    models: tuple[ModelSpec, ...]
    axes: tuple[tuple[str, tuple[Setting, ...]], ...]
    plans: int | None = None

    def settings(self, axis: str) -> tuple[Setting, ...]:
        """The settings of one axis; none where the study leaves it out."""
        return dict(self.axes).get(axis, ())


def _number(low: float, *, open_end: bool = False) -> Callable[[object], Setting | None]:
    """Numbers of at least `low` (above it where `open_end`)."""

    def check(value: object) -> Setting | None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value < float("inf"):
            return None
        return float(value) if value > low or (value == low and not open_end) else None

    return check


def _count(value: object) -> Setting | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _choice(allowed: tuple[Setting, ...]) -> Callable[[object], Setting | None]:
    return lambda value: next((one for one in allowed if one == value and type(one) is type(value)), None)


def _ratio(value: object) -> Setting | None:
    """ "16:10", GPUs of an A-group and of an F-group."""
    parts = str(value).split(":")
    fine = isinstance(value, str) and len(parts) == 2 and all(part.isdigit() and int(part) > 0 for part in parts)
    return str(value) if fine else None


Reading = tuple[Callable[[object], Setting | None], str]
_COUNTS, _LENGTHS = (_count, "positive integers"), (_count, "sequence lengths")
_FACTORS = (_number(0.0, open_end=True), "factors above 0")
_RATIO: Mapping[str, Reading] = {
    "ratio": (_ratio, "texts like 16:10"),
    "ratio_nics": (_choice((*NIC_RULES, FREE)), f"any of {', '.join((*NIC_RULES, FREE))}"),
    "ratio_seq": _LENGTHS,
}
_TOP_K: Mapping[str, Reading] = {"top_k": _COUNTS, "top_k_seq": _LENGTHS, "ep": _COUNTS}
_DEPTH: Mapping[str, Reading] = {"depth": _COUNTS, "depth_seq": _LENGTHS}

AXES: Mapping[str, Mapping[str, Reading]] = {
    SENSITIVITY: {
        "contention_scale": (_number(0.0), "numbers of at least 0"),
        "nic": _FACTORS,
        "skew": (_number(1.0), "numbers of at least 1"),
        "batch": _FACTORS,
        "replay": (_choice(tuple(REPLAYS)), f"any of {', '.join(REPLAYS)}"),
        "merge": (_choice(MERGES), f"any of {', '.join(MERGES)}"),
        "head": (_choice(HEADS), f"any of {', '.join(HEADS)}"),
        "nics": (_choice(NIC_RULES), f"any of {', '.join(NIC_RULES)}"),
        "compute_streams": (_choice(STREAMS), f"any of {', '.join(map(str, STREAMS))}"),
    },
    CLAIMS: {**_RATIO, **_TOP_K, **_DEPTH},
    RATIO_SWEEP: _RATIO,
    VIRTUAL_STAGES: _DEPTH,
    TOPK_EP: _TOP_K,
    MICROBATCHES: {"batch": _FACTORS, "batch_seq": _LENGTHS},
    PLUS_ABLATION: {
        "switch": (_choice(SWITCHES), f"any of {', '.join(SWITCHES)}"),
        "switch_seq": _LENGTHS,
        "exchange": (_choice(("native", *TRANSPORTS)), f"any of native, {', '.join(TRANSPORTS)}"),
        "totals": (_choice(TRANSPORTS), f"any of {', '.join(TRANSPORTS)}"),
        "batch": _FACTORS,
        "batch_seq": _LENGTHS,
        "replay": (_choice(tuple(REPLAYS)), f"any of {', '.join(REPLAYS)}"),
        "calibrations": (_choice(tuple(read.shipped("calibration"))), "any shipped calibration"),
    },
}
"""The axes of every kind: how a setting is read, and what is allowed."""


def study_from_mapping(value: object, model: ModelSpec) -> Study:
    """A Study from the mapping of an experiment: kind, axes, plans, and `also`, models beside the chosen one."""
    mapping = read.as_mapping(value, "study")
    read.check_keys(mapping, ("kind", "also", "axes", "plans"), ("kind", "axes"), "study")
    kind = mapping["kind"]
    if not isinstance(kind, str) or kind not in AXES:
        raise ValueError(f"study.kind={kind}: allowed: {', '.join(AXES)}")
    also = [read.as_str(name, "study.also entry") for name in read.as_list(mapping.get("also", []), "study.also")]
    others = [load_model(name) for name in dict.fromkeys(also) if name != model.name]
    axes = read.as_mapping(mapping["axes"], "study.axes")
    unknown = [axis for axis in axes if axis not in AXES[kind]]
    if unknown:
        raise ValueError(f"study.axes.{unknown[0]}: axes of {kind}: {', '.join(AXES[kind])}")
    plans = mapping.get("plans")
    if plans is not None and _count(plans) is None:
        raise ValueError(f"study.plans={plans}: allowed: a positive integer, or null for a search at every point")
    chosen = tuple((axis, _settings(kind, axis, axes[axis])) for axis in AXES[kind] if axes.get(axis) is not None)
    return Study(kind, (model, *others), chosen, None if plans is None else int(str(plans)))


def _settings(kind: str, axis: str, value: object) -> tuple[Setting, ...]:
    check, allowed = AXES[kind][axis]
    given = read.as_list(value, f"study.axes.{axis}")
    settings = tuple(check(item) for item in given)
    fine = tuple(setting for setting in settings if setting is not None)
    if not fine or len(fine) < len(settings) or len(set(fine)) < len(fine):
        raise ValueError(f"study.axes.{axis}={list(given)}: allowed: a list of different {allowed}, or null")
    return fine
