"""memory.csv: the components of every worker add up to its peak."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.evaluate import Evaluation, Outcome
from bench.memory_table import COLUMNS, write_memory_table
from bench.simulated import Simulated
from disagmoe.allocator import tune
from disagmoe.plan.memory_report import COMPONENTS
from disagmoe.systems import DisagMoE
from tests.problems import problem


def test_one_line_per_worker_whose_parts_add_up(tmp_path: Path) -> None:
    pr = problem("gpt_oss_20b", ep=8, global_batch=64, transport="m2n_rdma", merge="node")
    simulated = Simulated(pr)
    found = tune(DisagMoE(), pr, simulated.step, peak=simulated.peak)
    assert found.plan is not None
    memory = simulated.memory(found.plan)
    rows = [{"view": "native", "system": "disagmoe", "variant": ""}, {"view": "native", "system": "x", "variant": ""}]
    outcomes = [Outcome(found.plan.layout, None, found, memory), Outcome(None, None)]
    write_memory_table(tmp_path / "m.csv", Evaluation(rows, outcomes))
    with (tmp_path / "m.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert [line["worker"] for line in lines] == [w.name for w in found.plan.layout.placement.workers]
    for line in lines:
        parts = sum(float(line[f"{name}_gib"]) for name in COMPONENTS)
        assert parts == pytest.approx(float(line["peak_gib"]), rel=1e-12)
        assert float(line["peak_gib"]) <= pr.cluster.limit_gib
    assert max(float(line["peak_gib"]) for line in lines) == pytest.approx(found.needed_gib, rel=1e-12)
