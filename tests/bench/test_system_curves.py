"""Every system trains the same model: losses, and what is said where they are not equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from baselines.registry import SHIPPED
from bench import system_curves
from bench.curves import Curve
from bench.system_curves import DROPS, differences, main, plans, read_arguments
from disagmoe.specs import load_model


def test_every_system_has_a_plan_on_four_ranks() -> None:
    found = dict(plans(load_model("tiny"), 4))
    names = {label.split(" ")[0] for label in found}
    assert names == set(SHIPPED)
    assert all(plan.layout.placement.gpus_used == 4 for plan in found.values())
    assert found["megatron_1f1b"].layout.options["pp"] == 2


def test_the_largest_difference_is_over_all_pairs_and_leaves_out_what_drops() -> None:
    curves = {
        name: Curve(name, dict(enumerate(losses)))
        for name, losses in (("a", (3.0, 2.0)), ("b", (3.0, 2.5)), ("c", (2.75, 2.0)), (f"d, {DROPS}", (9.0, 9.0)))
    }
    assert differences(curves) == {"a": 0.5, "b": 0.5, "c": 0.5}


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("steps=1", "steps=1: allowed: a whole number of at least 2"),
        ("step=3", "no setting 'step'; settings: steps, ranks, out"),
    ],
)
def test_a_wrong_argument_is_one_line(argument: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_defaults() -> None:
    assert read_arguments([]) == system_curves.Asked(50, 4, Path("results/systems"))


@pytest.mark.slow
def test_all_systems_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps=8", f"out={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "10 curves within" in said
    header, *rows = (tmp_path / "curves.csv").read_text().splitlines()
    names = header.split(",")
    assert names[:3] == ["step", "one process", "megatron_1f1b"] and len(rows) == 8
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    first = rows[0].split(",")
    dropped = next(i for i, name in enumerate(names) if DROPS in name)
    assert first[dropped] != first[1]  # dropping changes the loss
