"""Peers as an implementation of `backend=measure`: what they refuse, and that they give our losses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baselines.native import measure as native
from baselines.native import peers
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.plan import Batch, Layout, Placement, Plan, Worker
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.launch import spawn
from disagmoe.runtime.measure import Trial, measure
from disagmoe.runtime.optimizer import Recipe
from disagmoe.runtime.step import RunOptions
from disagmoe.specs import load_model
from tests.baselines.native import needs_megatron

SPEC = load_model("tiny")


def trial(
    system: str = "megatron_1f1b", *, pp: int = 1, virtual: int = 1, ep: int = 2, dp: int = 2, microbatches: int = 4,
    degree: int = 1, **options: str | int | float,
) -> Trial:  # fmt: skip
    """A plan with equally many layers per stage on pp * dp ranks, three steps of one sequence per micro-batch."""
    count = pp * virtual
    stages = [[i for i in range(SPEC.layers) if i * count // SPEC.layers == s] for s in range(count)]
    home = tuple(s % pp for s, layers in enumerate(stages) for _ in layers)
    workers = tuple(Worker(f"P{r}", "AF", dp, 1, 1.0) for r in range(pp))
    layout = Layout(
        system,
        "",
        Placement(workers, home, home, embed=0, head=pp - 1),
        Batch(microbatches, 1, dp),
        ep,
        "nccl",
        "none",
        chunks=degree,
        options={
            "pp": pp,
            "virtual": virtual,
            "group": pp,
            "stages": ",".join(str(len(s)) for s in stages),
            "capacity_factor": 0.0,
            **options,
        },
    )
    program = colocated_program(
        p=pp, v=virtual, m=microbatches, group=None, stage_layers=stages, moe=[True] * SPEC.layers, chunks=degree
    )
    cut = Cut(microbatches * dp, 16, 1, microbatches)
    recipe = Recipe(lr=1e-4, warmup=0, steps=3)
    return Trial(Plan(layout, program), SPEC, cut, RunOptions(recipe=recipe), 1, 2)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (trial("comet"), "comet has no native implementation here; impl=both runs it on this suite's executor"),
        (trial(recompute="full"), "the Megatron-Core adapter recomputes nothing"),
        (trial("megatron_1f1b_overlap", ep=1), "EP overlap needs expert parallelism: ep is 1"),
        (trial("megatron_1f1b_overlap", pp=2), "EP overlap with pp=2 needs virtual stages"),
        (trial(pp=2, virtual=2, microbatches=5), "cannot run 5 micro-batches in groups of 2"),
        (replace(trial(), model=load_model("gpt_oss_20b")), "adapter does not cover attention biases"),
    ],
)
def test_what_is_not_run_as_planned(monkeypatch: pytest.MonkeyPatch, asked: Trial, reason: str) -> None:
    monkeypatch.setattr(peers.Peer, "installed", "here")
    assert reason in str(native.refusal(asked, "cpu"))


@pytest.mark.parametrize(
    ("asked", "device", "reason"),
    [
        (trial("tutel", pp=2), "cpu", "pp=2, ep=2 on 4 ranks; system.tutel.pp=1 ep=4 plans what it runs"),
        (trial("tutel", ep=1), "cpu", "pp=1, ep=1 on 2 ranks; system.tutel.pp=1 ep=2 plans what it runs"),
        (trial("tutel", degree=2), "cpu", "Tutel ignores the overlap degree on CPU: degree 2 would be degree 1"),
    ],
)
def test_what_tutel_does_not_run(monkeypatch: pytest.MonkeyPatch, asked: Trial, device: str, reason: str) -> None:
    monkeypatch.setattr(peers.Peer, "installed", "here")
    assert reason in str(native.refusal(asked, device))


def test_the_degree_is_tutels_own_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.Peer, "installed", "here")
    assert native.refusal(trial("tutel", degree=2), "cuda") is None
    monkeypatch.setattr(peers.Peer, "installed", None)
    assert str(native.refusal(trial("tutel"), "cuda")).startswith("Tutel is not installed: ")


@pytest.mark.parametrize("asked", [trial(), trial(pp=2, ep=1, dp=1)], ids=["ep2", "pp2"])
def test_losses_of_a_measured_run_are_ours(asked: Trial) -> None:
    needs_megatron(module=False)
    assert native.refusal(asked, "cpu") is None
    ours, theirs = (spawn(2, run, [asked]) for run in (measure, native.measure))
    for rank in range(2):
        assert theirs[rank].losses == pytest.approx(ours[rank].losses, rel=1e-6)
        assert len(theirs[rank].steps_s) == 3 and min(theirs[rank].steps_s) > 0.0
        assert theirs[rank].peak_memory_gib > 0.0
        assert theirs[rank].dropped == (0, 0, 0)
