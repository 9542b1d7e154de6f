"""Checkpoints: bit-equal resumption, another placement, damage, interruption, clear errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from disagmoe.ops import Kind
from disagmoe.runtime.checkpoint import MANIFEST, CheckpointError, check_files
from disagmoe.runtime.child import Context
from disagmoe.runtime.errors import RankError
from disagmoe.train.plan import RingShape
from tests.model.shapes import FAMILIES
from tests.runtime.conftest import Pools
from tests.runtime.trainer_cases import Run, same_bits, train

V3 = replace(FAMILIES["deepseek_v3"], layers=3)  # has a buffer, a dense layer and shared experts
WIDE = RingShape(m=2, n=2)


def run_of(folder: Path, **changes: object) -> Run:
    return replace(Run(model=V3, steps=4, bias_rate=0.01, folder=folder), **changes)  # type: ignore[arg-type]


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_resumed_run_is_bit_equal(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path / "whole", shape=RingShape(n=2))
    whole = pools(3).run(train, run)
    pools(3).run(train, replace(run, folder=tmp_path / "cut", steps=2))
    rest = pools(3).run(train, replace(run, folder=tmp_path / "cut"))
    for before, after in zip(whole, rest, strict=True):
        assert [m.step for m in after.history] == [2, 3]
        assert after.losses == before.losses[2:]
        assert set(before.after) == set(after.after)
    same_bits([r.after for r in (*whole, *rest)])
    lines = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["loss"] for line in lines] == whole[0].losses


@pytest.mark.parametrize("shape", [RingShape(), RingShape(p=2), RingShape(n=3), RingShape(dp=2)], ids=str)
def test_the_placement_may_change(pools: Pools, tmp_path: Path, shape: RingShape) -> None:
    run = run_of(tmp_path / "a", shape=WIDE)
    whole = pools(4).run(train, replace(run, folder=None))
    pools(4).run(train, replace(run, steps=2))
    rest = pools(shape.ranks).run(train, replace(run, shape=shape))
    for ran in rest:
        assert ran.losses == pytest.approx(whole[0].losses[2:], abs=1e-12)
    final = {name: value for ran in whole for name, value in ran.after.items()}
    for ran in rest:
        for name, value in ran.after.items():
            torch.testing.assert_close(value, final[name], rtol=0, atol=1e-12, msg=name)


def test_a_spread_head_may_become_a_whole_one_and_back(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, steps=6)
    spread = replace(run, shape=RingShape(p=2), head="spread")
    whole = pools(2).run(train, replace(run, folder=None))
    pools(4).run(train, replace(spread, steps=2))
    pools(2).run(train, replace(run, steps=4))
    rest = pools(4).run(train, spread)
    assert rest[0].losses == pytest.approx(whole[0].losses[4:], abs=1e-12)


def test_the_newest_valid_one_is_used(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, save_every=1, steps=3)
    whole = pools(2).run(train, run)
    newest = tmp_path / "checkpoints" / "step-00000003"
    data = sorted(newest.glob("__1_*"))[0]
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is damaged"):
        check_files(newest)
    second = tmp_path / "checkpoints" / "step-00000002"
    cut = sorted(second.glob("__0_*"))[0]
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has \d+ bytes, not \d+"):
        check_files(second)
    again = pools(2).run(train, run)
    assert again[0].losses == whole[0].losses[1:]
    assert steps_in(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_what_an_interrupted_save_left_is_ignored_and_removed(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, save_every=1, steps=2)
    pools(2).run(train, run)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000002", folder / ".part-step-00000003")
    (folder / ".part-step-00000003" / MANIFEST).unlink()
    shutil.copytree(folder / "step-00000002", folder / "step-00000009")
    (folder / "step-00000009" / MANIFEST).unlink()
    rest = pools(2).run(train, replace(run, steps=3))
    assert [m.step for m in rest[0].history] == [2]
    assert steps_in(tmp_path) == ["step-00000001", "step-00000002", "step-00000003", "step-00000009"]


def test_only_the_newest_are_kept(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(train, run_of(tmp_path, save_every=1, steps=4, keep=2))
    assert steps_in(tmp_path) == ["step-00000003", "step-00000004"]


def test_resume_none_starts_afresh(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, steps=2)
    first = pools(2).run(train, run)
    again = pools(2).run(train, replace(run, resume="none"))
    assert again[0].losses == first[0].losses


def test_a_checkpoint_of_another_run_is_refused(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, steps=2)
    pools(2).run(train, run)
    for change, reason in (
        ({"seed": 4}, "data is 'synthetic, vocabulary 23, seed 3' there and 'synthetic, vocabulary 23, seed 4' here"),
        ({"model": replace(V3, top_k=2)}, r"model is 'small \(\w+\)' there and 'small \(\w+\)' here"),
        ({"precision": "fp32"}, "precision is 'fp64' there and 'fp32' here"),
    ):
        with pytest.raises(RankError, match=reason):
            pools(2).run(train, replace(run, **change))  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_used_is_named(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RankError, match=r"file/checkpoints: cannot be used for checkpoints: Not a directory"):
        pools(2).run(train, run_of(tmp_path / "file"))


def test_a_full_disk_is_a_clear_error(pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"step-00000001: cannot be written: .*No space left on device.*\(rank 1\)"):
        pools(2).run(_train_on_a_full_disk, run_of(tmp_path, steps=1))
    assert not (tmp_path / "checkpoints" / "step-00000001").exists()


def _train_on_a_full_disk(context: Context, run: Run) -> None:
    import errno

    from torch.distributed.checkpoint import filesystem

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if context.rank == 1:
        filesystem._write_item = full
    train(context, run)


def test_recompute_may_change(pools: Pools, tmp_path: Path) -> None:
    run = run_of(tmp_path, steps=2)
    whole = pools(2).run(train, replace(run, folder=None, steps=4))
    pools(2).run(train, run)
    rest = pools(2).run(train, replace(run, steps=4, recompute=(Kind.ATTN,)))
    assert rest[0].losses == pytest.approx(whole[0].losses[2:], abs=1e-12)


@pytest.mark.parametrize("where", ["step", "save", "publish"])
def test_a_killed_run_goes_on_bit_equal(pools: Pools, tmp_path: Path, where: str) -> None:
    run = run_of(tmp_path, save_every=2, steps=6)
    whole = pools(2).run(train, replace(run, folder=None))
    with pytest.raises(RankError, match=r"rank [01] of 2 was killed by signal 9 \(SIGKILL\)"):
        pools(2).run(_train_and_die, run, where)
    assert steps_in(tmp_path)[-1] == "step-00000002"
    rest = pools(2).run(train, run)
    assert [m.step for m in rest[0].history] == [2, 3, 4, 5]
    assert rest[0].losses == whole[0].losses[2:]
    for before, after in zip(whole, rest, strict=True):
        same_bits([before.after, after.after])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == whole[0].losses


def _train_and_die(context: Context, run: Run, where: str) -> None:
    """Rank 1 dies in the middle of step 3, or in the middle of the second save; or rank 0 before it is published."""
    from disagmoe.runtime import checkpoint, snapshot
    from disagmoe.runtime.expert_ops import ExpertOps

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = run.trainer(context)
    steps = 0
    whole = trainer.runner.step

    def step(*args: object) -> object:
        nonlocal steps
        steps += 1
        if where == "step" and steps == 4 and context.rank == 1:
            ExpertOps.experts = die  # type: ignore[assignment]
        if where == "save" and steps == 4 and context.rank == 1:
            snapshot.ChunkSavePlanner.resolve_data = die  # type: ignore[assignment]
        if where == "publish" and steps == 4 and context.rank == 0:
            checkpoint.Checkpoints._publish = die  # type: ignore[assignment]
        return whole(*args)  # type: ignore[arg-type]

    trainer.runner.step = step  # type: ignore[method-assign, assignment]
    trainer.run()
