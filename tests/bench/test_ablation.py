"""The switches of `disagmoe_plus` in a study: its cells, what runs in each, and how gains are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import ablation
from bench.ablation import cells, conduct, first_tasks, parts
from bench.config import RunConfig
from bench.points import Answer, Task
from bench.report import ablation as report
from bench.report import study as study_report
from bench.report.ablation_cells import Place, by_cell, places
from bench.report.ablation_tables import mix_grid, near_grid, replay_grid, system_grid, worth_grid
from bench.study import study_from_mapping
from bench.switch_trials import ALL, NONE
from disagmoe.specs import load_model
from disagmoe.systems.disagmoe_plus import SWITCHES
from tests.bench.helpers import config, group
from tests.bench.test_sensitivity import row

AXES = {
    "switch": ["spread_head", "hybrid"],
    "switch_seq": [512, 4096],
    "exchange": ["native", "deepep"],
    "totals": ["nccl", "deepep"],
    "calibrations": ["laptop", "h800"],
}
MORE = {"batch": [4], "batch_seq": [4096], "replay": ["hidden"]}


def study(**axes: Any) -> RunConfig:
    mapping = {"kind": "plus_ablation", "plans": 8, "axes": {**AXES, **axes}}
    return config(transport="uniform", systems="disagmoe,tutel,dualpipe_v", study=mapping)


def test_cells_are_models_by_lengths_by_exchanges_by_calibrations() -> None:
    found = cells(study())
    assert len(found) == 2 * (2 + 1) * 2
    assert [(c.exchange, c.config.views, c.switches) for c in found[:6:2]] == [
        ("native", ("native",), ("spread_head", "hybrid", ALL)),
        ("deepep", ("uniform",), ("spread_head", "hybrid", ALL)),
        ("nccl", ("uniform",), (ALL,)),
    ]
    assert [c.config.uniform_transport for c in found[2:6:2]] == ["deepep", "nccl"]
    assert {(c.config.calibration, c.config.workload.seq) for c in found} == {
        *((calibration, seq) for calibration in ("laptop", "h800") for seq in (512, 4096))
    }
    assert found[1].config.workload.global_batch == 2048


def test_larger_batches_and_hidden_replay_are_for_one_transport() -> None:
    found = cells(study(**MORE))
    assert len(found) == 2 * (2 * 3 + 1)
    large = [cell for cell in found if cell.times != 1.0]
    assert [(c.exchange, c.times, c.config.workload.seq, c.config.workload.global_batch) for c in large] == [
        ("deepep", 4.0, 4096, 4 * 2048)
    ] * 2
    assert {cell.exchange for cell in found if cell.replay} == {"deepep"}
    asked = first_tasks(study(**MORE), next(cell for cell in found if cell.replay))
    assert [name for name in asked if "replay" in name] == ["dualpipe_v replay"]
    assert asked["dualpipe_v replay"].config.system_options == {"dualpipe_v": {"replay": "hidden"}}


def test_alone_means_all_others_are_off() -> None:
    cell = cells(study())[0]
    asked = first_tasks(study(), cell)
    assert list(asked) == ["megatron_1f1b", "tutel", "dualpipe_v", "disagmoe", "hybrid", ALL]
    options = asked["hybrid"].config.system_options["disagmoe_plus"]
    assert options == {name: "on" if name == "hybrid" else "off" for name in SWITCHES}
    assert asked[ALL].config.system_options == {}
    assert (asked["hybrid"].config.budget, asked[ALL].config.budget) == (8, cell.config.budget)
    assert parts(study()) == 8 * 6 + 4 * 5


STEPS = {"megatron_1f1b": 9.0, "tutel": 6.0, "dualpipe_v": 7.0, "disagmoe": 8.0, "hybrid": 5.5, "all": 5.0}
STEPS |= {"replay=hidden": 5.4}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def answers(tasks: Sequence[Task], *_: Any) -> list[tuple[Answer, ...]]:
        found = []
        for task in tasks:
            what = task.name.removesuffix(" again").split()[-1]
            lost = what == "hybrid" and task.config.workload.seq == 512
            times = 3.8 if task.config.plans_from else 3.9 if "batch 4x" in task.name else 1.0
            step = STEPS[what] * times
            own = row(task.system, None if lost else step, "oom" if lost else "ok")
            numbers = {} if lost else {"bound_ratio": step / 4.0, "bound_by": "NVLink", "exposed_comm_s": 1.0}
            found.append((Answer({**own, **numbers}, ({"n": 3, "nics": "halves"},)),))
        return found

    monkeypatch.setattr(ablation, "answers", answers)
    monkeypatch.setattr(ablation, "of_split", lambda *_: None)
    points = conduct(study(**MORE), lambda name: None)["points"]
    kept = {"backend": "simulate", "cluster": {"name": "laptop"}, "run": {"id": "0"}, "plans": 8}
    return {"kind": "plus_ablation", "points": points, **kept}


def at(record: dict[str, Any], exchange: str, axis: str = "switch", batch: float = 1.0) -> dict[int, dict[str, Any]]:
    found = by_cell(record, Place("laptop", exchange, batch), axis)
    return {seq: dict(cell) for (_, seq), cell in found.items()}


def test_gains_are_over_disagmoe_and_over_the_fastest_baseline(record: dict[str, Any]) -> None:
    found = at(record, "native")
    long = found[4096]
    assert list(long) == [NONE, "spread_head", "hybrid", ALL]
    assert long["hybrid"]["gain_over_disagmoe"] == pytest.approx(8.0 / 5.5)
    assert long[NONE]["gain_over_disagmoe"] == 1.0
    assert (long[ALL]["best_baseline"], long[ALL]["speedup_over_best"]) == ("tutel", pytest.approx(6.0 / 5.0))
    assert long[NONE]["speedup_over_best"] == pytest.approx(6.0 / 8.0)
    short = found[512]["hybrid"]
    assert (short["status"], short["gain_over_disagmoe"], short["speedup_over_best"]) == ("oom", None, None)
    assert (long["spread_head"]["status"], long["spread_head"]["step_s"]) == ("not_applicable", None)


def test_systems_and_bounds_stand_beside(record: dict[str, Any]) -> None:
    systems = at(record, "deepep", "system")[4096]
    assert {name: point["step_s"] for name, point in systems.items()} == {
        name: STEPS[name] for name in ("megatron_1f1b", "tutel", "dualpipe_v")
    }
    bounds = at(record, "deepep", "bound")[4096]
    assert bounds["shared"]["step_s"] <= bounds["separate"]["step_s"] <= bounds["together"]["step_s"] * (1 + 1e-9)
    assert not at(record, "native", "bound")


def test_tables_count_what_is_won_and_say_what_binds(record: dict[str, Any]) -> None:
    won, *rest = report.grids(record)
    assert [line[:5] for line in won.cells[:2]] == [
        ("laptop", "native", "1×", "0 of 2", "2 of 2"),
        ("laptop", "deepep", "1×", "0 of 2", "2 of 2"),
    ]
    assert won.cells[0][5:] == ("1.200×", "1.200×", "1.200×", "0")
    cell = next(grid for grid in rest if grid.title.startswith("Every cell: native")).cells[0]
    assert cell[2:8] == ("tutel", "6", "0.750×", "5", "1.200×", "1.250×")
    assert cell[9].startswith("NVLink binds, exposed 20 %")
    gains = {line[0]: line[1:] for line in next(g for g in rest if g.title.startswith("Gain over")).cells}
    assert gains["hybrid"][:3] == ("1.455×", "oom", "1.455×")  # the median of the one that ran
    assert gains["all"][0] == "1.600×"
    worth = {line[0]: line[1:] for line in worth_grid(record, places(record)[:2], "").cells}
    assert worth["hybrid"] == ("auto", "1.455×", "1.455×", "1.455×", "2 of 4", "2", "0")
    assert worth["spread_head"][4] == "0 of 4"


def test_tables_of_bounds_batches_and_replays(record: dict[str, Any]) -> None:
    place = Place("laptop", "deepep")
    ratios = {line[0]: line[1:] for line in system_grid(record, place).cells}
    assert ratios == {
        "disagmoe": ("2.000×",) * 2,
        "disagmoe_plus": ("1.250×",) * 2,
        "megatron_1f1b": ("2.250×",) * 2,
        "tutel": ("1.500×",) * 2,
        "dualpipe_v": ("1.750×",) * 2,
    }
    (near,) = near_grid(record, place._replace(batch=4.0)).cells
    assert (near[2], near[4], near[6]) == ("1.250×", "4.750×", "5 %")
    assert replay_grid(record, place).cells[1] == ("tiny 4K", "1.200×", "dualpipe_v", "5.4", "1.080×")
    assert [line[0] for line in mix_grid(record, place).cells] == ["tiny 512", "tiny 4K"]


def test_a_report_has_all_tables_and_says_how_hard_was_tried(record: dict[str, Any]) -> None:
    more = {"models": [], "cluster": {"name": "laptop"}, "workload": {"seq": 512, "global_batch": 1}, "view": "uniform"}
    text = study_report.markdown({**record, **more, "calibration": "laptop", "notes": [], "settings": {}})
    assert "searched for with 8 plans per round too" in text
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(titles) == len(set(titles)) == len(list(report.grids(record)))


def test_pictures_of_switches_and_of_margins(record: dict[str, Any], tmp_path: Path) -> None:
    names = sorted(path.name for path in report.write_figures(record, tmp_path) if path.suffix == ".png")
    assert names == [
        f"plus_ablation_{what}_{calibration}.png"
        for what in ("deepep", "margins", "native")
        for calibration in ("h800", "laptop")
    ]
    assert len(report.picture_lines(record)) == 2 * len(names)


def test_the_preset_tries_every_switch_and_every_transport() -> None:
    preset = group("experiment", "plus_ablation")["study"]
    found = study_from_mapping(preset, load_model("deepseek_moe"))
    assert found.settings("switch") == SWITCHES
    assert found.settings("totals") == ("nccl", "deepep", "m2n_rdma")
    assert found.settings("calibrations") == ("h800", "paper-profile")
    assert len(found.models) * len(found.settings("switch_seq")) == 12
    assert found.settings("batch") == (4.0,)


def test_unknown_switches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"study.axes.switch=\['magic'\]: allowed: a list of different any of"):
        study(switch=["magic"])
