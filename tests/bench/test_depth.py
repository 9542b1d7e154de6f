"""depth=common: the deepest model that every system fits."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench.depth
from bench.depth import SEQUENCES, common_depth
from disagmoe.cost.calibration import load_calibration
from disagmoe.specs import load_cluster, load_model
from disagmoe.system import Problem, System


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], int]:
    """Layers that a system fits at a length (40 where nothing else is said), in place of the real memory model."""
    table: dict[tuple[str, int], int] = {}

    def fits(system: System, problem: Problem, peak: object) -> bool | None:
        most = table.get((system.name, problem.workload.seq), 40)
        return None if most < 0 else problem.model.layers <= most

    monkeypatch.setattr(bench.depth, "fits", fits)
    return table


def depth(cache: Path | None = None) -> int:
    return common_depth(load_model("gpt_oss"), load_cluster("h800_128"), load_calibration("h800"), 16, cache=cache)


def test_the_smallest_of_all_systems_and_lengths(limits: dict[tuple[str, int], int]) -> None:
    assert depth() == 36
    limits["tutel", 32768] = 30
    limits["dualpipe", 4096] = 17
    limits["disagmoe", 16384] = 23
    assert depth() == 17


def test_a_system_that_cannot_run_does_not_count(limits: dict[tuple[str, int], int]) -> None:
    for seq in SEQUENCES:
        limits["dualpipe", seq] = -1
    assert depth() == 36


def test_nothing_fits_is_one_line(limits: dict[tuple[str, int], int]) -> None:
    limits["comet", 32768] = 0
    with pytest.raises(ValueError, match="depth=common: not even one layer of gpt_oss fits h800_128 with comet"):
        depth()


def test_the_answer_is_kept(limits: dict[tuple[str, int], int], tmp_path: Path) -> None:
    limits["tutel", 8192] = 11
    assert depth(tmp_path) == 11
    limits["tutel", 8192] = 12
    assert depth(tmp_path) == 11
    assert depth() == 12
