"""Megatron-Core where routing or batches are uneven: what the committed table says of it still holds."""

from __future__ import annotations

import pytest

from tests.baselines.native import needs_megatron

needs_megatron()

from baselines.native.edges import SCENES, Scene, megatron  # noqa: E402
from bench.edge_cases import cell  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "found"),
    [
        (SCENES[0], "equal; gradient of the idle expert exactly 0; rows 55, 73"),
        (SCENES[1], "equal; rows 128, 0"),
        (SCENES[2], "differs: loss by "),
        (SCENES[3], "fails: RuntimeError: cannot reshape tensor of 0 elements"),
    ],
    ids=lambda value: value.name if isinstance(value, Scene) else "",
)
def test_as_committed(scene: Scene, found: str) -> None:
    assert cell(megatron, scene).startswith(found)
