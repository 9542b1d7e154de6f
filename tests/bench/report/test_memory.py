"""Pictures of memory: every component drawn, the lines where they belong, stable bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from baselines.megatron import Megatron1F1B
from bench.report.memory import LOOKS, MAX_POINTS, bars_figure, curves_figure, write_memory
from disagmoe.plan.memory_report import COMPONENTS, MemoryReport, memory_report
from tests.problems import problem


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    pr = problem("deepseek_moe", ep=8, global_batch=512)
    system = Megatron1F1B()
    layout = system.layout(pr, {"pp": 4, "virtual": 2, "micro_batch": 1, "group": 4, "ep": 8})
    return memory_report(layout, system.program(pr, layout), pr.model, pr.workload)


def test_every_component_has_a_look() -> None:
    assert set(LOOKS) == set(COMPONENTS)


def test_bars_add_up_to_the_peaks_and_carry_both_lines(report: MemoryReport) -> None:
    figure = bars_figure(report, subtitle="x", limit_gib=20.0, device_gib=24.0)
    axes = figure.axes[0]
    tops: dict[float, float] = {}
    for bar in axes.patches:
        middle = bar.get_x() + bar.get_width() / 2
        tops[middle] = max(tops.get(middle, 0.0), bar.get_y() + bar.get_height())
    assert [tops[x] for x in sorted(tops)] == pytest.approx(list(report.peaks_gib))
    assert sorted(line.get_ydata()[0] for line in axes.lines) == [20.0, 24.0]
    assert {t.get_text() for t in axes.texts} >= {"device 24", "limit 20", *(f"{p:.1f}" for p in report.peaks_gib)}


def test_curves_show_the_peak_even_where_points_are_left_out(report: MemoryReport) -> None:
    figure = curves_figure(report, subtitle="x", limit_gib=20.0, device_gib=24.0)
    assert len(figure.axes) == len(report.workers)
    assert max(report.levels.first[1:] - report.levels.first[:-1]) > MAX_POINTS  # some worker has points left out
    for w, axes in enumerate(figure.axes):
        top = max(path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths())
        assert top == pytest.approx(report.workers[w].peak_gib)


def test_files_are_the_same_twice(report: MemoryReport, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = (
        write_memory(report, tmp_path / name, "megatron", subtitle="x", limit_gib=20.0, device_gib=24.0)
        for name in ("a", "b")
    )
    assert [p.name for p in first] == ["memory_megatron.png", "memory_megatron.svg", "memory_megatron_over_time.png"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert isinstance(bars_figure(report, subtitle="x", limit_gib=1.0, device_gib=2.0), Figure)
