"""`python -m disagmoe.train`: options, one line per mistake, what a run leaves."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from disagmoe.ops import Kind, Phase
from disagmoe.plan.verify import verify
from disagmoe.specs import load_model
from disagmoe.train.__main__ import main
from disagmoe.train.config import TrainConfig, describe_options, read_config
from disagmoe.train.plan import RingShape, ring_plan

TINY = ["model=tiny", "layers=2", "seq=8", "batch=4", "microbatches=2", "steps=2", "warmup=1"]


def losses(folder: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def test_options_are_read_as_their_types() -> None:
    config = read_config(
        ["seq=8k", "lr=1e-3", "m=2", "layers=3", "min_lr=none", "single=true", "data=text", "path=a=b"]
    )
    assert (config.seq, config.lr, config.m, config.layers, config.min_lr) == (8192, 1e-3, 2, 3, None)
    assert config.single and config.path == "a=b"


def test_a_preset_comes_first_and_options_override_it(tmp_path: Path) -> None:
    assert read_config(["steps=7", "preset=smoke"]).steps == 7
    assert read_config(["preset=smoke"]).steps == 20
    file = tmp_path / "mine.yaml"
    file.write_text("seq: 16\nlr: 0.5\n")
    assert read_config([f"preset={file}"]).seq == 16


def test_every_shipped_preset_makes_sense() -> None:
    for name in ("smoke", "text"):
        config = read_config([f"preset={name}"])
        assert config.batch >= config.microbatches * config.dp


def test_help_lists_every_option() -> None:
    text = describe_options()
    assert all(f"  {option.name}=" in text for option in fields(TrainConfig))
    assert "presets: smoke, text" in text


def test_the_folder_follows_from_what_is_trained_not_from_where() -> None:
    base = read_config(TINY)
    assert read_config([*TINY, "m=2", "p=2"]).folder == base.folder
    assert read_config([*TINY, "lr=0.5"]).folder != base.folder
    assert read_config([*TINY, "seed=1"]).folder != base.folder


MISTAKES = {
    "sqe=8": "unknown key sqe; known: preset, model, layers, seq",
    "seq": "'seq' is not key=value",
    "seq=0": "seq=0: must be a whole number: ",
    "batch=x": "batch=x: must be a whole number",
    "steps=2 steps=3": "steps is given twice: '2' and '3'",
    "model=nope": "unknown model 'nope'",
    "layers=9": "cannot be cut to 9 layers; allowed: 1 to 4",
    "p=0": "p=0: must be at least 1",
    "n=9": "n=9 expert ranks for the 8 experts of tiny: each rank needs at least one",
    "group=9": "AF-Pipe group size 9 with p = 1: allowed are 2 to 4",
    "head=moon": "AF-Pipe head 'moon' is unknown",
    "recompute=all": "recompute='all' is unknown; allowed: none, attention, ffn, both",
    "precision=fp8": "precision 'fp8' is unknown; allowed: fp64, fp32, bf16",
    "batch=3 microbatches=4": "a global batch of 3 sequences cannot be cut into 4 micro-batches (1 replicas x 4)",
    "preset=moon": "preset='moon' is unknown; shipped: smoke, text",
    "data=text": "data=text needs path=<file>",
    "data=text path=/nowhere": "/nowhere: no such file",
    "data=moon": "data='moon' is unknown; allowed: synthetic, text, tokens",
    "peak=Foo": "unknown device 'Foo'",
    "merge=moon": "unknown merge 'moon'",
    "transport=moon": "unknown transport 'moon'",
    "device=moon": "device 'moon' is unknown; allowed: cpu, cuda",
    "device=cuda": "device=cuda, but torch finds no CUDA device here",
    "head=spread p=2 model=tied": "an output matrix tied to the embedding cannot be spread over several workers",
    "lr=-1": "lr=-1.0: must not be negative",
    "single=true precision=bf16": "precision=bf16: the single-process trainer runs fp32 or fp64",
    "single=maybe": "single=maybe: must be true or false",
    "keep=0": "keep=0: must be at least 1",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_status_2(
    mistake: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tied = tmp_path / "tied.yaml"
    tied.write_text(Path(__file__).parents[2].joinpath("conf/model/tiny.yaml").read_text() + "tied: true\n")
    words = [word.replace("model=tied", f"model={tied}") for word in mistake.split()]
    kept = [a for a in TINY if a.partition("=")[0] not in {w.partition("=")[0] for w in words}]
    assert main([*kept, *words]) == 2
    error = capfd.readouterr().err.strip()
    assert error.count("\n") == 0 and error.startswith("error: ")
    assert MISTAKES[mistake] in error
    assert not (tmp_path / "results").exists()


def test_a_run_learns_and_is_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("abcd" * 200)
    arguments = ["model=tiny", "layers=2", "seq=16", "batch=8", "microbatches=2", "warmup=2", "lr=0.01", "balance=0.01"]
    arguments += ["data=text", f"path={text}", "out=run", "log_every=4"]
    assert main([*arguments, "steps=12", "n=2"]) == 0
    out = capfd.readouterr().out
    assert "3 ranks = 1 x 1 x (1 A + 2 F), 8 sequences of 16 tokens in 2 micro-batches, fp32" in out
    assert out.count("step ") == 3 and "step 12/12" in out
    assert main([*arguments, "steps=14", "m=2"]) == 0
    captured = capfd.readouterr()
    assert "resuming run/checkpoints/step-00000012 after 12 steps" in captured.err
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(14))
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert main([*arguments, "steps=14"]) == 0
    assert "nothing to do: run has all 14 steps" in capfd.readouterr().out
    assert main([*arguments, "steps=14", "seed=9"]) == 1
    assert "belongs to another run: " in capfd.readouterr().err


def test_one_process_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "precision=fp64", "out=many", "m=2"]) == 0
    assert main([*TINY, "precision=fp64", "out=one", "single=true"]) == 0
    assert losses("many") == pytest.approx(losses("one"), abs=1e-10)


def test_an_occupied_port_is_nobodys_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine the ranks meet in a file: the usual port may be taken."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # it is occupied already, which serves as well
            listener.bind(("127.0.0.1", 29500))
            listener.listen()
        assert main([*TINY, "out=run"]) == 0


def test_token_files(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", np.arange(200, dtype=np.int32) % 500)
    assert main([*TINY, "data=tokens", "path=ids.npy", "out=a"]) == 0
    np.save("big.npy", np.full(200, 512, dtype=np.int32))
    assert main([*TINY, "data=tokens", "path=big.npy", "out=b"]) == 1
    assert "token ids 512 to 512, the model's vocabulary has 0 to 511" in capfd.readouterr().err


@pytest.mark.parametrize("kinds", [frozenset({Kind.ATTN}), frozenset({Kind.ATTN, Kind.FFN})])
def test_recompute_repeats_every_operation_right_before_its_backward(kinds: frozenset[Kind]) -> None:
    plan = ring_plan(
        load_model("tiny"), RingShape(p=2), microbatches=4, sequences=4, recompute=kinds, compute_streams=2
    )
    verify(plan, recompute=kinds)
    program = plan.program
    again = np.flatnonzero(program.phase == int(Phase.R))
    assert len(again) == len(kinds) * 4 * 4
    for row in again.tolist():
        assert program.op(row + 1) == program.op(row)._replace(phase=Phase.B)
        assert program.stream[row + 1] == program.stream[row]
