"""Logs: strict JSON, no line twice after a resumption, a bar only where there is a terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from disagmoe.runtime.metrics_log import JsonLines, Screen, StepMetrics, expert_load

ONE = StepMetrics(0, 2.0, 1.9, 1.0, 0.5, 0.1, 0.01, 64, 0.5, 128.0, 1.5, 2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "m.jsonl", 0)
    log.write(replace(ONE, loss=float("nan"), grad_norm=float("inf")))
    log.close()
    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert line["loss"] is None and line["grad_norm"] is None and line["cross_entropy"] == 1.9
    assert line["exposed_comm_s"] is None


def test_a_resumed_run_replaces_the_lines_it_runs_again(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    log = JsonLines(file, 0)
    for step in range(5):
        log.write(replace(ONE, step=step))
    log.close()
    file.write_text(file.read_text() + '{"step": 5, "lo')  # killed while writing
    log = JsonLines(file, 3)
    log.write(replace(ONE, step=3))
    log.close()
    assert steps(file) == [0, 1, 2, 3]


def test_lines_where_there_is_no_terminal_and_a_bar_where_there_is() -> None:
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        screen = Screen(0, 6, 3, stream)
        for step in range(6):
            screen.write(replace(ONE, step=step, exposed_comm_s=0.1))
        screen.close()
    assert [line.split("  ")[0] for line in plain.getvalue().splitlines()] == ["step 3/6", "step 6/6"]
    assert "exposed 20 %" in plain.getvalue() and "128 tokens/s" in plain.getvalue()
    assert terminal.getvalue().count("\r") == 6 and terminal.getvalue().endswith("left\n")


def test_expert_load() -> None:
    counts = {0: torch.tensor([4, 4, 4, 4]), 2: torch.tensor([12, 4, 0, 0])}
    assert expert_load(counts) == (3.0, 2)
    assert expert_load({0: torch.zeros(4, dtype=torch.int64)}) == (1.0, 4)
