"""`backend=measure`: rows of real steps, failures of ranks, what is said of the prediction."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baselines.registry import SHIPPED
from bench import at_hand, measured
from bench.at_hand import adapt
from bench.cli import main
from bench.config import RunConfig, resolve
from bench.evaluate import Outcome
from bench.implementations import CHOICES as IMPLEMENTATIONS
from bench.implementations import EQUIVALENT
from bench.measured import crew_of, prediction_errors, trial_of
from disagmoe.allocator import Tuned
from disagmoe.runtime.child import Context
from disagmoe.runtime.measure import RankReport, Trial, measure
from disagmoe.specs import fields as read
from tests.bench.helpers import CHOICES, values
from tests.runtime.colocated_cases import Colocated

SMALL = ["backend=measure", "model=tiny", "model.layers=2", "seq=16", "repeats=2", "processes=2", "ep=2", "batch=4"]


@pytest.fixture(autouse=True)
def nobody_calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(read, "OWN_CONF", tmp_path / "conf.local")
    monkeypatch.setattr(at_hand, "gpu_names", lambda: ())


def rows_of(results: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The one record of a folder, and its rows by system (the first variant counts)."""
    (file,) = results.glob("*_measure_*/results.json")
    record = json.loads(file.read_text())
    return record, {row["system"]: row for row in reversed(record["rows"])}


def test_a_measured_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "systems=[disagmoe,tutel]", f"results_dir={tmp_path}", "artifacts=tables"]) == 0
    record, rows = rows_of(tmp_path)
    assert record["backend"] == "measure" and record["execution"]["backend"] == "gloo"
    assert record["execution"]["ranks"] == 2 and record["execution"]["warm_up"] == 2
    assert {row["status"] for row in record["rows"]} == {"ok"}
    for row in record["rows"]:
        parts = row["compute_s"] + row["exposed_comm_s"] + row["bubble_s"]
        assert row["step_time_s"] == pytest.approx(parts, rel=1e-6)
        assert row["tokens_per_s"] == pytest.approx(4 * 16 / row["step_time_s"])
        assert row["mfu"] is None  # a CPU's peak is no fact
        assert row["repeats"] == 2 and row["spread"] >= 0.0 and row["tokens_dropped"] == 0
        assert 0.01 < row["peak_memory_gib"] < 8.0 and row["wire_bytes_per_gpu"] > 0.0
        assert row["simulated"]["step_time_s"] > 0.0
    told = record["execution"]["rows"]
    first = {account["losses"][0] for account in told}
    assert max(first) - min(first) < 1e-4  # fp32: every system began from the same weights on the same data
    for account, row in zip(told, record["rows"], strict=True):
        assert min(account["steps_s"]) * 0.999 <= row["step_time_s"] <= max(account["steps_s"]) * 1.001
        assert max(account["peak_memory_gib"]) == row["peak_memory_gib"]
    said = capsys.readouterr().out
    assert "measured on 2 processes" in said.replace("\n", " ") and "median |error|" in said
    assert rows["megatron_1f1b"]["speedup"] == 1.0


def killing(context: Context, trial: Trial) -> RankReport:
    """Measures, but for Tutel, one of whose ranks dies."""
    if trial.plan.layout.system == "tutel" and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(context, trial)


def test_a_killed_rank_fails_its_row_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "equivalent", (replace(EQUIVALENT, run=killing),))
    arguments = [*SMALL, "systems=[tutel,dualpipe_v]", "system.tutel.degree=1", f"results_dir={tmp_path}"]
    assert main([*arguments, "artifacts=tables"]) == 1
    _, rows = rows_of(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == {
        "megatron_1f1b": "ok", "tutel": "failed", "dualpipe_v": "ok"
    }  # fmt: skip
    assert rows["tutel"]["reason"] == "RankError: rank 1 of 2 was killed by signal 9 (SIGKILL)"
    assert rows["tutel"]["step_time_s"] is None
    assert "1 row failed" in capsys.readouterr().err


def resolved(**changes: Any) -> RunConfig:
    asked = values(backend="measure", batch=None, micro_batch=None, ep=16, **changes)
    return resolve(*adapt(asked, CHOICES, []))


def test_the_ranks_must_be_those_of_the_cluster() -> None:
    config = resolved()
    assert crew_of(config).size == 4
    with pytest.raises(ValueError, match="processes=2: cluster local has 4 devices"):
        crew_of(replace(config, processes=2))


def test_tokens_dropped_are_tokens_per_step_and_layer() -> None:
    """12 copies dropped in two layers of top-2: 3 tokens of each layer."""
    config = resolved()
    case = Colocated(gpus=4, ep=2, layers=4)
    config = replace(config, model=replace(config.model, layers=2))
    tuned = Tuned("ok", None, {}, case.plan, 1.0, 1.0, ())
    trial = trial_of(config, "cpu", Outcome(case.plan.layout, None, tuned))
    reports = [RankReport((1.0, 1.0, 2.0, 4.0, 3.0), (0.0,) * 5, 0.5, 10.0, (0, 0, 12, 12, 12))] * 4
    row = measured._measures(config, trial, reports, measured.step_times([r.steps_s for r in reports], 2), None)
    assert row["tokens_dropped"] == 3
    assert (row["step_time_s"], row["repeats"], row["spread"]) == (3.0, 3, 1.0)
    assert row["tokens_per_s"] == pytest.approx(16 * 512 / 3.0) and "compute_s" not in row


def test_the_prediction_is_compared_for_rows_that_ran() -> None:
    def row(system: str, variant: str, measured_s: float, predicted_s: float, **more: Any) -> dict[str, Any]:
        return {
            "system": system, "variant": variant, "status": "ok", "implementation": "equivalent",
            "step_time_s": measured_s, "simulated": {"step_time_s": predicted_s}, **more,
        }  # fmt: skip

    rows = [
        row("tutel", "degree 1", 2.0, 3.0), row("comet", "", 4.0, 3.0), row("x", "", 1.0, 1.0, status="failed"),
        row("megatron_1f1b", "", 1.0, 9.0, implementation="native"),
    ]  # fmt: skip
    assert prediction_errors(rows) == {"tutel (degree 1)": 0.5, "comet": -0.25}


@pytest.mark.slow
def test_every_system_is_a_row(tmp_path: Path) -> None:
    arguments = ["backend=measure", "model=tiny", "seq=128", "repeats=1", f"results_dir={tmp_path}"]
    assert main([*arguments, "artifacts=tables"]) == 0
    record, rows = rows_of(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(SHIPPED, "ok")
    missing = [row for row in record["rows"] if row["status"] != "ok"]
    assert [(row["system"], row["variant"], row["status"]) for row in missing] == [("comet", "open", "not_applicable")]
    assert "top-k" in missing[0]["reason"]


@pytest.mark.slow
def test_the_same_command_under_torchrun(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
    arguments = [argument for argument in SMALL if not argument.startswith("processes")]
    command = [sys.executable, "-m", "torch.distributed.run", *address, "-m", "bench", *arguments]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*command, "systems=[disagmoe]", f"results_dir={tmp_path}", "artifacts=tables"],
        capture_output=True, text=True, timeout=240, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record, rows = rows_of(tmp_path)
    assert record["execution"]["ranks"] == 2
    assert rows["disagmoe"]["status"] == rows["megatron_1f1b"]["status"] == "ok"


@pytest.mark.skipif(not __import__("torch").cuda.is_available(), reason="needs CUDA devices: nothing here has one")
def test_on_gpus_over_nccl(tmp_path: Path) -> None:
    assert main(["backend=measure", "model=tiny", "seq=128", f"results_dir={tmp_path}", "artifacts=tables"]) == 0
    record, _ = rows_of(tmp_path)
    assert record["execution"]["backend"] == "nccl"
