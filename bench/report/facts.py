"""Decides how a run introduces itself: the header lines above the tables and the captions of the figures.

Everything is read from the results record, never recomputed, so a table or a
picture made later from `results.json` says the same as the one made by the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]
"""The record of one run, as in `results.json` (see bench/schema/results.schema.json)."""

ORIGIN = {"simulate": "simulated", "emulate": "emulated", "measure": "measured"}
REFERENCE = "megatron_1f1b"
"""The system every speed-up is relative to."""


def finite(value: Any) -> float | None:
    """A usable number, or None: tables and figures never show NaN or infinity."""
    if value is None or isinstance(value, (str, bool)):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def row_label(row: Mapping[str, Any]) -> str:
    """Name of a row: system, variant where there is one, and "native" where the real system ran."""
    extras = [str(row["variant"])] if row.get("variant") else []
    if row.get("implementation") == "native":
        extras.append("native")
    return f"{row['system']} ({', '.join(extras)})" if extras else str(row["system"])


def views(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The views of a run in the order of their rows."""
    return list(dict.fromkeys(str(row["view"]) for row in rows))


def view_rows(results: Results, view: str) -> list[Mapping[str, Any]]:
    """The rows of one view, in order."""
    return [row for row in results["rows"] if row["view"] == view]


def model_label(model: Mapping[str, Any]) -> str:
    """ "Qwen3-235B-A22B (qwen3)" where the model has a public title, else its short name."""
    name, title = str(model["name"]), model.get("title")
    return f"{title} ({name})" if title and title != name else name


def calibration_name(results: Results) -> str:
    """The calibration's name, whether it is recorded as a name or as an object."""
    calibration = results["calibration"]
    return str(calibration["name"]) if isinstance(calibration, Mapping) else str(calibration)


def settings_text(results: Results) -> str:
    """Settings that are not the default, as one would type them; "" where there are none."""
    return " ".join(f"{key}={_typed(value)}" for key, value in sorted((results.get("settings") or {}).items()))


def _typed(value: Any) -> str:
    """A setting without spaces: 2.0 as "2", lists in brackets."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_typed(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_typed(item) for item in value) + "]"
    return "null" if value is None else str(value)


@dataclass(frozen=True)
class Facts:
    """Short texts that name a run; captions and headers are put together from these."""

    origin: str
    model: str
    depth: str
    cluster: str
    on: str
    calibration: str
    sequence: str
    batch: str

    @property
    def subtitle(self) -> str:
        """One line for a figure: what ran, at which depth, where, and how it was obtained."""
        return f"{self.model} · {self.sequence} · {self.depth} · {self.provenance}"

    @property
    def where(self) -> str:
        """How and on what, without the calibration."""
        return f"{self.origin} on {self.on}"

    @property
    def provenance(self) -> str:
        """How the numbers came about and on what."""
        return f"{self.where} (calibration {self.calibration})"


def facts(results: Results) -> Facts:
    """The texts of one run."""
    workload, depth = results["workload"], results["depth"]
    sequences, seq = int(workload["global_batch"]), int(workload["seq"])
    return Facts(
        origin=ORIGIN[str(results["backend"])],
        model=model_label(results["model"]),
        depth=f"{depth['used']} of {depth['of']} layers",
        cluster=str(results["cluster"]["name"]),
        on=_on(results),
        calibration=calibration_name(results),
        sequence=f"seq {seq:,}",
        batch="a cut of the batch"
        if results["backend"] == "emulate"
        else f"global batch {sequences:,} sequences ({sequences * seq:,} tokens)",
    )


def _on(results: Results) -> str:
    """What it ran on: the cluster, or the processes that stood for it."""
    cluster, execution = str(results["cluster"]["name"]), results.get("execution")
    if results["backend"] == "emulate" and execution:
        return f"{execution['processes']} processes at the pace of {cluster}"
    return cluster


def _device(cluster: Mapping[str, Any]) -> str:
    """ "H800" for a device with a number, "laptop devices" for one without."""
    name = str(cluster.get("device") or "GPU")
    return name.upper() if any(letter.isdigit() for letter in name) else f"{name} devices"


def cluster_text(cluster: Mapping[str, Any]) -> str:
    """Hardware of a cluster in words, as far as the record describes it."""
    parts = []
    for group in cluster.get("groups") or ():
        nodes = f"{group['count']} node{'' if group['count'] == 1 else 's'}"
        nics = f"{group['nics']} × {group['nic_gbit']:g} Gbit/s NIC{'' if group['nics'] == 1 else 's'}"
        parts.append(f"{nodes} × {group['gpus']} {_device(cluster)} with {nics} each")
    if finite(cluster.get("nvlink_gbs")) is not None:
        parts.append(f"NVLink {cluster['nvlink_gbs']:g} GB/s each way")
    if (finite(cluster.get("spine_oversubscription")) or 1.0) != 1.0:
        parts.append(f"spine oversubscribed {cluster['spine_oversubscription']:g}:1")
    return f"{cluster['name']}: {', '.join(parts)}" if parts else str(cluster["name"])


def model_text(results: Results) -> str:
    """The resolved model and the shape that matters to a schedule."""
    model = results["model"]
    emulated = ", emulated" if results["backend"] == "emulate" else ""
    parts = [model_label(model), f"{results['depth']['used']} of {results['depth']['of']} layers{emulated}"]
    if model.get("hidden"):
        parts.append(f"hidden {model['hidden']}")
    if model.get("experts"):
        parts.append(f"{model['experts']} experts of width {model.get('expert_width')}, top-{model.get('top_k')}")
    for key, word in (("parameters_total", "total"), ("parameters_active", "active")):
        count = finite(model.get(key))
        if count is not None:
            size = f"{count / 1e9:,.1f} B" if count >= 1e8 else f"{count / 1e6:,.2f} M"
            parts.append(f"{size} parameters {word}")
    return ", ".join(parts)


def _transports(rows: Sequence[Mapping[str, Any]]) -> str:
    """Who carries the tokens in one view: "nccl, merge none: megatron_1f1b, tutel"."""
    users: dict[str, list[str]] = {}
    for row in rows:
        if row.get("transport"):
            users.setdefault(f"{row['transport']} (merge {row.get('merge') or 'none'})", []).append(row_label(row))
    if len(users) == 1 and len(rows) > 1:
        return f"{next(iter(users))} for every system"
    return "; ".join(f"{transport}: {', '.join(names)}" for transport, names in users.items())


def _contention(rows: Sequence[Mapping[str, Any]]) -> str:
    """Slow-down factors of overlap, once per transport."""
    seen: dict[str, None] = {}
    for row in rows:
        factors = row.get("contention")
        if factors:
            both = f"compute × {factors['compute']:.3g}, communication × {factors['comm']:.3g}"
            seen[f"{row.get('transport')}: {both}"] = None
    return "; ".join(seen)


def _microbatches(rows: Sequence[Mapping[str, Any]]) -> str:
    """Micro-batches per step over all rows, a range where systems differ."""
    counts = sorted({int(row["microbatches"]) for row in rows if row.get("microbatches")})
    if not counts:
        return "micro-batches: none ran"
    if len(counts) == 1:
        return f"{counts[0]} micro-batches"
    return f"{counts[0]}–{counts[-1]} micro-batches (per system, below)"


def header(results: Results) -> list[tuple[str, str]]:
    """Labelled lines printed above the tables of a run."""
    named, rows, workload = facts(results), results["rows"], results["workload"]
    work = [named.sequence, named.batch, _microbatches(rows)]
    if (finite(workload.get("skew")) or 1.0) != 1.0:
        work.append(f"routing skew {workload['skew']:g} (max/mean expert load)")
    if workload.get("stragglers"):
        work.append("stragglers " + ", ".join(f"GPU {gpu} × {f:g}" for gpu, f in workload["stragglers"]))
    lines = [
        ("numbers", f"{named.provenance}, run {results['run']['id']}"),
        ("model", model_text(results)),
        ("cluster", cluster_text(results["cluster"])),
        ("workload", ", ".join(work)),
    ]
    if results["backend"] == "emulate" and results.get("execution"):
        lines.append(("emulated", _emulated_text(results["execution"])))
    if settings_text(results):
        lines.append(("settings", f"{settings_text(results)} (all others as by default)"))
    lines += [(f"view {view}", _transports(view_rows(results, view)) or "no system ran") for view in views(rows)]
    contention = _contention(rows)
    if contention:
        lines.append(("contention", f"{contention} while both run (1 = ideal overlap)"))
    assumptions = [str(text) for text in results["model"].get("assumptions") or ()]
    lines += [("assumes", text) for text in assumptions]
    lines += [("note", note) for note in notes(results) if not any(note.endswith(text) for text in assumptions)]
    return lines


def _emulated_text(execution: Mapping[str, Any]) -> str:
    """The machine under an emulated run, and how its pace was kept."""
    texts = [f"{execution['cores']} cores of {execution['device']}, torch {execution['torch']}"]
    repeats = [repeat for row in execution["rows"] for repeat in row["repeats"]]
    if repeats:
        dilations = [float(row["dilation"]) for row in execution["rows"]]
        texts.append(f"{min(dilations):.3g} to {max(dilations):.3g} wall seconds per second")
        foreign = [load for load in (finite(repeat["foreign_load"]) for repeat in repeats) if load is not None]
        if foreign:
            texts.append(f"other processes used {min(foreign):.2g} to {max(foreign):.2g} cores meanwhile")
    return "; ".join(texts)


def notes(results: Results) -> list[str]:
    """What every table and figure of the run has to say besides its numbers."""
    return [str(note) for note in results.get("notes") or ()]
