"""The bar: only on a terminal, only where a run takes longer than two seconds."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench import progress
from bench.progress import Bar


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, seconds: float, enabled: bool = True) -> str:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with Bar(4, enabled=enabled, console=Console(file=out, force_terminal=terminal, width=100)) as bar:
        bar("native: tutel")
        clock[0] += seconds
        bar("native: disagmoe, plan 3 timed")
    return out.getvalue()


def test_a_long_run_shows_which_part_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True, seconds=3.0)
    assert "native: disagmoe, plan 3 timed" in text
    assert "1/4" in text


def test_short_runs_files_and_quiet_calls_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=True, seconds=1.0) == ""
    assert shown(monkeypatch, terminal=False, seconds=9.0) == ""
    assert shown(monkeypatch, terminal=True, seconds=9.0, enabled=False) == ""
