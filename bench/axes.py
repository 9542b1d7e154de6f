"""The axes of the sensitivity study: what one setting of each changes in a configuration.

Decides which systems each axis touches (the workload and the hardware all of them,
a choice of one kind of system only those that have it), how settings are written,
and on which of them a point between two others can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from baselines.registry import system_options
from bench.comparison import OWN_SYSTEM
from bench.config import RunConfig
from bench.study import Setting
from disagmoe.specs.workload import BATCH_MULTIPLE


@dataclass(frozen=True)
class Axis:
    """One thing that is varied.

    `title` names it in tables and pictures. `apply` gives the configuration at a
    setting. `base` is the coordinate of the unchanged configuration on a numeric
    axis, None on an axis of words. `changes` says of a system whether the axis
    touches it.
    """

    title: str
    apply: Callable[[RunConfig, Setting], RunConfig]
    base: Callable[[RunConfig], float] | None = None
    unit: str = ""
    changes: Callable[[str], bool] = lambda name: True

    @property
    def numeric(self) -> bool:
        """Whether a point between two settings can be asked for."""
        return self.base is not None

    def text(self, setting: Setting) -> str:
        """A setting as people write it."""
        return f"{setting:.4g}{self.unit}" if isinstance(setting, float) else str(setting)


def _contention(config: RunConfig, setting: Setting) -> RunConfig:
    return replace(config, contention_scale=float(setting))


def _nic(config: RunConfig, setting: Setting) -> RunConfig:
    groups = tuple(replace(group, nic_gbit=group.nic_gbit * float(setting)) for group in config.cluster.groups)
    return replace(config, cluster=replace(config.cluster, groups=groups))


def _skew(config: RunConfig, setting: Setting) -> RunConfig:
    return replace(config, workload=replace(config.workload, skew=float(setting)))


def _batch(config: RunConfig, setting: Setting) -> RunConfig:
    return replace(config, workload=replace(config.workload, global_batch=sequences(config, float(setting))))


def sequences(config: RunConfig, factor: float) -> int:
    """Sequences per step at a factor of the base batch, in whole multiples of 128 as the default batch."""
    return max(1, round(factor * config.workload.global_batch / BATCH_MULTIPLE)) * BATCH_MULTIPLE


def _merge(config: RunConfig, setting: Setting) -> RunConfig:
    return replace(config, merge=str(setting))


def _own(title: str, apply: Callable[[RunConfig, Setting], RunConfig]) -> Axis:
    """A choice that the system under study alone has."""
    return Axis(f"{title} ({OWN_SYSTEM})", apply, changes=lambda name: name == OWN_SYSTEM)


def with_options(config: RunConfig, name: str, **options: object) -> RunConfig:
    """The configuration with some options of one system set."""
    chosen = {**config.system_options.get(name, {}), **options}
    return replace(config, system_options={**config.system_options, name: chosen})


def _option(name: str) -> Callable[[RunConfig, Setting], RunConfig]:
    return lambda config, setting: with_options(config, OWN_SYSTEM, **{name: setting})


def _replays(name: str) -> bool:
    """Whether a system pairs forwards with backwards and so can hide its replays (see `baselines.colocated`)."""
    return "replay" in system_options(name)


def _replay(config: RunConfig, setting: Setting) -> RunConfig:
    for name in filter(_replays, config.systems):
        config = with_options(config, name, replay=setting)
    return config


AXES: Mapping[str, Axis] = {
    "contention_scale": Axis("contention", _contention, lambda config: config.contention_scale, "×"),
    "nic": Axis("NIC bandwidth", _nic, lambda config: 1.0, "×"),
    "skew": Axis("routing skew", _skew, lambda config: config.workload.skew),
    "batch": Axis("micro-batches (global batch)", _batch, lambda config: 1.0, "×"),
    "replay": Axis("full recompute (paired baselines)", _replay, changes=_replays),
    "merge": _own("merged copies", _merge),
    "head": _own("output head", _option("head")),
    "nics": _own("NIC ownership", _option("nics")),
    "compute_streams": _own("compute streams", _option("compute_streams")),
}
