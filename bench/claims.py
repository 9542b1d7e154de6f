"""Runs that single claims of the DisagMoE paper need and that no comparison of systems at their best contains.

Three groups of points, each `disagmoe` with something fixed and the rest tuned,
beside the reference on the same model, length and cluster: the A:F ratio with half
of the NICs for each pool; top-k and the expert-parallel size on the models with 64
experts; the depth p of the ring and with it the number of virtual stages L / p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from baselines.registry import REFERENCE
from bench.comparison import OWN_SYSTEM
from bench.config import RunConfig
from bench.points import answers, asked
from bench.sensitivity import Progress, based
from disagmoe.specs import ModelSpec, default_global_batch

EXPERTS = 64
"""The top-k claim is stated for models with this many experts."""


@dataclass(frozen=True)
class Point:
    """One setting of one group; `config` has what is fixed."""

    axis: str
    setting: str
    config: RunConfig


def points(config: RunConfig) -> list[Point]:
    """All points of the study, group by group."""
    assert config.study is not None
    study, found = config.study, []
    for model in study.models:
        for seq in study.settings("ratio_seq"):
            there = _at(config, model, int(seq))
            found += [Point("ratio", str(ratio), _with_ratio(there, str(ratio))) for ratio in study.settings("ratio")]
    for model in study.models:
        for seq in study.settings("top_k_seq"):
            found += _top_k_points(config, model, int(seq))
    for model in study.models:
        for seq in study.settings("depth_seq"):
            there = _at(config, model, int(seq))
            for p in study.settings("depth"):
                if int(p) <= model.layers:
                    text = f"p={p}, v={ceil(model.layers / int(p))}"
                    found.append(Point("depth", text, _own(there, p=int(p))))
    return found


def _at(config: RunConfig, model: ModelSpec, seq: int) -> RunConfig:
    """The unchanged configuration of a model at a length, with the default batch of that length."""
    workload = replace(config.workload, seq=seq, global_batch=default_global_batch(seq))
    return replace(based(config, model), workload=workload)


def _own(config: RunConfig, **options: Any) -> RunConfig:
    own = {**config.system_options.get(OWN_SYSTEM, {}), **options}
    return replace(config, system_options={**config.system_options, OWN_SYSTEM: own})


def _with_ratio(config: RunConfig, ratio: str) -> RunConfig:
    m, n = (int(part) for part in ratio.split(":"))
    return _own(config, m=m, n=n, nics="halves")


def _top_k_points(config: RunConfig, model: ModelSpec, seq: int) -> list[Point]:
    assert config.study is not None
    if model.experts != EXPERTS:
        return []
    return [
        Point("top_k", f"top-{k}, EP {ep}", replace(_at(config, replace(model, top_k=int(k)), seq), ep=int(ep)))
        for k in config.study.settings("top_k")
        for ep in config.study.settings("ep")
    ]


def conduct(config: RunConfig, progress: Progress, processes: int | None = None) -> dict[str, Any]:
    """The record's points."""
    asked_for = points(config)
    tasks = [
        asked(f"{point.config.model.name} {point.axis} {point.setting.replace(',', '')} {name}", point.config, name)
        for point in asked_for
        for name in (OWN_SYSTEM, REFERENCE)
    ]
    replies = answers(tasks, progress, processes)
    rows = [reply[0].row for reply in replies]
    return {"points": [_record(p, *rows[2 * i : 2 * i + 2]) for i, p in enumerate(asked_for)]}


def _record(point: Point, own: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    ran = own["status"] == "ok" and reference["status"] == "ok"
    return {
        "model": point.config.model.name,
        "axis": point.axis,
        "setting": point.setting,
        "seq": point.config.workload.seq,
        "status": own["status"],
        "reason": own["reason"] or "",
        "step_s": own["step_time_s"],
        "exposed_s": own["exposed_comm_s"],
        "bubble_s": own["bubble_s"],
        "reference_step_s": reference["step_time_s"],
        "speedup_over_reference": reference["step_time_s"] / own["step_time_s"] if ran else None,
        "microbatches": own["microbatches"],
        "gpus_used": own["gpus_used"],
        "needed_gib": own["peak_memory_gib"],
        "plan": own["plan"],
    }
