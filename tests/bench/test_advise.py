"""The advisor: its command line, its screen, what it says binds, and its map."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import advise
from bench.advice import Advice, Split, ViewAdvice, best_of
from bench.advice import advise as answer
from bench.config import RunConfig
from bench.evaluate import cost_model, evaluate, problem_of
from bench.limits import RESOURCES, limits
from bench.region import SYSTEMS, at_point, region, write_csv
from bench.report.advice import WIDTH, print_advice, verdict
from bench.report.roofline import region_figure, roofline_figure
from bench.report.style import save
from disagmoe.allocator import Settings
from disagmoe.system import Variant
from disagmoe.systems import DisagMoE
from tests.bench import helpers

SMOKE = ["experiment=smoke", "systems=[tutel,disagmoe]"]


def on_nodes(nodes: int = 2, nic_gbit: float = 64.0, **changes: Any) -> RunConfig:
    """The tiny model on several small nodes of the laptop kind."""
    cluster = {
        **helpers.group("cluster", "laptop"),
        "groups": [{"count": nodes, "gpus": 4, "nics": 4, "nic_gbit": nic_gbit}],
    }
    return helpers.config(cluster=cluster, **{"systems": ["tutel", "disagmoe"], **changes})


@pytest.fixture(scope="module")
def advice() -> Advice:
    return answer(on_nodes())


def screen(told: Advice, *written: Path) -> list[str]:
    text = io.StringIO()
    print_advice(told, written, text)
    return text.getvalue().splitlines()


@pytest.mark.parametrize(
    ("gain", "expected"),
    [(1.5, "pays"), (1.021, "pays"), (1.01, "a draw"), (0.99, "a draw"), (0.97, "does not pay"), (None, "–")],
)
def test_verdict(gain: float | None, expected: str) -> None:
    assert verdict(gain) == expected


def test_a_list_asks_for_a_map() -> None:
    question = advise.take_apart(["model=tiny", "seq=4k,1k", "nics_per_gpu=[0.5,1]", "solver=highs"])
    assert question.axes == {"seq": (1024.0, 4096.0), "nics_per_gpu": (0.5, 1.0)}
    assert question.overrides == ("model=tiny", "seq=1024")
    assert question.settings == Settings("highs")
    single = advise.take_apart(["seq=4k", "nic_gbit=100"])
    assert single.axes == {"nic_gbit": (100.0,)}
    assert single.overrides == ("seq=4k",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model=nope"], ["model 'nope'", "qwen3"]),
        (["cluster=nope"], ["cluster 'nope'", "h800_128"]),
        (["seq=0"], ["seq=0", "positive"]),
        (["seq=1k,32kk"], ["32kk"]),
        (["seq=1k,1024"], ["distinct"]),
        (["sqe=1k"], ["sqe", "did you mean seq?"]),
        (["nic_gbit=fast,100"], ["nic_gbit=fast,100", "numbers above 0"]),
        (["nics_per_gpu=0,1"], ["numbers above 0"]),
        (["nics_per_gpu=0.3,1"], ["nics_per_gpu=0.3", "8 GPUs", "multiples of 1/8"]),
        (["backend=emulate"], ["backend=emulate", "simulate"]),
        (["solver=glpk"], ["unknown solver 'glpk'", "cbc"]),
        (["-m", "seq=1k"], ["-m", "settings"]),
        (["system.disagmoe.p=0"], ["p=0"]),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert advise.main([*SMOKE, f"results_dir={tmp_path / 'results'}", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "results").exists()


def test_a_solver_that_is_missing_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert advise.main([*SMOKE, f"results_dir={tmp_path}", "transport=native", "solver=cbc:/nowhere/cbc"]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "solver cbc:/nowhere/cbc: /nowhere/cbc is not there" in err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert advise.main(["--help"]) == 0
    assert "nics_per_gpu" in capsys.readouterr().out


def test_one_screen_and_two_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMOKE, f"results_dir={tmp_path / 'results'}"]
    assert advise.main(arguments) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert len(lines) <= 40
    assert max(map(len, lines)) <= WIDTH
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert [name.rsplit(".")[-1] for name in names] == ["json", "png"]
    assert all(name.startswith("advise_tiny_512_laptop_") for name in names)
    record = json.loads((tmp_path / "results" / names[0]).read_text(), parse_constant=pytest.fail)
    assert [view["view"] for view in record["views"]] == ["native", "uniform"]
    first = record["views"][0]
    assert first["gain"] == pytest.approx(first["colocated"]["step_time_s"] / first["own"]["step_time_s"])
    assert first["split"]["program"]["status"].startswith("optimal")


def test_without_a_solver_the_answer_is_the_same_and_says_so(monkeypatch: pytest.MonkeyPatch, advice: Advice) -> None:
    from disagmoe.allocator import engines

    monkeypatch.setattr(engines, "pulp_cbc_path", "/nowhere/cbc")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "highspy", None)
    told = answer(on_nodes())
    for mine, usual in zip(told.views, advice.views, strict=True):
        assert mine.split is not None
        assert usual.split is not None
        assert mine.split.found_s == usual.split.found_s
        assert mine.split.seed is not None
        assert mine.split.seed.solver == "exhaustive"
    assert any("exhaustive search instead of a solver" in line for line in screen(told))


def test_gains_are_those_of_the_rows(advice: Advice) -> None:
    evaluation = evaluate(on_nodes())
    for view in advice.views:
        rows = {
            row["system"]: row["step_time_s"]
            for row in evaluation.rows
            if row["view"] == view.view and row["status"] == "ok"
        }
        colocated = min(seconds for name, seconds in rows.items() if name != "disagmoe")
        assert view.gain == pytest.approx(colocated / rows["disagmoe"])
        assert view.speedup == pytest.approx(rows["megatron_1f1b"] / rows["disagmoe"])
        assert best_of(evaluation, view.view)[0]["system"] == "disagmoe"  # type: ignore[index]


def test_the_search_never_ends_worse_than_its_seed_and_the_bound_is_below(advice: Advice) -> None:
    for view in advice.views:
        split = view.split
        assert split is not None
        assert split.seed is not None
        assert split.seed_s is not None
        assert split.found_s is not None
        assert split.seed.bottleneck_s <= split.seed_s
        assert split.found_s <= split.seed_s
        assert split.free is not None
        assert split.free.bottleneck_s <= split.seed.bottleneck_s * (1 + 1e-9)


def test_screen_names_what_was_asked(advice: Advice) -> None:
    lines = screen(advice, Path("results/roof.png"))
    text = "\n".join(lines)
    for word in (
        "even split",
        "program",
        "local search",
        "tuner",
        "binds:",
        "optimal (cbc)",
        "intensity",
        "Î",
        "16:10",
    ):
        assert word in text, word
    assert "results/roof.png" in lines[-1]
    for view in ("native", "uniform"):
        assert view in text


def test_no_plan_says_why_in_the_same_place(advice: Advice) -> None:
    why = "disagmoe: oom, needs 90.0 GiB per GPU at least; 75.6 GiB available"
    split = Split(None, None, None, None, None, 0, None, "memory: the smallest plan needs 90.0 GiB")
    view = ViewAdvice("native", None, advice.views[0].colocated, advice.views[0].reference, why, None, split)
    lines = screen(replace(advice, views=(view,)))
    assert any(why in line for line in lines)
    assert any("program: memory: the smallest plan needs 90.0 GiB" in line for line in lines)
    assert "no disaggregated plan" in lines[0]


def limits_of(config: RunConfig) -> Any:
    evaluation = evaluate(config)
    outcome = next(
        o for row, o in zip(evaluation.rows, evaluation.outcomes, strict=True) if row["system"] == "disagmoe"
    )
    problem = problem_of(config, cost_model(config), Variant("", DisagMoE()), config.views[0])
    assert outcome.tuned is not None
    assert outcome.tuned.plan is not None
    assert outcome.tuned.candidate is not None
    return limits(DisagMoE(), problem, outcome.tuned.candidate, outcome.tuned.plan)


def test_slow_nics_bind_where_they_are_slow_and_attention_where_sequences_are_long() -> None:
    slow = limits_of(on_nodes(nic_gbit=0.02, transport="native", seq=256, batch=64))
    assert slow.binds in ("NIC A", "NIC F")
    assert slow.shares[slow.binds] > 0.5
    long = limits_of(on_nodes(nic_gbit=4000.0, transport="native", seq=16384, batch=16))
    assert long.binds == "compute A"
    assert long.shares["compute A"] > 0.5
    for found in (slow, long):
        assert set(found.shares) == {*RESOURCES, "bubble"}
        assert all(0.0 <= share <= 1.05 for share in found.shares.values())


def test_few_microbatches_leave_filling() -> None:
    one, many = (limits_of(on_nodes(transport="native", batch=batch)).shares["bubble"] for batch in (8, 512))
    assert one > many


def test_a_point_changes_the_cluster_and_keeps_the_rest() -> None:
    config = on_nodes()
    point = at_point(config, {"nics_per_gpu": 0.5, "nic_gbit": 100.0, "seq": 1024.0})
    assert point.cluster.groups[0] == replace(config.cluster.groups[0], nics=2, nic_gbit=100.0)
    assert point.workload.seq == 1024
    assert point.workload.global_batch == config.workload.global_batch  # given, so kept
    assert point.systems == SYSTEMS
    assert point.views == ("native",)
    free = replace(config, workload=replace(config.workload, global_batch=16384))  # the default at 512
    assert at_point(free, {"seq": 1024.0}).workload.global_batch == 8192


@pytest.fixture(scope="module")
def small_region() -> Any:
    return region(on_nodes(transport="native"), {"seq": (128.0, 2048.0), "nic_gbit": (1.0, 4000.0)}, workers=1)


def test_region_holds_the_gain_of_every_point(small_region: Any, tmp_path: Path) -> None:
    (panel,) = small_region.maps
    assert (panel.x_values, panel.y_values) == ((128.0, 2048.0), (1.0, 4000.0))
    config = on_nodes(transport="native")
    own, colocated, _, _ = best_of(evaluate(at_point(config, {"seq": 2048.0, "nic_gbit": 1.0})), "native")
    assert own is not None
    assert colocated is not None
    assert panel.gains[0][1] == pytest.approx(colocated["step_time_s"] / own["step_time_s"])
    write_csv(tmp_path / "region.csv", small_region)
    lines = list(csv.DictReader((tmp_path / "region.csv").open()))
    assert [(line["seq"], line["nic_gbit"]) for line in lines] == [
        ("128.0", "1.0"), ("128.0", "4000.0"), ("2048.0", "1.0"), ("2048.0", "4000.0")
    ]  # fmt: skip
    assert float(lines[2]["gain"]) == panel.gains[0][1]
    losses = sum(float(line["gain"]) < 1.0 for line in lines)
    told = f"disaggregation pays at {4 - losses} of 4 points, does not at {losses}"
    assert small_region.verdict == f"native view: {told}"
    no_plan = (*small_region.lines[:3], {**small_region.lines[3], "gain": None})
    assert "has nothing to compare at 1 (see the table)" in replace(small_region, lines=no_plan).verdict


def test_region_in_other_processes_is_the_same(small_region: Any) -> None:
    axes = {"seq": (128.0, 2048.0), "nic_gbit": (1.0, 4000.0)}
    assert region(on_nodes(transport="native"), axes, workers=2) == small_region


def test_pictures_have_equal_bytes(small_region: Any, advice: Advice, tmp_path: Path) -> None:
    assert advice.roofline is not None
    for name, draw in (
        ("map", lambda: region_figure(small_region)),
        ("roofline", lambda: roofline_figure(advice, advice.roofline)),  # type: ignore[arg-type]
    ):
        for copy in (1, 2):
            save(draw(), tmp_path / f"{name}{copy}.png")
        first = (tmp_path / f"{name}1.png").read_bytes()
        assert first == (tmp_path / f"{name}2.png").read_bytes()
        assert len(first) > 5000


def test_a_row_of_points_and_points_without_a_plan_are_drawn(small_region: Any) -> None:
    (panel,) = small_region.maps
    row = replace(panel, y_values=(1.0,), gains=((0.8, 1.2),), reasons=(("–", "–"),))
    figure = region_figure(replace(small_region, maps=(row,)))
    # Break-even halfway between 0.8 and 1.2.
    (axes,) = figure.axes
    assert [line.get_xdata()[0] for line in axes.lines] == [pytest.approx(0.5)]
    hole = replace(panel, gains=((None, None), (None, 0.9)), reasons=(("OOM", "n/a"), ("failed", "–")))
    texts = [text.get_text() for text in region_figure(replace(small_region, maps=(hole,))).axes[0].texts]
    assert texts == ["OOM", "n/a", "failed", "0.90×"]


def test_map_from_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.region.os.cpu_count", lambda: 1)
    assert advise.main([*SMOKE, f"results_dir={tmp_path}", "transport=native", "seq=128,512"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "native view: disaggregation pays at " in out and " of 2 points, does not at " in out
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".png"]
