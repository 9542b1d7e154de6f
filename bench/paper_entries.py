"""What results hold against the DisagMoE paper, claim by claim: from comparisons, and from the study of single claims.

Decides which runs count (the paper's models, lengths and hardware, whole models,
no setting changed but the calibration and the batch; of equal ones the newest) and
what the study says where a claim needs runs of its own. The published values stay
in `report/paper.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.collect import newest_runs
from bench.report import paper
from bench.report.facts import Results, calibration_name
from bench.results import STUDY_FILE
from bench.study import CLAIMS as CLAIMS_STUDY
from bench.verdicts import Entry, Record, study_entries
from disagmoe.specs import default_global_batch


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
