"""`backend=measure impl=both`: Megatron-Core's row beside ours, with equal losses and a step time of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baselines.native import peers
from bench import at_hand
from bench.cli import main
from disagmoe.specs import fields as read
from tests.baselines.native import needs_megatron

SMALL = ["backend=measure", "model=tiny", "model.layers=2", "seq=16", "repeats=2", "processes=2", "ep=2", "batch=4"]


@pytest.fixture(autouse=True)
def nobody_calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(read, "OWN_CONF", tmp_path / "conf.local")
    monkeypatch.setattr(at_hand, "gpu_names", lambda: ())


@pytest.mark.slow
def test_both_rows_and_loss_parity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs_megatron(module=False)
    arguments = [*SMALL, "impl=both", "systems=[megatron_1f1b,tutel,disagmoe]", "system.tutel.degree=1"]
    assert main([*arguments, f"results_dir={tmp_path}", "artifacts=tables"]) == 0
    (file,) = tmp_path.glob("*_measure_*/results.json")
    record = json.loads(file.read_text())
    rows = {(row["system"], row["implementation"]): row for row in record["rows"]}
    assert set(rows) == {
        *((system, "equivalent") for system in ("megatron_1f1b", "tutel", "disagmoe")),
        ("megatron_1f1b", "native"),
        ("tutel", "native"),
    }
    native, ours = rows["megatron_1f1b", "native"], rows["megatron_1f1b", "equivalent"]
    assert native["status"] == "ok" and native["step_time_s"] > 0.0
    assert native["plan"] == ours["plan"]
    assert native["compute_s"] is None and native["exposed_by_kind_s"] is None and native["maximum"] is None
    assert native["speedup"] == pytest.approx(ours["step_time_s"] / native["step_time_s"])
    losses = {(a["system"], a["implementation"]): a["losses"] for a in record["execution"]["rows"]}
    assert losses["megatron_1f1b", "native"] == pytest.approx(losses["megatron_1f1b", "equivalent"], rel=1e-5)
    if peers.TUTEL.installed is None:
        assert rows["tutel", "native"]["reason"] == peers.TUTEL.missing
    said = " ".join(capsys.readouterr().out.split())
    assert "megatron_1f1b native is Megatron-Core" in said and "losses are ours within" in said


def test_without_the_extra_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "PEERS", tuple(replace(peer, module="no_such_package") for peer in peers.PEERS))
    assert main([*SMALL, "impl=both", "systems=[megatron_1f1b]", f"results_dir={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: Megatron-Core is not installed: pip install -e '.[megatron]'")
    assert not list(tmp_path.glob("tiny*"))
