"""Finding systems by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from baselines import get_system, system_names
from baselines.registry import system_options
from disagmoe.system import System


def test_every_name_makes_a_system_of_that_name() -> None:
    for name in system_names():
        system = get_system(name)
        assert system.name == name
        assert isinstance(system, System)


def test_unknown_names_and_options_say_what_is_known() -> None:
    with pytest.raises(ValueError, match=r"unknown system 'foo': known are megatron_1f1b, .*tutel, .*disagmoe"):
        get_system("foo")
    with pytest.raises(ValueError, match="unknown option 'degre' of system tutel: allowed are degree, algorithm"):
        get_system("tutel", degre=2)
    assert "name" not in system_options("tutel")


def test_options_reach_the_system() -> None:
    assert get_system("tutel", degree=4).degree == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("tutel", {"degree": "two"}, "tutel degree='two': allowed is a positive integer or null"),
        ("tutel", {"degree": 2.0}, "tutel degree=2.0: allowed is a positive integer or null"),
        ("tutel", {"capacity_factor": "1"}, "tutel capacity_factor='1': allowed is a number"),
        ("tutel", {"capacity_factor": float("nan")}, "tutel capacity_factor=nan: allowed is a number"),
        ("tutel", {"algorithm": 3}, "tutel algorithm=3: allowed is a word or null"),
        ("megatron_1f1b", {"pp": True}, "megatron_1f1b pp=True: allowed is a positive integer or null"),
        ("megatron_1f1b", {"virtual": 0}, "megatron_1f1b virtual=0: allowed is a positive integer or null"),
        ("dualpipe", {"p2p_exposed": 1}, "dualpipe p2p_exposed=1: allowed is true or false"),
        ("disagmoe", {"p": [4]}, r"disagmoe p=[4]: allowed is a positive integer or null"),
        ("disagmoe", {"head": None}, "disagmoe head=None: allowed is a word"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(name: str, options: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        get_system(name, **options)


def test_values_of_the_right_kind_pass() -> None:
    for name, options in (
        ("tutel", {"degree": 2, "capacity_factor": 1, "algorithm": "2dh", "pp": None}),
        ("dualpipe", {"p2p_exposed": True}),
        ("disagmoe", {"p": 4, "head": "spread", "order": None}),
    ):
        system = get_system(name, **options)
        assert {key: getattr(system, key) for key in options} == options


def test_options_of_other_types_are_left_to_an_outside_system(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Outside:
        depths: tuple[int, ...] = ()
        share: float | None = None
        name: str = "outside"

    monkeypatch.setattr("baselines.registry.SHIPPED", {"outside": Outside})
    assert get_system("outside", depths=[1, 2], share=None).depths == [1, 2]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="outside share='x': allowed is a number or null"):
        get_system("outside", share="x")
