"""What the points of a study say of the DisagMoE paper's claims that need runs of their own.

Decides which points each claim is held against, what counts as met, and what of the
published statements is not known and so must be said beside a verdict. The
published values stay in `report/paper.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.report import paper
from bench.report.facts import finite
from bench.study import PLUS_ABLATION, SENSITIVITY

Record = Mapping[str, Any]

GAIN = paper.CLAIMS[0].text
TOP_K, BEST_RATIO, RATIO_GAIN, RATIO_STEP, STAGES = (claim.text for claim in paper.CLAIMS[-5:])
"""Claims that a study answers."""
FALL, ABOVE = paper.FALL.text, paper.ABOVE.text
STAGES_AT = 16
RATIO_SLACK = 0.15


@dataclass(frozen=True)
class Entry:
    """One claim held against one result: `times` is the batch in multiples of the default one, `run` the id."""

    claim: str
    model: str
    seq: int
    calibration: str
    times: float
    setting: str
    ours: float | None
    low: float | None
    high: float | None
    unit: str
    verdict: str
    note: str
    run: str = ""


def study_entries(record: Record) -> Iterator[Entry]:
    """What the points of a study say of the claims that need runs of their own; some kinds say nothing of any."""
    if record["kind"] in (SENSITIVITY, PLUS_ABLATION):
        return
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for point in record["points"]:
        groups.setdefault((str(point["axis"]), str(point["model"]), int(point["seq"])), []).append(point)
    for (axis, model, seq), points in groups.items():
        place = Place(model, seq, str(record["calibration"]), elsewhere(record, model))
        if axis == "ratio":
            halves = {str(p["at"]["ratio"]): p for p in points if p["at"]["nics"] == "halves"}
            yield from _ratio_entries(place, halves, _where(record, model), paper.on_its_device(record["cluster"]))
        elif axis == "top_k":
            for point in points:
                yield _held(TOP_K, place, point)
        elif axis == "depth":
            yield from _stages_entries(place, points)
        else:
            for point in points:
                times = float(point["at"]["batch"])
                yield replace(_held(GAIN, place, point), times=times, note=why(point) or place.note or BATCH_NOTE)


BATCH_NOTE = "the batch of the published range is not known"


def elsewhere(record: Record, model: str) -> str:
    """Why a study of one model is not in the paper's setting, "" where it is."""
    depth = next(m for m in record["models"] if m["name"] == model)
    setting = {**record, "depth": {"used": depth["layers"], "of": depth["of"]}}
    try:
        paper.check_hardware(setting)
    except paper.NotComparableError as reason:
        return str(reason)
    return ""


def _where(record: Record, model: str) -> str:
    """What of the setting of the published ratios is not known, and what it is here."""
    depth = next(m for m in record["models"] if m["name"] == model)
    gpus = sum(int(group["count"]) * int(group["gpus"]) for group in record["cluster"].get("groups") or ())
    on = f"{gpus} GPUs" if gpus else str(record["cluster"]["name"])
    return f"the published model and depth are not stated; here {depth['layers']} of {depth['of']} layers on {on}"


@dataclass(frozen=True)
class Place:
    """Where a group of points is; `note` says why it is not the paper's setting, if it is not."""

    model: str
    seq: int
    calibration: str
    note: str = ""


def why(point: Record) -> str:
    """Why a point has no step, "" where it has one."""
    return "" if point["status"] == "ok" else f"{str(point['status']).replace('_', ' ')}: {point['reason']}"


def _entry(
    claim: paper.Claim,
    place: Place,
    setting: str,
    ours: float | None,
    note: str = "",
    slack: float | None = None,
    judged: bool = True,
) -> Entry:
    """A value held against the published range; not where there is no value, or it is not to be `judged`."""
    verdict = "not comparable"
    if ours is not None and judged:
        verdict = paper.verdict(ours, claim.low, claim.high, claim.slack if slack is None else slack)
    published = (claim.low, claim.high, claim.unit)
    where = (place.model, place.seq, place.calibration, 1, setting)
    return Entry(claim.text, *where, ours, *published, verdict, note or claim.note)


def _held(text: str, place: Place, point: Record) -> Entry:
    """The speed-up of one point over the reference."""
    ours, note = finite(point["speedup_over_reference"]), why(point) or place.note
    return _entry(_claim(text), place, str(point["setting"]), ours, note, judged=not place.note)


def _claim(text: str) -> paper.Claim:
    return next(claim for claim in paper.CLAIMS if claim.text == text)


def _ratio_entries(place: Place, points: Mapping[str, Record], where: str, judged: bool) -> Iterator[Entry]:
    """Steps at ratios of GPUs with half of the NICs each: stated for two groups of GPUs, not for a whole cluster."""
    ran = {ratio: point for ratio, point in points.items() if point["status"] == "ok"}
    if place.seq == 4096 and points:
        best = min(ran, key=lambda ratio: float(ran[ratio]["step_s"]), default=None)
        value, note = (None, "no ratio fits in memory") if best is None else (_ratio(best), where)
        yield _entry(_claim(BEST_RATIO), place, best or "", value, note, RATIO_SLACK, judged)
    if place.seq == 16384 and "16:10" in points:
        point = points["16:10"]
        over = finite(point["speedup_over_reference"])
        yield _entry(_claim(RATIO_GAIN), place, "16:10", over, why(point) or where, judged=judged)
        gain = None
        if {"16:10", "16:16"} <= set(ran):
            gain = float(ran["16:16"]["step_s"]) / float(ran["16:10"]["step_s"])
        note = why(point) or f"per step; {paper.RATIO_ARITHMETIC}"
        yield _entry(_claim(RATIO_STEP), place, "16:10", gain, note, judged=False)
    for ratio in ("16:8", "8:16"):
        if ratio in points:
            over, note = finite(points[ratio]["speedup_over_reference"]), f"{paper.FALL.note}; {where}"
            yield _entry(paper.FALL, place, ratio, over, why(points[ratio]) or note, judged=judged)


def _ratio(text: str) -> float:
    attention, experts = text.split(":")
    return int(attention) / int(experts)


STAGES_EP = 16
"""As in the paper: rings that only fit with another EP size are left out."""


def _stages_entries(place: Place, points: Sequence[Record]) -> Iterator[Entry]:
    """The number of virtual stages with the shortest step at the claim's expert-parallel size, and what is above."""
    steps = {_stages(p): float(p["step_s"]) for p in points if p["status"] == "ok" and p["plan"]["ep"] == STAGES_EP}
    possible = {_stages(point) for point in points}
    nearest = min(possible, key=lambda v: (abs(v - STAGES_AT), v))
    claim, judged = _claim(STAGES), not place.note
    if not steps:
        yield _entry(claim, place, "", None, place.note or f"nothing fits with EP {STAGES_EP}")
    else:
        best = min(steps, key=lambda v: steps[v])
        note = f"v = layers / p, so {nearest} is the nearest to 16 that there is; best of {_listed(steps)}"
        entry = _entry(claim, place, f"v={best}", float(best), place.note or f"{note} with EP {STAGES_EP}")
        met = "inside" if best == nearest else "outside"
        yield replace(entry, verdict=met if judged else "not comparable")
    above = sorted(v for v in possible if v > nearest and v > STAGES_AT)
    if above:
        lost = [v for v in above if v not in steps]
        words = f"share of v = {', '.join(map(str, above))} that does not fit with EP {STAGES_EP}"
        share = len(lost) / len(above)
        yield _entry(paper.ABOVE, place, f"v>{max(nearest, STAGES_AT)}", share, place.note or words, judged=judged)


def _stages(point: Record) -> int:
    return int(point["at"]["v"])


def _listed(values: Mapping[int, float]) -> str:
    return "v = " + ", ".join(map(str, sorted(values)))
