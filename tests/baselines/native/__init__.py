"""Where a peer is not installed its tests are skipped with what to install."""

from __future__ import annotations

import warnings

import pytest

from baselines.native.peers import MEGATRON, TUTEL


def needs_megatron(*, module: bool = True) -> None:
    """Skip the module (or the test) without Megatron-Core; load it once, before ranks are forked, without warnings."""
    if MEGATRON.installed is None:
        pytest.skip(MEGATRON.missing, allow_module_level=module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import baselines.native.megatron.schedule  # noqa: F401


def needs_tutel() -> None:
    """Skip the module without Tutel."""
    if TUTEL.installed is None:
        pytest.skip(TUTEL.missing, allow_module_level=True)
