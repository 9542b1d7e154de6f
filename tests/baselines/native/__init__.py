"""Where a peer is not installed its tests are skipped with what to install."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import pytest


def needs_megatron() -> None:
    """Skip the module without Megatron-Core; load it once, before ranks are forked, without its warnings."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        pytest.skip("Megatron-Core is not installed: pip install -e '.[megatron]'", allow_module_level=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import baselines.native.megatron.schedule  # noqa: F401
