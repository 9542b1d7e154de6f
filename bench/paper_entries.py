"""What results hold against the DisagMoE paper, claim by claim: from comparisons, and from the study of single claims.

Decides which runs count (the paper's models, lengths and hardware, whole models,
no setting changed but the calibration and the batch; of equal ones the newest) and
what the study says where a claim needs runs of its own. The published values stay
in `report/paper.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.collect import newest_runs
from bench.report import paper
from bench.report.facts import Results, calibration_name, finite
from bench.results import STUDY_FILE
from bench.study import CLAIMS as CLAIMS_STUDY
from disagmoe.specs import default_global_batch

Record = Mapping[str, Any]

TOP_K, BEST_RATIO, RATIO_GAIN, RATIO_STEP, STAGES = (claim.text for claim in paper.CLAIMS[-5:])
"""Claims that the study answers."""
FALL = "A:F 16:8 and 8:16 over Megatron-1F1B, NICs 16:16"
"""Stated beside the others as "about 1×", without model or length."""
FALL_AT, FALL_SLACK = 1.0, 0.1
STAGES_AT = 16
RATIO_SLACK = 0.15


@dataclass(frozen=True)
class Entry:
    """One claim held against one result: `times` is the batch in multiples of the default one, `run` the id."""

    claim: str
    model: str
    seq: int
    calibration: str
    times: int
    setting: str
    ours: float | None
    low: float | None
    high: float | None
    unit: str
    verdict: str
    note: str
    run: str = ""


def runs_of_the_paper(results_dir: Path) -> list[Results]:
    """Whole runs in the paper's setting, oldest first; one per model, length, calibration and batch."""
    found: dict[tuple[str, int, str, int], Results] = {}
    for results in newest_runs(results_dir)[0]:
        if _counts(results):
            found[model_of(results), int(results["workload"]["seq"]), calibration_name(results), times_of(results)] = (
                results
            )
    return list(found.values())


def _counts(results: Results) -> bool:
    """The paper's model, length and hardware, and nothing else changed."""
    extra = set(results.get("settings") or {}) - {"plans_from"}
    batch, default = int(results["workload"]["global_batch"]), default_global_batch(int(results["workload"]["seq"]))
    try:
        paper.check_setting(results)
    except paper.NotComparableError:
        return False
    return not extra and batch % default == 0 and any(row["view"] == "native" for row in results["rows"])


def model_of(results: Results) -> str:
    """The model's short name."""
    return str(results["model"]["name"])


def times_of(results: Results) -> int:
    """The batch in multiples of the default one."""
    return int(results["workload"]["global_batch"]) // default_global_batch(int(results["workload"]["seq"]))


def studies_of_the_paper(results_dir: Path) -> list[Record]:
    """The newest study of single claims per calibration, oldest first."""
    from bench.study_run import load_study

    found: dict[str, Record] = {}
    directories = [path.parent for path in results_dir.glob(f"[!.]*/{STUDY_FILE}")]
    records = [load_study(directory) for directory in sorted(directories)]
    for record in sorted(records, key=lambda record: str(record["run"]["created"])):
        if record["kind"] == CLAIMS_STUDY and record["view"] == "native" and not record["settings"]:
            found[str(record["calibration"])] = record
    return list(found.values())


def entries(runs: Sequence[Results], studies: Sequence[Record]) -> list[Entry]:
    """Every claim against every run, in the order of the claims; what a study answers comes from there."""
    answers = [replace(e, run=str(record["run"]["id"])) for record in studies for e in study_entries(record)]
    answered = {entry.claim for entry in answers}
    by_claim: dict[str, list[Entry]] = {claim.text: [] for claim in paper.CLAIMS}
    for results in runs:
        place = (model_of(results), int(results["workload"]["seq"]), calibration_name(results), times_of(results))
        for row in paper.compare(results):
            if row["verdict"] != "not comparable" or row["claim"] not in answered:
                value = (row["ours"], row["low"], row["high"], row["unit"], row["verdict"], row["note"])
                by_claim[row["claim"]].append(Entry(row["claim"], *place, "tuned", *value, str(results["run"]["id"])))
    for entry in answers:
        by_claim.setdefault(entry.claim, []).append(entry)
    return [entry for found in by_claim.values() for entry in found]


def study_entries(record: Record) -> Iterator[Entry]:
    """What a study says of the claims that need runs of their own."""
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for point in record["points"]:
        groups.setdefault((str(point["axis"]), str(point["model"]), int(point["seq"])), []).append(point)
    calibration = str(record["calibration"])
    for (axis, model, seq), points in groups.items():
        place = (model, seq, calibration, 1)
        if axis == "top_k":
            for point in points:
                yield _held(TOP_K, place, str(point["setting"]), finite(point["speedup_over_reference"]), why(point))
        elif axis == "ratio":
            yield from _ratio_entries(place, {str(point["setting"]): point for point in points})
        elif axis == "depth":
            yield _stages_entry(place, points)


def why(point: Record) -> str:
    """Why a point has no step, "" where it has one."""
    return "" if point["status"] == "ok" else f"{str(point['status']).replace('_', ' ')}: {point['reason']}"


def _held(
    text: str,
    place: tuple[str, int, str, int],
    setting: str,
    ours: float | None,
    note: str = "",
    slack: float | None = None,
) -> Entry:
    """A value held against the published range."""
    claim = next(claim for claim in paper.CLAIMS if claim.text == text)
    verdict = "not comparable" if ours is None else paper.verdict(ours, claim.low, claim.high, slack or claim.slack)
    return Entry(text, *place, setting, ours, claim.low, claim.high, claim.unit, verdict, note or claim.note)


def _ratio_entries(place: tuple[str, int, str, int], points: Mapping[str, Record]) -> Iterator[Entry]:
    ran = {ratio: point for ratio, point in points.items() if point["status"] == "ok"}
    seq = place[1]
    if seq == 4096:
        best = min(ran, key=lambda ratio: float(ran[ratio]["step_s"]), default=None)
        value = None if best is None else _ratio(best)
        yield _held(BEST_RATIO, place, best or "", value, "" if best else "no ratio fits in memory", RATIO_SLACK)
    if seq == 16384 and "16:10" in points:
        point = points["16:10"]
        yield _held(RATIO_GAIN, place, "16:10", finite(point["speedup_over_reference"]), why(point))
        gain = None
        if {"16:10", "16:16"} <= set(ran):
            gain = float(ran["16:16"]["step_s"]) / float(ran["16:10"]["step_s"])
        claim = next(claim for claim in paper.CLAIMS if claim.text == RATIO_STEP)
        note = why(point) or f"per step; {paper.RATIO_ARITHMETIC}"
        yield Entry(RATIO_STEP, *place, "16:10", gain, claim.low, claim.high, "x", "not comparable", note)
    for ratio in ("16:8", "8:16"):
        if ratio in points:
            ours = finite(points[ratio]["speedup_over_reference"])
            low, high = FALL_AT, FALL_AT
            verdict = "not comparable" if ours is None else paper.verdict(ours, low, high, FALL_SLACK)
            note = why(points[ratio]) or f'"about 1×", read as within {FALL_SLACK:g}; model and length are not stated'
            yield Entry(FALL, *place, ratio, ours, low, high, "x", verdict, note)


def _ratio(text: str) -> float:
    attention, experts = text.split(":")
    return int(attention) / int(experts)


def _stages_entry(place: tuple[str, int, str, int], points: Sequence[Record]) -> Entry:
    """The number of virtual stages with the shortest step, at the expert-parallel size of the claim."""
    steps = {stages_of(p): float(p["step_s"]) for p in points if p["status"] == "ok" and p["plan"]["ep"] == STAGES_EP}
    possible = [stages_of(point) for point in points]
    nearest = min(possible, key=lambda v: (abs(v - STAGES_AT), v))
    if not steps:
        return _held(STAGES, place, "", None, f"nothing fits with EP {STAGES_EP}")
    best = min(steps, key=lambda v: steps[v])
    note = (
        f"v = layers / p, so {nearest} is the nearest to 16 that there is; best of {_listed(steps)} with EP {STAGES_EP}"
    )
    entry = _held(STAGES, place, f"v={best}", float(best), note)
    return replace(entry, verdict="inside" if best == nearest else "outside")


STAGES_EP = 16
"""As in the paper: rings that only fit with another EP size are left out."""


def stages_of(point: Record) -> int:
    """The virtual stages of a point: "p=4, v=24"."""
    return int(str(point["setting"]).rsplit("=", 1)[1])


def _listed(values: Mapping[int, float]) -> str:
    return "v = " + ", ".join(map(str, sorted(values)))
