"""The paper page: which results count, what the study answers, verdicts, and that it is a function of the results."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from bench.paper_entries import entries, runs_of_the_paper, studies_of_the_paper
from bench.paper_page import main, page, summary_grid, write_page
from bench.report import paper
from bench.report.reasons import explanations, lost, shares
from bench.results import validate
from bench.verdicts import ABOVE, BEST_RATIO, FALL, RATIO_GAIN, RATIO_STEP, STAGES, TOP_K, Entry, study_entries
from disagmoe.specs import load_model
from tests.bench.report.sample import sample
from tests.bench.test_sensitivity import row

OVER_MEGATRON = "speed-up over Megatron-1F1B"


def run(
    model: str = "deepseek_moe", seq: int = 8192, *, times: int = 1, created: str = "2026-01-01T00:00:00", **more: Any
) -> Any:
    """A whole run in the paper's setting with the rows of the sample."""
    results = sample(**more)
    spec = load_model(model)
    results["model"] |= {key: getattr(spec, key) for key in ("layers", "hidden", "experts", "top_k", "expert_width")}
    results["model"] |= {"name": model, "title": spec.title}
    results["depth"] = {"used": spec.layers, "of": spec.layers}
    results["workload"] |= {"seq": seq, "global_batch": times * 8388608 // seq}
    results["cluster"]["name"] = "h800_128"
    ident = f"{abs(hash((model, seq, times, created, str(more)))):012x}"[:12]
    results["run"] |= {"id": ident, "config_id": ident, "created": created}
    validate(results)
    return results


def stored(results_dir: Path, *runs: Any) -> None:
    for results in runs:
        directory = results_dir / results["run"]["id"]
        directory.mkdir(parents=True)
        (directory / "results.json").write_text(json.dumps(results))


def placed(axis: str, setting: str) -> dict[str, Any]:
    """What a setting says in plain values."""
    if axis == "batch":
        return {"batch": float(setting.rstrip("×"))}
    if axis == "ratio":
        return {"ratio": setting, "nics": "halves"}
    numbers = [
        int(word) for word in setting.replace("=", " ").replace("-", " ").replace(",", "").split() if word.isdigit()
    ]
    names = {"top_k": ("top_k", "ep"), "depth": ("p", "v")}[axis]
    return dict(zip(names, numbers, strict=True))


def point(
    axis: str, setting: str, step: float | None, seq: int = 4096, reference: float = 3.0, **more: Any
) -> dict[str, Any]:
    ran = step is not None
    return {
        "model": "deepseek_moe",
        "axis": axis,
        "setting": setting,
        "at": placed(axis, setting),
        "seq": seq,
        "status": "ok" if ran else "oom",
        "reason": "" if ran else "needs 90.0 GiB",
        "step_s": step,
        "exposed_s": None,
        "bubble_s": None,
        "pool_compute": {"A": 0.6, "F": 0.9} if ran else {},
        "reference_step_s": reference,
        "speedup_over_reference": reference / step if step else None,
        "microbatches": None,
        "gpus_used": 128 if ran else None,
        "needed_gib": 70.0,
        "plan": {"ep": 16} if ran else None,
        **more,
    }


def study(*points: dict[str, Any], calibration: str = "h800", created: str = "2026-01-01") -> dict[str, Any]:
    return {
        "schema": "disagmoe.study/1",
        "run": {"id": "0123456789ab", "config_id": "0123456789ab", "command": "x", "created": created},
        "kind": "claims",
        "models": [{"name": "deepseek_moe", "title": "DeepSeek-MoE", "layers": 28, "of": 28}],
        "axes": [],
        "plans": None,
        "bases": {},
        "cluster": {"name": "h800_128"},
        "workload": {"seq": 8192, "global_batch": 1024},
        "backend": "simulate",
        "calibration": calibration,
        "view": "native",
        "systems": ["megatron_1f1b", "disagmoe"],
        "settings": {},
        "notes": [],
        "points": list(points),
        "crossings": [],
        "paper": [],
    }


RATIOS = study(
    *(point("ratio", "16:16", 2.0), point("ratio", "16:10", 2.5), point("ratio", "8:16", 3.0)),
    *(point("ratio", "16:16", 2.0, 16384), point("ratio", "16:10", 1.9, 16384), point("ratio", "16:8", None, 16384)),
)


def of(found: list[Entry], claim: str) -> list[Entry]:
    return [entry for entry in found if entry.claim == claim]


def test_runs_count_once_and_only_in_the_papers_setting(tmp_path: Path) -> None:
    newer = run(created="2026-02-01T00:00:00")
    others = (
        run(settings={"skew": 1.5}),
        run(seq=6144, times=1),
        run("qwen3_30b"),
        run("deepseek_moe", 4096) | {"depth": {"used": 20, "of": 28}},
    )
    large = run(times=4, settings={"plans_from": "default_batch"})
    stored(tmp_path, run(), newer, large, *others)
    kept = runs_of_the_paper(tmp_path)
    assert {results["run"]["id"] for results in kept} == {newer["run"]["id"], large["run"]["id"]}


def test_every_claim_is_held_against_every_run() -> None:
    found = entries([run(), run("qwen3", 4096)], [])
    assert len(found) == 2 * len(paper.CLAIMS)
    gain, other = of(found, OVER_MEGATRON)
    # rows of the sample: 16 s for the reference, 10 s for DisagMoE
    assert (gain.model, gain.seq, gain.calibration, gain.times) == ("deepseek_moe", 8192, "h800", 1)
    assert (gain.ours, gain.low, gain.high, gain.verdict) == (pytest.approx(1.6), 1.59, 1.81, "inside")
    assert other.verdict == "inside"
    exposed, none = of(found, "exposed comm removed vs Tutel (DeepSeek-MoE, 8K)")
    assert exposed.ours is not None
    assert (none.verdict, none.ours) == ("not comparable", None)


def test_the_study_answers_what_comparisons_cannot() -> None:
    found = entries([run()], [RATIOS])
    (best,) = of(found, BEST_RATIO)
    assert (best.setting, best.ours, best.verdict, best.seq) == ("16:16", 1.0, "inside", 4096)
    (gain,) = of(found, RATIO_GAIN)
    assert (gain.ours, gain.verdict) == (pytest.approx(3.0 / 1.9), "outside")
    (step,) = of(found, RATIO_STEP)
    assert step.ours == pytest.approx(2.0 / 1.9)
    assert step.verdict == "not comparable"
    assert "32/26 = 1.23×" in step.note
    falls = {(entry.setting, entry.seq): entry for entry in of(found, FALL)}
    assert (falls["8:16", 4096].ours, falls["8:16", 4096].verdict) == (1.0, "inside")
    assert (falls["16:8", 16384].verdict, falls["16:8", 16384].note) == ("not comparable", "oom: needs 90.0 GiB")


@pytest.mark.parametrize(
    ("step", "verdict"),
    [(3.0 / 1.92, "inside"), (3.0 / 1.08, "inside"), (3.0 / 1.93, "outside"), (None, "not comparable")],
)
def test_top_k_points(step: float | None, verdict: str) -> None:
    (entry,) = study_entries(study(point("top_k", "top-8, EP 32", step, 8192)))
    assert (entry.claim, entry.setting, entry.verdict) == (TOP_K, "top-8, EP 32", verdict)


def test_virtual_stages_at_the_papers_expert_parallel_size() -> None:
    """28 layers: v = 28, 14, 10. The fastest with EP 16 is v = 14, the nearest to 16; v = 10 is faster with EP 8."""
    points = [
        point("depth", "p=1, v=28", None, 8192),
        point("depth", "p=2, v=14", 2.0, 8192),
        point("depth", "p=3, v=10", 1.0, 8192, plan={"ep": 8}),
    ]
    entry, above = study_entries(study(*points))
    assert (entry.claim, entry.ours, entry.setting, entry.verdict) == (STAGES, 14.0, "v=14", "inside")
    # v = 28 is out of memory, as the paper says of what is above 16
    assert (above.claim, above.ours, above.setting, above.verdict) == (ABOVE, 1.0, "v>16", "inside")
    points[2]["plan"] = {"ep": 16}
    entry, _ = study_entries(study(*points))
    assert (entry.ours, entry.verdict) == (10.0, "outside")
    _, above = study_entries(study(point("depth", "p=1, v=28", 3.0, 8192), points[1]))
    assert (above.ours, above.verdict) == (0.0, "outside")
    (entry,) = study_entries(study(points[0]))
    assert (entry.ours, entry.verdict) == (None, "not comparable")


def test_outside_the_papers_setting_nothing_is_judged() -> None:
    """Top-k and stages are stated for 128 H800; the ratio for two groups of GPUs, so any number of H800 will do."""
    points = (point("top_k", "top-2, EP 8", 2.0), point("depth", "p=2, v=14", 2.0), point("ratio", "8:16", 2.9, 8192))
    nodes = {"name": "h800_32", "device": "H800", "groups": [{"count": 4, "gpus": 8, "nics": 8, "nic_gbit": 400.0}]}
    few = list(study_entries(study(*points) | {"cluster": nodes}))
    assert [entry.verdict for entry in few] == ["not comparable", "not comparable", "inside"]
    assert "128 H800; this run has 32 H800" in few[0].note
    assert "28 of 28 layers on 32 GPUs" in few[-1].note
    other = list(study_entries(study(*points) | {"cluster": nodes | {"device": "H100"}}))
    assert {entry.verdict for entry in other} == {"not comparable"}


def test_batches_are_held_against_the_headline_claim() -> None:
    found = list(study_entries(study(point("batch", "4×", 2.0, 8192, 3.4, at={"batch": 4.0}))))
    assert [(e.claim, e.ours, e.times, e.verdict) for e in found] == [(OVER_MEGATRON, 1.7, 4.0, "inside")]
    assert "batch of the published range is not known" in found[0].note


def test_free_nics_are_held_against_no_claim() -> None:
    free = point("ratio", "16:10", 1.0, 16384, at={"ratio": "16:10", "nics": "free"})
    assert list(study_entries(study(free))) == []


def test_studies_of_each_calibration_the_newest(tmp_path: Path) -> None:
    records = [study(), study(created="2027-01-01"), study(calibration="paper-profile"), {**study(), "view": "uniform"}]
    for number, record in enumerate(records):
        (tmp_path / f"claims_{number}").mkdir()
        (tmp_path / f"claims_{number}" / "study.json").write_text(json.dumps(record))
    kept = {record["calibration"]: record["run"]["created"] for record in studies_of_the_paper(tmp_path)}
    assert kept == {"paper-profile": "2026-01-01", "h800": "2027-01-01"}


def test_shares_name_what_binds_and_the_ceiling() -> None:
    found = shares(run())
    assert found is not None
    # sample: disagmoe computes 8.1 s (A) and 7.3 s (F) of 10 s, the reference exposes 6 of 16 s
    assert found.compute == pytest.approx({"A": 0.81, "F": 0.73})
    assert found.binding == "A"
    assert found.gap == pytest.approx(0.08)
    assert found.ceiling == pytest.approx(16 / 10)
    broken = run()
    (own,) = (r for r in broken["rows"] if r["view"] == "native" and r["system"] == "disagmoe")
    own.update(row("disagmoe", None, "oom"), pools=None)
    assert shares(broken) is None
    assert lost(broken) == "disagmoe: oom"
    assert next(explanations([broken])).endswith("disagmoe: oom (why).")


def test_gaps_are_explained_from_their_numbers() -> None:
    low = run()
    for r in low["rows"]:
        if r["view"] == "native" and r["system"] == "megatron_1f1b":
            r.update(step_time_s=12.0, exposed_comm_s=3.0)
    (line,) = explanations([low])
    assert "1.20×, below the range" in line
    assert "megatron_1f1b exposes 25 % of its own step" in line
    assert "hiding all of it would give 1.33× at unchanged compute, less than the range needs" in line
    assert list(explanations([run()])) == []


def test_the_page_its_table_and_its_picture(tmp_path: Path) -> None:
    stored(tmp_path, run(), run("qwen3", 4096), run(times=4, settings={"plans_from": "default_batch"}))
    (tmp_path / "claims_0").mkdir()
    (tmp_path / "claims_0" / "study.json").write_text(json.dumps(RATIOS))
    paths = write_page(tmp_path)
    assert [path.name for path in paths] == ["paper.md", "paper.csv", "paper.png", "paper.svg"]
    text = paths[0].read_text()
    assert "simulated" in text.splitlines()[0]
    assert "the best 3 plans of every system at the default batch are simulated again" in text
    assert "1.60× ✓" in text
    assert "32/26 = 1.23×" in text
    assert "compute more of the step than attention's in 2 of 2 cases (90–90 % against 60–60 %)" in text
    with paths[1].open() as file:
        lines = list(csv.DictReader(file))
    assert {line["verdict"] for line in lines} == {"inside", "outside", "not comparable"}
    assert {line["claim"] for line in lines} == {*(claim.text for claim in paper.CLAIMS), FALL}
    assert not [line for line in lines if line["claim"] == BEST_RATIO and line["verdict"] == "not comparable"]
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_page(tmp_path)] == first


def test_counts_of_the_summary() -> None:
    found = entries([run(), run("qwen3", 4096)], [])
    grid = summary_grid(found)
    (line,) = (cells for cells in grid.cells if cells[0] == OVER_MEGATRON)
    assert line[1:3] == ("1.59–1.81×", "2 of 2")
    assert line[-1] == "1.60×"
    assert page([run()], []).count("## ") >= 4


def test_nothing_to_show_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "make sweep-paper" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 2
