"""depth=fitting: the deepest model at which every point of a study fits."""

from __future__ import annotations

from typing import Any

import pytest

import bench.depth
import bench.fitting
from disagmoe.system import Problem, System
from tests.bench.helpers import config

RATIOS = {"ratio": ["1:1", "2:1", "1:2"], "ratio_nics": ["halves"], "ratio_seq": [512, 1024]}


def study(kind: str = "ratio_sweep", axes: dict[str, Any] | None = None, **changes: Any) -> Any:
    mapping = {"kind": kind, "axes": RATIOS if axes is None else axes}
    return config(transport="native", systems="disagmoe", study=mapping, depth="fitting", **changes)


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], int | None]:
    """Layers that fit, by (system, length), 4 where nothing is said; None: cannot run at all."""
    table: dict[tuple[str, int], int | None] = {}

    def fits(system: System, problem: Problem, peak: object) -> bool | None:
        limit = table.get((system.name, problem.workload.seq), 4)
        return None if limit is None else problem.model.layers <= limit

    monkeypatch.setattr(bench.fitting, "fits", fits)
    monkeypatch.setattr(bench.depth.remembered, "__defaults__", (None,))
    return table


def test_the_least_of_all_points_and_of_the_reference(most: dict[tuple[str, int], int | None]) -> None:
    assert study().model.layers == 4  # all of tiny
    most["disagmoe", 1024] = 3
    assert study().model.layers == 3
    most["megatron_1f1b", 512] = 2
    found = study()
    assert (found.model.layers, found.study.models[0].layers, found.full_layers) == (2, 2, 4)


def test_points_that_cannot_run_do_not_count(most: dict[tuple[str, int], int | None]) -> None:
    most["disagmoe", 1024] = None
    assert study().model.layers == 4


def test_nothing_fits_is_one_line(most: dict[tuple[str, int], int | None]) -> None:
    most["disagmoe", 512] = 0
    with pytest.raises(ValueError, match="depth=fitting: not one layer of tiny fits with disagmoe at 512"):
        study()


def test_only_studies_with_points_of_their_own_can_be_fitted() -> None:
    for refused in ({"study": None}, {"study": {"kind": "sensitivity", "axes": {"skew": [2]}}}):
        with pytest.raises(ValueError, match="depth=fitting: allowed for experiments with points of their own"):
            config(transport="native", systems="disagmoe", depth="fitting", **refused)
