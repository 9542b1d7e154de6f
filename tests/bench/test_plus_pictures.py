"""The example behind the pictures: every switch has one, and both of its plans are sound."""

from __future__ import annotations

import pytest

from bench.plus_pictures import EXAMPLES, example, main, timeline_of
from disagmoe.systems.disagmoe_plus import SWITCHES


def test_every_switch_has_an_example() -> None:
    assert set(EXAMPLES) == set(SWITCHES)


@pytest.mark.parametrize("switch", SWITCHES)
def test_before_and_after_differ(switch: str) -> None:
    before, after = (timeline_of(example(), candidate)[1] for candidate in EXAMPLES[switch])
    assert before.step_s > 0.0 and after.step_s > 0.0 and before.step_s != after.step_s


def test_unknown_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["where=here"]) == 2
    assert "allowed is out=<directory>" in capsys.readouterr().err
