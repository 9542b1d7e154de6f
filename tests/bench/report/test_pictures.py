"""Pictures and files of a run: names, contents of the bars, colours, equal bytes."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.report import file_stem, write
from bench.report.bars import breakdown_figure, speedup_figure, step_parts
from bench.report.gantt import gantt_figure
from bench.report.lanes import Window
from bench.report.style import (
    COMM_COLOURS,
    COMPONENTS,
    PHASE_COLOURS,
    SYSTEM_COLOURS,
    drawing,
    hatches,
    ink_on,
    system_colours,
)
from disagmoe.ops import Phase

from .sample import evaluation, layout, ok_row, pipeline, row_of, sample

TABLES = {"table.md", "table.csv"}
BARS = {"speedup.png", "speedup.svg", "breakdown.png", "breakdown.svg"}
RAN = [f"{view}_{system}" for view in ("native", "uniform") for system in ("megatron_1f1b", "tutel", "disagmoe")]


def test_tables_only(tmp_path: Path) -> None:
    results = sample()
    paths = write(tmp_path, results, evaluation(results), "tables")
    assert {path.name for path in paths} == TABLES == {path.name for path in tmp_path.iterdir()}


def test_all_artifacts_twice_are_equal_byte_for_byte(tmp_path: Path) -> None:
    results, heard = sample(), []
    first, second = tmp_path / "a", tmp_path / "b"
    for directory in (first, second):
        directory.mkdir()
        paths = write(directory, results, evaluation(results), "all", heard.append)
        assert {path.name for path in paths} == {path.name for path in directory.iterdir()}
    names = {path.name for path in first.iterdir()}
    drawn = {f"timeline_{stem}.png" for stem in RAN} | {f"trace_{stem}.json.gz" for stem in RAN}
    assert names == TABLES | BARS | drawn
    for name in sorted(names):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert "table.md" in heard
    for path in first.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert b"tIME" not in path.read_bytes()
    assert b"<dc:date>" not in (first / "speedup.svg").read_bytes()
    trace = json.loads(gzip.decompress((first / f"trace_{RAN[0]}.json.gz").read_bytes()))
    assert trace["traceEvents"]


def test_unknown_artifacts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="artifacts='some': allowed are tables, all"):
        write(tmp_path, sample(), evaluation(sample()), "some")
    assert not list(tmp_path.iterdir())


def test_outcomes_must_match_rows(tmp_path: Path) -> None:
    results = sample()
    outcomes = evaluation(results)
    outcomes.outcomes.pop()
    with pytest.raises(ValueError, match="9 outcomes for 10 rows"):
        write(tmp_path, results, outcomes, "all")
    assert not list(tmp_path.iterdir())


def test_file_names_are_safe() -> None:
    row = ok_row("my/system", "native", (1, 0, 0, 0), variant="deep ep", implementation="native")
    assert file_stem(row) == "native_my-system-deep-ep-native"
    assert file_stem(ok_row("tutel", "uniform", (1, 0, 0, 0))) == "uniform_tutel"


def test_stack_adds_up_to_the_step() -> None:
    parts = step_parts(row_of(sample(), "disagmoe"))
    assert parts is not None
    assert parts == pytest.approx({"compute": 7.7 - 5.3, "overlapped": 5.3, "exposed": 0.5, "bubble": 1.8})
    assert sum(parts.values()) == pytest.approx(10.0)
    assert list(parts) == [key for key, *_ in COMPONENTS]
    assert step_parts(row_of(sample(), "dualpipe")) is None


def test_speedup_bars_have_the_values_of_the_rows() -> None:
    results = sample()
    with drawing():
        figure = speedup_figure(results)
    native, uniform = figure.axes
    assert [bar.get_width() for bar in native.patches] == pytest.approx([1.0, 16 / 14, 1.6])
    assert [bar.get_width() for bar in uniform.patches] == pytest.approx([1.0, 14.8 / 13.2, 1.48])
    assert native.get_xlim() == uniform.get_xlim()
    words = {text.get_text() for text in native.texts}
    assert {"1.60×", "not applicable", "out of memory: needs 92.3 GiB, has 75.6"} <= words


def test_breakdown_bars_end_at_the_step() -> None:
    with drawing():
        figure = breakdown_figure(sample())
    ends = [bar.get_x() + bar.get_width() for bar in figure.axes[0].patches][3::4]
    assert ends == pytest.approx([16.0, 14.0, 10.0])


@pytest.mark.parametrize("backend", ["simulate", "emulate", "measure"])
def test_every_picture_says_how_and_where(backend: str) -> None:
    results = sample(backend=backend)
    word = {"simulate": "simulated", "emulate": "emulated", "measure": "measured"}[backend]
    with drawing():
        figures = [speedup_figure(results), breakdown_figure(results)]
        figures.append(gantt_figure(results, "toy", "native", pipeline(2, 40), layout(("AF",) * 2).placement))
    for figure in figures:
        text = " ".join(text.get_text() for text in figure.texts)
        assert f"{word} on h800_128 (calibration h800)" in text
        assert "Qwen3-235B-A22B (qwen3) · seq 32,768 · 94 of 94 layers" in text
        assert "activation memory is not yet modelled" in text


def test_gantt_names_its_excerpt_and_what_it_leaves_out() -> None:
    placement = layout(("AF",) * 20).placement
    with drawing():
        part = gantt_figure(sample(), "toy", "native", pipeline(20, 40), placement, Window(0.1, 0.2))
        whole = gantt_figure(sample(), "toy", "native", pipeline(2, 2), layout(("AF",) * 2).placement)
    text = " ".join(text.get_text() for text in part.texts)
    assert "toy, native view, simulated: a step of 5,600 ms and, below, its excerpt 100–200 ms" in text
    assert "16 of 20 workers shown" in text
    assert len(part.axes) == 2
    assert part.axes[0].get_xlim() == pytest.approx((100.0, 200.0))
    assert len(whole.axes) == 1
    assert "the whole step of 28 ms" in " ".join(text.get_text() for text in whole.texts)


def test_pictures_without_any_value() -> None:
    """All rows out of memory is a result, too."""
    results = sample()
    results["rows"] = [row for row in results["rows"] if row["system"] in ("dualpipe", "comet")]
    with drawing():
        assert not speedup_figure(results).axes[0].patches
        assert not breakdown_figure(results).axes[0].patches


def test_outside_systems_get_colours_of_their_own() -> None:
    colours = system_colours(["megatron_1f1b", "mine", "tutel", "yours", "mine"])
    assert list(colours) == ["megatron_1f1b", "mine", "tutel", "yours"]
    assert colours["tutel"] == SYSTEM_COLOURS["tutel"]
    assert len({*colours.values(), *SYSTEM_COLOURS.values()}) == len(SYSTEM_COLOURS) + 2


def test_variants_differ_by_hatch() -> None:
    marks = hatches([("dualpipe", "dualpipe"), ("tutel", "tutel"), ("dualpipe", "dualpipe (deepep)")])
    assert marks["dualpipe", "dualpipe"] == marks["tutel", "tutel"] == ""
    assert marks["dualpipe", "dualpipe (deepep)"] != ""


def test_ink_contrasts_with_its_background() -> None:
    assert ink_on("#000000") == "#FFFFFF"
    assert ink_on("#FFFFFF") == "#111111"
    assert ink_on(PHASE_COLOURS[Phase.F][0]) == "#FFFFFF"
    assert ink_on(PHASE_COLOURS[Phase.F][1]) == "#111111"


# Colours as seen with the common colour-vision deficiencies: Machado, Oliveira and Fernandes,
# "A physiologically-based model for simulation of color vision deficiency" (2009), severity 1.0, on linear RGB.
VISION = {
    "full": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def lab(colour: str, vision: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE L*a*b* (D65) of an sRGB colour as seen."""
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(vision @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = to_xyz @ seen / np.array([0.95047, 1.0, 1.08883])
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


SETS = {
    "systems": list(SYSTEM_COLOURS.values()),
    "components": [colour for _, _, colour, _ in COMPONENTS],
    "communication": list(COMM_COLOURS.values()),
    "phases": [PHASE_COLOURS[phase][0] for phase in (Phase.F, Phase.B, Phase.W, Phase.R)],
}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("name", SETS)
def test_colours_stay_apart(name: str, vision: str) -> None:
    seen = [lab(colour, VISION[vision]) for colour in SETS[name]]
    closest = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))
    assert closest > 12.0  # about 2.3 is just noticeable side by side
