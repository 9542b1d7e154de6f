"""The switches of `disagmoe_plus` in a study: its cells, what runs in each, and how gains are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import ablation
from bench.ablation import ALL, NONE, cells, conduct, parts, tasks_at
from bench.config import RunConfig
from bench.points import Answer, Task
from bench.report import ablation as report
from bench.study import study_from_mapping
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


def study(**axes: Any) -> RunConfig:
    mapping = {"kind": "plus_ablation", "axes": {**AXES, **axes}}
    return config(transport="uniform", systems="disagmoe,tutel", study=mapping)


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


def test_alone_means_all_others_are_off() -> None:
    cell = cells(study())[0]
    asked = {task.name.split()[-1]: task for task in tasks_at(study(), cell)}
    assert list(asked) == ["megatron_1f1b", "tutel", "disagmoe", "spread_head", "hybrid", ALL]
    options = asked["hybrid"].config.system_options["disagmoe_plus"]
    assert options == {name: "on" if name == "hybrid" else "off" for name in SWITCHES}
    assert asked[ALL].config.system_options == {}
    assert parts(study()) == 8 * 6 + 4 * 4


STEPS = {"megatron_1f1b": 9.0, "tutel": 6.0, "disagmoe": 8.0, "spread_head": 7.5, "hybrid": 5.5, "all": 5.0}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def answers(tasks: Sequence[Task], *_: Any) -> list[tuple[Answer, ...]]:
        found = []
        for task in tasks:
            what = task.name.split()[-1]
            lost = what == "spread_head" and task.config.workload.seq == 512
            own = row(task.system, None if lost else STEPS[what], "oom" if lost else "ok")
            numbers = {} if lost else {"bound_ratio": STEPS[what] / 4.0, "bound_by": "NVLink"}
            found.append((Answer({**own, **numbers}),))
        return found

    monkeypatch.setattr(ablation, "answers", answers)
    points = conduct(study(), lambda name: None)["points"]
    kept = {"backend": "simulate", "cluster": {"name": "laptop"}, "run": {"id": "0"}}
    return {"kind": "plus_ablation", "points": points, **kept}


def test_gains_are_over_disagmoe_and_over_the_fastest_baseline(record: dict[str, Any]) -> None:
    points = [p for p in record["points"] if p["at"] == {"exchange": "native", "calibration": "laptop"}]
    long = {p["setting"]: p for p in points if p["seq"] == 4096}
    assert list(long) == [NONE, "spread_head", "hybrid", ALL]
    assert long["hybrid"]["gain_over_disagmoe"] == pytest.approx(8.0 / 5.5)
    assert long[NONE]["gain_over_disagmoe"] == 1.0
    assert (long[ALL]["best_baseline"], long[ALL]["speedup_over_best"]) == ("tutel", pytest.approx(6.0 / 5.0))
    assert long[NONE]["speedup_over_best"] == pytest.approx(6.0 / 8.0)
    short = next(p for p in points if p["seq"] == 512 and p["setting"] == "spread_head")
    assert (short["status"], short["gain_over_disagmoe"], short["speedup_over_best"]) == ("oom", None, None)


def test_tables_count_what_is_won_and_say_what_binds(record: dict[str, Any]) -> None:
    won, *rest = report.grids(record)
    assert [line[:4] for line in won.cells[:2]] == [
        ("laptop", "native", "0 of 2", "2 of 2"),
        ("laptop", "deepep", "0 of 2", "2 of 2"),
    ]
    assert won.cells[0][4:] == ("1.200×", "1.200×", "1.200×")
    cell = rest[0].cells[0]
    assert cell[2:8] == ("tutel", "6", "0.750×", "5", "1.200×", "1.250×")
    assert cell[8].startswith("NVLink binds")
    gains = {line[0]: line[1:] for line in rest[1].cells}
    assert gains["spread_head"][:2] == ("1.067×", "oom")  # the median of the one that ran
    assert gains["all"][0] == "1.600×"


def test_one_picture_per_exchange_with_single_switches(record: dict[str, Any], tmp_path: Path) -> None:
    names = sorted(path.name for path in report.write_figures(record, tmp_path) if path.suffix == ".png")
    assert names == [
        f"plus_ablation_{exchange}_{calibration}.png"
        for exchange in ("deepep", "native")
        for calibration in ("h800", "laptop")
    ]
    assert len(report.picture_lines(record)) == 8


def test_the_preset_tries_every_switch_and_every_transport() -> None:
    preset = group("experiment", "plus_ablation")["study"]
    found = study_from_mapping(preset, load_model("deepseek_moe"))
    assert found.settings("switch") == SWITCHES
    assert found.settings("totals") == ("nccl", "deepep", "m2n_rdma")
    assert found.settings("calibrations") == ("h800", "paper-profile")
    assert len(found.models) * len(found.settings("switch_seq")) == 12


def test_unknown_switches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"study.axes.switch=\['magic'\]: allowed: a list of different any of"):
        study(switch=["magic"])
