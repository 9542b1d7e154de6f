"""Batches that do not divide: every sequence counts once, and what the last micro-batch is charged is said."""

from __future__ import annotations

from typing import Any

import pytest

from bench.evaluate import cost_model, run_system
from tests.bench.helpers import config


def row(name: str, batch: int, **options: Any) -> dict[str, Any]:
    run = config(transport="native", systems=[name], batch=batch, micro_batch=2, system={name: options})
    return next(run_system(run, cost_model(run), name, "native"))[0]


@pytest.mark.parametrize("system", ["megatron_1f1b", "disagmoe"])
@pytest.mark.parametrize("batch", [10, 24])
def test_padding_is_charged_and_said_but_never_counted(system: str, batch: int) -> None:
    found = row(system, batch, **({"pp": 1} if system == "megatron_1f1b" else {"m": 2, "n": 2, "dp": 1}))
    assert found["status"] == "ok", found["reason"]
    ranks = {"megatron_1f1b": 8, "disagmoe": 2}[system]  # of 8 GPUs; of the one attention group
    count = -(-batch // (2 * ranks))
    assert found["microbatches"] == count
    charged = 2 * ranks * count / batch - 1.0
    assert found["plan"].get("charged_padding", 0.0) == pytest.approx(charged)
    assert ("charged_padding" in found["plan"]) == (charged > 0.0)
    assert found["tokens_per_s"] * found["step_time_s"] == pytest.approx(batch * 512)
