"""Runs that single claims of the DisagMoE paper need and that no comparison of systems at their best contains.

Four groups of points, each `disagmoe` with something fixed and the rest tuned,
beside the reference on the same model, length and cluster: the A:F ratio with half
of the NICs for each pool, or with NICs as the tuner likes; top-k and the
expert-parallel size on the models with 64 experts; the depth p of the ring and with
it the number of virtual stages L / p; the batch and with it the number of
micro-batches. A study has the groups whose axes it sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from baselines.registry import REFERENCE
from bench.axes import sequences, with_options
from bench.comparison import OWN_SYSTEM
from bench.config import RunConfig
from bench.points import answers, asked
from bench.sensitivity import Progress, based
from bench.study import FREE, TOPK_EP
from disagmoe.specs import ModelSpec, default_global_batch

EXPERTS = 64
"""The top-k claim is stated for models with this many experts."""
COMPARED = (OWN_SYSTEM, REFERENCE)
"""The systems run at every point."""


@dataclass(frozen=True)
class Point:
    """One setting of one group: `at` in plain values, `setting` in words, `config` with what is fixed."""

    axis: str
    setting: str
    config: RunConfig
    at: Mapping[str, Any] = field(default_factory=dict)


def points(config: RunConfig) -> list[Point]:
    """All points of the study, group by group. Raises ValueError where a study of one group has none."""
    assert config.study is not None
    groups = (_ratio_points, _top_k_points, _depth_points, _batch_points)
    found = [point for group in groups for model in config.study.models for point in group(config, model)]
    if not found and config.study.kind == TOPK_EP:
        names = ", ".join(f"{model.name} has {model.experts}" for model in config.study.models)
        raise ValueError(f"{TOPK_EP} is about models with {EXPERTS} experts; {names}")
    return found


def _at(config: RunConfig, model: ModelSpec, seq: Any) -> RunConfig:
    """The unchanged configuration of a model at a length, with the default batch of that length."""
    workload = replace(config.workload, seq=int(seq), global_batch=default_global_batch(int(seq)))
    return replace(based(config, model), workload=workload)


def _settings(config: RunConfig, axis: str) -> tuple[Any, ...]:
    assert config.study is not None
    return config.study.settings(axis)


def _ratio_points(config: RunConfig, model: ModelSpec) -> Iterator[Point]:
    for seq in _settings(config, "ratio_seq"):
        there = _at(config, model, seq)
        for nics in _settings(config, "ratio_nics"):
            for ratio in _settings(config, "ratio"):
                m, n = (int(part) for part in ratio.split(":"))
                rule = {} if nics == FREE else {"nics": nics}
                fixed = with_options(there, OWN_SYSTEM, m=m, n=n, **rule)
                text = f"{ratio}, NICs free" if nics == FREE else ratio
                yield Point("ratio", text, fixed, {"ratio": ratio, "nics": nics})


def _top_k_points(config: RunConfig, model: ModelSpec) -> Iterator[Point]:
    if model.experts != EXPERTS:
        return
    for seq in _settings(config, "top_k_seq"):
        for k in _settings(config, "top_k"):
            for ep in _settings(config, "ep"):
                there = replace(_at(config, replace(model, top_k=k), seq), ep=ep)
                yield Point("top_k", f"top-{k}, EP {ep}", there, {"top_k": k, "ep": ep})


def _depth_points(config: RunConfig, model: ModelSpec) -> Iterator[Point]:
    for seq in _settings(config, "depth_seq"):
        there = _at(config, model, seq)
        for p in _settings(config, "depth"):
            if p <= model.layers:
                v = ceil(model.layers / p)
                yield Point("depth", f"p={p}, v={v}", with_options(there, OWN_SYSTEM, p=p), {"p": p, "v": v})


def _batch_points(config: RunConfig, model: ModelSpec) -> Iterator[Point]:
    for seq in _settings(config, "batch_seq"):
        there = _at(config, model, seq)
        for factor in _settings(config, "batch"):
            batch = sequences(there, factor)
            fixed = replace(there, workload=replace(there.workload, global_batch=batch))
            yield Point("batch", f"{factor:g}× ({batch:,} sequences)", fixed, {"batch": factor})


def conduct(config: RunConfig, progress: Progress, processes: int | None = None) -> dict[str, Any]:
    """The record's points."""
    asked_for = points(config)
    tasks = [
        asked(f"{point.config.model.name} {point.axis} {point.setting.replace(',', '')} {name}", point.config, name)
        for point in asked_for
        for name in COMPARED
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
        "at": dict(point.at),
        "seq": point.config.workload.seq,
        "global_batch": point.config.workload.global_batch,
        "status": own["status"],
        "reason": own["reason"] or "",
        "step_s": own["step_time_s"],
        "exposed_s": own["exposed_comm_s"],
        "bubble_s": own["bubble_s"],
        "pool_compute": {pool: part["compute_s"] / own["step_time_s"] for pool, part in (own["pools"] or {}).items()},
        "reference_step_s": reference["step_time_s"],
        "speedup_over_reference": reference["step_time_s"] / own["step_time_s"] if ran else None,
        "microbatches": own["microbatches"],
        "gpus_used": own["gpus_used"],
        "needed_gib": own["peak_memory_gib"],
        "plan": own["plan"],
    }
