"""Finding systems by name."""

from __future__ import annotations

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
