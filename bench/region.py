"""Where disaggregation does not pay: the advisor's question over a grid of clusters and lengths.

Decides which systems stand for their kind (SYSTEMS; the full set would take
minutes) and how a cluster is varied: `nics_per_gpu` changes the NICs of every
node, `nic_gbit` the speed of every NIC, `seq` the sequence length at the default
batch (or the batch that was given). Every point is evaluated like a run.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from pathlib import Path

from bench.advice import best_of
from bench.config import RunConfig
from bench.evaluate import evaluate
from disagmoe.specs import ClusterSpec, default_global_batch

SYSTEMS = ("megatron_1f1b", "tutel", "disagmoe")
AXES: Mapping[str, str] = {
    "seq": "sequence length [tokens]",
    "nics_per_gpu": "NICs per GPU",
    "nic_gbit": "NIC speed [Gbit/s]",
}
"""Axes by name, in the order in which they become x, y and panel."""
SHORT = {"oom": "OOM", "not_applicable": "n/a", "failed": "failed", "ok": "–"}

Point = Mapping[str, float]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Map:
    """One panel: gains[y][x] of best colocated over best disaggregated step, None with a short reason."""

    title: str
    x_values: tuple[float, ...]
    y_values: tuple[float, ...]
    gains: tuple[tuple[float | None, ...], ...]
    reasons: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Region:
    """The maps and every number behind them (`lines`, one per point)."""

    x_name: str
    y_name: str
    maps: tuple[Map, ...]
    lines: tuple[Mapping[str, object], ...]
    subtitle: str
    footer: str

    @property
    def x_label(self) -> str:
        return AXES[self.x_name]

    @property
    def y_label(self) -> str:
        return AXES.get(self.y_name, "")

    @property
    def verdict(self) -> str:
        """At how many points disaggregation pays, does not, or cannot be compared, in a line."""
        gains = [line["gain"] for line in self.lines if isinstance(line["gain"], float)]
        losses, open_points = sum(gain < 1.0 for gain in gains), len(self.lines) - len(gains)
        parts = [f"pays at {len(gains) - losses} of {len(self.lines)} points", f"does not at {losses}"]
        parts += [f"has nothing to compare at {open_points} (see the table)"] if open_points else []
        return f"{self.lines[0]['view']} view: disaggregation {', '.join(parts)}"


def region(
    config: RunConfig, axes: Mapping[str, Sequence[float]], report: Report | None = None, workers: int | None = None
) -> Region:
    """Evaluate every point of up to three axes, `workers` at a time (default: one per CPU).

    Raises ValueError where a point cannot be.
    """
    tell = report or (lambda text: None)
    names = [name for name in AXES if name in axes]
    view = config.views[0]
    points = [dict(zip(names, values, strict=True)) for values in product(*(axes[name] for name in names))]
    jobs = [(at_point(config, point), point, view) for point in points]  # a mistake shows before anything runs
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    lines = []
    with ExitStack() as stack:
        if workers == 1:
            results: Iterator[dict[str, object]] = map(_line, jobs)
        else:  # spawned, not forked: a progress bar may be drawing from a thread
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(workers, mp_context=context))
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            results = pool.map(_line, jobs)
        for number, line in enumerate(results, 1):
            tell(f"point {number} of {len(jobs)}")
            lines.append(line)
    return _region(config, axes, names, view, lines)


def at_point(config: RunConfig, point: Point) -> RunConfig:
    """The configuration at one point of the grid."""
    cluster, work = config.cluster, config.workload
    groups = []
    for group in cluster.groups:
        nics = (
            Fraction(point.get("nics_per_gpu", Fraction(group.nics, group.gpus))).limit_denominator(1024) * group.gpus
        )
        if nics.denominator != 1 or nics < 1:
            raise ValueError(
                f"nics_per_gpu={float(point['nics_per_gpu']):g}: a node of {group.gpus} GPUs would have "
                f"{float(nics):g} NICs; allowed: multiples of 1/{group.gpus}"
            )
        groups.append(replace(group, nics=int(nics), nic_gbit=float(point.get("nic_gbit", group.nic_gbit))))
    seq = int(point.get("seq", work.seq))
    given = work.global_batch != default_global_batch(work.seq)
    batch = work.global_batch if given or seq == work.seq else default_global_batch(seq)
    changed: ClusterSpec = replace(cluster, groups=tuple(groups))
    return replace(
        config,
        cluster=changed,
        workload=replace(work, seq=seq, global_batch=batch),
        systems=tuple(name for name in SYSTEMS if name in config.systems or name == SYSTEMS[0]),
        system_options={k: v for k, v in config.system_options.items() if k in SYSTEMS},
        views=config.views[:1],
    )


def _line(job: tuple[RunConfig, Point, str]) -> dict[str, object]:
    config, point, view = job
    evaluation = evaluate(config)
    own, colocated, reference, why = best_of(evaluation, view)
    plan = {} if own is None else own["plan"]
    statuses = [row["status"] for row in evaluation.rows if str(row["system"]).startswith("disagmoe")]
    gain = None if own is None or colocated is None else colocated["step_time_s"] / own["step_time_s"]
    return {
        **point,
        "view": view,
        "gain": gain,
        "disaggregated": None if own is None else own["system"],
        "disaggregated_s": None if own is None else own["step_time_s"],
        "colocated": None if colocated is None else colocated["system"],
        "colocated_s": None if colocated is None else colocated["step_time_s"],
        "megatron_1f1b_s": None if reference is None else reference["step_time_s"],
        "attention_gpus": plan.get("A_gpus"),
        "expert_gpus": plan.get("F_gpus"),
        "p": plan.get("p"),
        "dp": plan.get("dp"),
        "status": statuses[0] if statuses else "not_applicable",
        "reason": "" if own is not None else why,
    }


def _region(
    config: RunConfig, axes: Mapping[str, Sequence[float]], names: list[str], view: str, lines: list[dict[str, object]]
) -> Region:
    x_name, y_name, panel = (*names, "", "")[:3]
    xs = tuple(axes[x_name])
    ys = tuple(axes[y_name]) if y_name else (0.0,)
    maps = []
    for value in axes[panel] if panel else (None,):
        here = [line for line in lines if panel == "" or line[panel] == value]
        table = {(line[x_name], line.get(y_name, 0.0)): line for line in here}
        maps.append(
            Map(
                title=f"{AXES[panel]}: {value:g}"
                if value is not None
                else "best colocated step ÷ best disaggregated step",
                x_values=xs,
                y_values=ys,
                gains=tuple(tuple(_gain(table[x, y]) for x in xs) for y in ys),
                reasons=tuple(tuple(SHORT[str(table[x, y]["status"])] for x in xs) for y in ys),
            )
        )
    systems = ", ".join(name for name in SYSTEMS if name in config.systems or name == SYSTEMS[0])
    how = f"{view} view · simulated (calibration {Path(config.calibration).stem})"
    return Region(
        x_name=x_name,
        y_name=y_name,
        maps=tuple(maps),
        lines=tuple(lines),
        subtitle=f"{config.model.title} · {config.cluster.name} varied · {how}",
        footer=f"Gain = step of the best colocated system ÷ step of disagmoe; {systems}, each tuned.\n"
        "Above 1 (blue) disaggregation pays; the line is break-even, interpolated between points.",
    )


def _gain(line: Mapping[str, object]) -> float | None:
    gain = line["gain"]
    return gain if isinstance(gain, float) else None


def write_csv(path: Path, result: Region) -> None:
    """Every point with its steps and splits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(result.lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: "" if value is None else value for key, value in line.items()} for line in result.lines)
