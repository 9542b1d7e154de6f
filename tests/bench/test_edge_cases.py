"""The table of uneven scenes: its words, and that the committed one still holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from baselines.native.edges import SCENES, Observation, ours
from bench.edge_cases import WORDS, cell, columns, told

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "peer-edge-cases.md"


def committed() -> dict[str, list[str]]:
    """Scene -> cells of the committed table."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")][2:]
    cells = [[part.strip() for part in line.strip("|").split(" | ")] for line in lines]
    return {row[0].partition(":")[0]: row[1:] for row in cells}


def test_observations_in_words() -> None:
    scene = SCENES[0]
    seen = [Observation(1e-7, 1e-7, None, 60, 3), Observation(1e-7, 2e-6, 0.0, 68, 3)]
    assert told(scene, seen) == "equal; gradient of the idle expert exactly 0; rows 60, 68; 3 of 256 choices dropped"
    off = [Observation(1e-3, 0.5, None, 60, 0), Observation(1e-3, 0.5, 1e-4, 68, 0)]
    assert told(scene, off) == "differs: loss by 1.0e-03, gradients by 5.0e-01; idle expert: 1.0e-04; rows 60, 68"


def test_the_committed_table_has_every_scene_and_column() -> None:
    assert list(committed()) == [scene.name for scene in SCENES] == list(WORDS)
    assert all(len(cells) == len(columns()) for cells in committed().values())


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_ours_is_equal_everywhere_as_committed(scene: object) -> None:
    assert isinstance(scene, type(SCENES[0]))
    found = cell(ours, scene)
    assert found.startswith("equal; ")
    assert found == committed()[scene.name][0]
