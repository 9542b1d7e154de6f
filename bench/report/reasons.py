"""Decides how a gap to the published speed-up is explained: from where the step of DisagMoE and of the reference goes.

Shares of the step, mean over GPUs, native view. The pool that computes most binds:
the other one waits for it. What the reference exposes bounds the gain of any
overlap at unchanged compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import paper
from bench.report.facts import REFERENCE, Results
from bench.report.grid import Grid
from bench.report.text import length

OWN = "disagmoe"
BALANCED = 0.1
"""Pools whose compute shares differ by less are called balanced."""


@dataclass(frozen=True)
class Shares:
    """Where the steps of one run go, as fractions; `ceiling` is the gain of hiding all that the reference exposes."""

    gain: float
    compute: Mapping[str, float]
    exposed: float
    bubble: float
    reference_exposed: float
    plan: Mapping[str, Any]
    gpus: int

    @property
    def ceiling(self) -> float:
        return 1.0 / (1.0 - self.reference_exposed)

    @property
    def binding(self) -> str:
        """The pool that computes most."""
        return max(self.compute, key=lambda pool: self.compute[pool])

    @property
    def gap(self) -> float:
        """How much less the other pool computes."""
        return max(self.compute.values()) - min(self.compute.values())


def row_of(results: Results, system: str) -> Mapping[str, Any] | None:
    """The row of a system in the native view (its plain form), whatever its status; None where it did not run."""
    rows = [row for row in results["rows"] if row["view"] == "native" and row["system"] == system]
    return next((row for row in rows if not row["variant"]), rows[0] if rows else None)


def shares(results: Results) -> Shares | None:
    """Shares of one run; None where DisagMoE or the reference has no step."""
    own, reference = row_of(results, OWN), row_of(results, REFERENCE)
    if own is None or reference is None or not own["pools"] or own["status"] != "ok" or reference["status"] != "ok":
        return None
    step, their_step = float(own["step_time_s"]), float(reference["step_time_s"])
    return Shares(
        gain=their_step / step,
        compute={pool: float(values["compute_s"]) / step for pool, values in own["pools"].items()},
        exposed=float(own["exposed_comm_s"]) / step,
        bubble=float(own["bubble_s"]) / step,
        reference_exposed=float(reference["exposed_comm_s"]) / their_step,
        plan=own["plan"],
        gpus=int(own["gpus_used"]),
    )


def reasons_grid(runs: Sequence[Results]) -> Grid:
    """One line per run: the gain and where it comes from."""
    headings = (
        *("model", "calibration", "batch", "seq", f"over {REFERENCE}", "A:F per group", "GPUs", "NICs", "binding pool"),
        *("A computes", "F computes", "exposed", "bubble", f"{REFERENCE} exposes", "gain if all of that were hidden"),
    )
    return Grid(
        "Where the gain comes from", headings, tuple(_cells(results) for results in runs), frozenset({0, 1, 7, 8})
    )


def _cells(results: Results) -> tuple[str, ...]:
    workload = results["workload"]
    place = (
        str(results["model"]["name"]),
        str(results["calibration"]),
        f"{workload['global_batch']:,}",
        length(int(workload["seq"])),
    )
    found = shares(results)
    if found is None:
        return (*place, lost(results), *("",) * 10)
    return (
        *place,
        f"{found.gain:.2f}×",
        str(found.plan["A:F"]),
        str(found.gpus),
        str(found.plan["nics"]),
        "balanced" if found.gap < BALANCED else found.binding,
        *(percent(found.compute[pool]) for pool in ("A", "F")),
        *(percent(value) for value in (found.exposed, found.bubble, found.reference_exposed)),
        f"{found.ceiling:.2f}×",
    )


def lost(results: Results) -> str:
    """Which of the two did not run, and why in one word."""
    for system in (OWN, REFERENCE):
        row = row_of(results, system)
        if row is None:
            return f"{system}: not run"
        if row["status"] != "ok":
            return f"{system}: {str(row['status']).replace('_', ' ')}"
    return "no step"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def explanations(runs: Sequence[Results]) -> Iterator[str]:
    """One sentence per run whose speed-up over the reference lies outside the published range."""
    claim = next(claim for claim in paper.CLAIMS if claim.text == "speed-up over Megatron-1F1B")
    for results in runs:
        place = f"{results['model']['title']}, {length(int(results['workload']['seq']))}, {results['calibration']}"
        found = shares(results)
        if found is None:
            reason = next(
                (row["reason"] for s in (OWN, REFERENCE) if (row := row_of(results, s)) and row["reason"]), ""
            )
            yield f"{place}: {lost(results)}{f' ({reason})' if reason else ''}."
        elif paper.verdict(found.gain, claim.low, claim.high, claim.slack) == "outside":
            side = "below" if claim.low is not None and found.gain < claim.low else "above"
            yield f"{place}: {found.gain:.2f}×, {side} the range. {_cause(found, side, claim.low or 0.0)}"


def _cause(found: Shares, side: str, low: float) -> str:
    m, n = str(found.plan["A:F"]).split(":")
    other = "F" if found.binding == "A" else "A"
    said = [f"Attention has {m} and experts have {n} GPUs per group ({found.gpus} GPUs used)."]
    if found.gap >= BALANCED:
        said.append(
            f"Pool {found.binding} binds: it computes {percent(found.compute[found.binding])} of the step,"
            f" pool {other} {percent(found.compute[other])}."
        )
    said.append(
        f"{percent(found.exposed)} of the step is exposed communication and {percent(found.bubble)} bubble;"
        f" {REFERENCE} exposes {percent(found.reference_exposed)} of its own step"
    )
    if side == "above":
        return " ".join(said) + ", the paper about a third of it."
    bound = ", less than the range needs" if found.ceiling < low else ""
    return " ".join(said) + f", so hiding all of it would give {found.ceiling:.2f}× at unchanged compute{bound}."
