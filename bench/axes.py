"""The axes of the sensitivity study: what one setting of each changes in a configuration.

Decides which axes touch every system (the workload and the hardware) and which
only the system under study (its own choices), how settings are written, and on
which of them a point between two others can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bench.comparison import OWN_SYSTEM
from bench.config import RunConfig
from bench.study import Setting
from disagmoe.specs.workload import BATCH_MULTIPLE


@dataclass(frozen=True)
class Axis:
    """One thing that is varied.

    `title` names it in tables and pictures. `apply` gives the configuration at a
    setting. `base` is the coordinate of the unchanged configuration on a numeric
    axis, None on an axis of words. `shared` axes change every system, the others
    only the one under study.
    """

    title: str
    apply: Callable[[RunConfig, Setting], RunConfig]
    base: Callable[[RunConfig], float] | None = None
    unit: str = ""

    @property
    def shared(self) -> bool:
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


def _option(name: str) -> Callable[[RunConfig, Setting], RunConfig]:
    def apply(config: RunConfig, setting: Setting) -> RunConfig:
        own = {**config.system_options.get(OWN_SYSTEM, {}), name: setting}
        return replace(config, system_options={**config.system_options, OWN_SYSTEM: own})

    return apply


AXES: Mapping[str, Axis] = {
    "contention_scale": Axis("contention", _contention, lambda config: config.contention_scale, "×"),
    "nic": Axis("NIC bandwidth", _nic, lambda config: 1.0, "×"),
    "skew": Axis("routing skew", _skew, lambda config: config.workload.skew),
    "batch": Axis("micro-batches (global batch)", _batch, lambda config: 1.0, "×"),
    "merge": Axis(f"merged copies ({OWN_SYSTEM})", _merge),
    "head": Axis(f"output head ({OWN_SYSTEM})", _option("head")),
    "nics": Axis(f"NIC ownership ({OWN_SYSTEM})", _option("nics")),
    "compute_streams": Axis(f"compute streams ({OWN_SYSTEM})", _option("compute_streams")),
}
