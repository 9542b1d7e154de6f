"""The tornado chart: order of the bars, ends, lines."""

from __future__ import annotations

from typing import Any

import pytest

from bench.report.style import drawing
from bench.report.tornado import spans, tornado_figure


def record() -> dict[str, Any]:
    def point(axis: str, setting: str, gain: float | None) -> dict[str, Any]:
        twice = None if gain is None else 2 * gain
        return {
            "model": "m",
            "axis": axis,
            "setting": setting,
            "speedup_over_best": gain,
            "speedup_over_reference": twice,
        }

    points = [
        point("base", "", 1.1),
        *(point("skew", "1.5", 1.0), point("skew", "2", 0.9)),
        *(point("merge", "none", 0.6), point("merge", "rank", None), point("merge", "node", 1.1)),
        *(point("head", "last_f", None), point("head", "next_a", None)),
    ]
    return {
        "models": [{"name": "m", "title": "Model"}],
        "points": points,
        "bases": {"skew": "1"},
        "backend": "simulate",
        "cluster": {"name": "h800_128"},
        "calibration": "h800",
        "workload": {"seq": 8192, "global_batch": 1024},
        "view": "native",
        "run": {"id": "0123456789ab"},
    }


def test_bars_by_falling_span_with_the_base_on_numeric_axes() -> None:
    base, bars = spans(record(), "m", "speedup_over_best")
    assert base == 1.1
    assert [bar.title.split(" (")[0] for bar in bars] == ["merged copies", "routing skew", "output head"]
    assert bars[0].width == pytest.approx(0.5)
    assert (bars[0].low, bars[0].high, bars[0].lost) == (("none", 0.6), ("node", 1.1), ("rank",))
    assert (bars[1].low, bars[1].high) == (("2", 0.9), ("1", 1.1))
    assert (bars[2].gains, bars[2].lost, bars[2].width) == ((), ("last_f", "next_a"), 0.0)


def test_another_expert_parallel_size_is_named() -> None:
    made = record()
    for point in made["points"]:
        point["ep"] = 32 if point["setting"] == "node" else 16
    _, bars = spans(made, "m", "speedup_over_best")
    assert bars[0].high == ("node (EP 32)", 1.1)
    assert bars[0].low == ("none", 0.6)


def test_the_picture_says_what_it_shows() -> None:
    with drawing():
        figure = tornado_figure(record())
    assert len(figure.axes) == 2
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert {"none", "node (rank: did not run)", "2", "1", "base 1.10×", "base 2.20×"} <= set(texts)
    assert "last_f, next_a: did not run" in texts
    assert "simulated on h800_128 (calibration h800)" in figure.texts[1].get_text()
    for axes, base in zip(figure.axes, (2.2, 1.1), strict=True):
        lines = {line.get_xdata()[0]: line.get_linestyle() for line in axes.lines if len(set(line.get_xdata())) == 1}
        assert lines[base] == "-"
        assert lines[1.0] != "-"
        low, high = axes.get_xlim()
        assert low < 1.0 < high


def test_settings_that_change_nothing_are_said_to() -> None:
    made = record()
    for point in made["points"]:
        if point["axis"] == "merge":
            point["speedup_over_best"] = 1.1
    with drawing():
        figure = tornado_figure(made)
    said = [text.get_text() for text in figure.axes[1].texts]
    assert "no change" in said
    assert "no change" not in [text.get_text() for text in figure.axes[0].texts]
