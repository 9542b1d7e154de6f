"""Training runs: equal to one process over several steps, alike on all replicas, whatever the placement."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from disagmoe.model import ReferenceModel, router
from disagmoe.ops import Kind
from disagmoe.runtime.child import Context
from disagmoe.specs import ModelSpec
from disagmoe.train.plan import RingShape, ring_plan
from tests.model.shapes import BASE, FAMILIES
from tests.runtime.conftest import Pools
from tests.runtime.trainer_cases import RECIPE, SMALL, Ran, Run, same_bits, train, train_single
from tests.runtime.training_cases import rows_of

V3 = replace(FAMILIES["deepseek_v3"], layers=3)
TIED = replace(FAMILIES["tied_all_experts"], layers=3)
RUNS = {
    "plain": Run(),
    "two experts ranks": Run(shape=RingShape(n=2)),
    "replicas": Run(shape=RingShape(dp=2), microbatches=2),
    "stages": Run(shape=RingShape(p=2), streams=2),
    "wide": Run(shape=RingShape(m=2, n=2)),
    "bias moves": Run(model=V3, shape=RingShape(m=2), bias_rate=0.01),
    "no clipping": Run(recipe=replace(RECIPE, clip=0.0)),
    "tied, two ends": Run(model=TIED, shape=RingShape(p=2)),
    "spread head": Run(shape=RingShape(p=2), head="spread"),
    "recompute": Run(shape=RingShape(m=2), recompute=(Kind.ATTN, Kind.FFN)),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_three_steps_equal_one_process_with_torchs_adamw(pools: Pools, run: Run) -> None:
    found = pools(run.shape.ranks).run(train, run)
    losses, norms, values = train_single(run)
    for ran in found:
        assert ran.losses == pytest.approx(losses, abs=1e-9)
        assert [m.grad_norm for m in ran.history] == pytest.approx(norms, abs=1e-9)
        assert all(m.tokens == run.batch * run.seq for m in ran.history)
        for name, value in ran.after.items():
            torch.testing.assert_close(value, rows_of(name, values), rtol=0, atol=1e-9, msg=name)
    assert {name.partition("[")[0] for ran in found for name in ran.after} == set(values)
    same_bits([ran.after for ran in found])


@pytest.mark.parametrize("shape", [RingShape(n=2), RingShape(m=3), RingShape(m=2, n=2), RingShape(dp=2)], ids=str)
def test_replicas_start_alike_and_stay_alike(pools: Pools, shape: RingShape) -> None:
    run = Run(shape=shape, precision="fp32", microbatches=2)
    found = pools(shape.ranks).run(train, run)
    shared = same_bits([ran.before for ran in found])
    assert same_bits([ran.after for ran in found]) == shared != set()
    truth = ReferenceModel(run.model, run.seed, torch.float32).values()
    for ran in found:
        for name, value in ran.before.items():
            assert torch.equal(value, truth[name]), name
    experts = [truth[f"layers.0.experts.{i}.w1"] for i in range(run.model.experts)]
    assert not any(torch.equal(a, b) for i, a in enumerate(experts) for b in experts[:i])


def test_a_tied_matrix_stays_one(pools: Pools) -> None:
    run = Run(model=TIED)
    found = pools(2).run(train, run)
    assert same_bits([ran.after for ran in found]) >= {"embedding.weight"}
    assert "head.weight" not in {name for ran in found for name in ran.after}
    assert not torch.equal(found[0].after["embedding.weight"], found[0].before["embedding.weight"])


def test_idle_experts_change_by_weight_decay_only(pools: Pools) -> None:
    spec = replace(BASE, top_k=1, router_bias=True, experts=4, layers=2)
    run = Run(model=spec, shape=RingShape(n=2), weights=replace(Run().weights, balance=0.0, z=0.0))
    found = pools(3).run(_train_with_one_busy_expert, run)
    kept = math.prod(1 - run.recipe.lr_at(step) * run.recipe.weight_decay for step in range(run.steps))
    for metrics in found[0].history:
        assert math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)
        assert metrics.idle_experts == 2 * 3
        assert metrics.expert_load == 4.0
    for ran in found:
        for name, value in ran.after.items():
            if ".experts." in name and ".experts.0." not in name:
                torch.testing.assert_close(value, ran.before[name] * kept, rtol=0, atol=1e-15, msg=name)


def _train_with_one_busy_expert(context: Context, run: Run) -> Ran:
    trainer = run.trainer(context)
    for name, value in trainer.runner.values().items():
        if name.endswith("router.bias"):
            value.copy_(torch.tensor([100.0, 0.0, 0.0, 0.0]))
    before = {name: value.clone() for name, value in trainer.runner.values().items()}
    history = trainer.run()
    for name, gradient in trainer.runner.gradients().items():
        if ".experts." in name and ".experts.0." not in name:
            assert not gradient.any(), name
    after = {name: value.clone() for name, value in trainer.runner.values().items()}
    trainer.close()
    return Ran(history, before, after)


@pytest.mark.parametrize("kinds", [(Kind.ATTN,), (Kind.ATTN, Kind.FFN)], ids=str)
def test_recompute_keeps_a_noisy_routing(pools: Pools, kinds: tuple[Kind, ...]) -> None:
    """Experts are chosen with noise, seeded alike in both runs: what is recomputed must not draw again."""
    run = Run(shape=RingShape(n=2))
    plain = pools(3).run(_train_with_noisy_choices, run)
    again = pools(3).run(_train_with_noisy_choices, replace(run, recompute=kinds))
    quiet = pools(3).run(train, run)
    assert again[0].losses == pytest.approx(plain[0].losses, abs=1e-12)
    assert [m.grad_norm for m in again[0].history] == pytest.approx([m.grad_norm for m in plain[0].history], abs=1e-12)
    assert abs(plain[0].losses[-1] - quiet[0].losses[-1]) > 1e-9  # the noise did something


def _train_with_noisy_choices(context: Context, run: Run) -> Ran:
    generator = torch.Generator().manual_seed(5)
    whole = router.choose

    def noisy(choice: Tensor, spec: ModelSpec) -> Tensor:
        return whole(choice + torch.rand(choice.shape, generator=generator, dtype=choice.dtype), spec)

    with mock.patch.object(router, "choose", noisy):
        return train(context, run)


def test_starting_up_five_times_never_hangs(pools: Pools) -> None:
    """Every process makes every group, in one order, member or not."""
    shapes = [RingShape(m=2, n=2), RingShape(p=2), RingShape(dp=2), RingShape(m=3), RingShape(n=3)]
    for shape in shapes:
        found = pools(4).run(train, Run(shape=shape, steps=1, microbatches=2), timeout_s=60.0)
        assert math.isfinite(found[0].losses[0])


def test_six_experts_on_four_ranks_are_two_two_one_one(pools: Pools) -> None:
    run = Run(model=replace(SMALL, experts=6), shape=RingShape(n=4), steps=1)
    found = pools(5).run(train, run)
    names = [[x for x in ran.before if x.startswith("layers.0.experts.") and x.endswith(".w1")] for ran in found]
    assert [len(of_rank) for of_rank in names] == [0, 2, 2, 1, 1]
    with pytest.raises(ValueError, match="n=4 expert ranks for the 2 experts of small: each rank needs at least one"):
        ring_plan(replace(SMALL, experts=2), RingShape(n=4), microbatches=1, sequences=1)


@pytest.mark.parametrize("recompute", [(), (Kind.ATTN,)], ids=str)
def test_correction_biases_move_once_per_step_by_global_counts(pools: Pools, recompute: tuple[Kind, ...]) -> None:
    run = Run(model=V3, shape=RingShape(m=2), steps=1, bias_rate=0.001, recompute=recompute)
    found = pools(3).run(train, run)
    single = run.single()
    counts = single.step().report.counts
    for layer in (1, 2):
        name = f"layers.{layer}.router.correction_bias"
        mean = counts[layer].double().mean()
        expected = [0.001 * ((mean > n).int() - (mean < n).int()).item() for n in counts[layer]]
        assert sum(counts[layer].tolist()) == run.batch * run.seq * V3.top_k
        for ran in found[:2]:
            assert (ran.after[name] - ran.before[name]).tolist() == pytest.approx(expected, abs=1e-15)
        assert any(expected)


def test_bf16_trains_with_half_the_bytes_between_ranks(pools: Pools) -> None:
    run = Run(model=replace(SMALL, hidden=16, expert_width=8, head_dim=8), shape=RingShape(n=2), steps=6)
    losses, payload = {}, {}
    for precision in ("fp32", "bf16"):
        found = pools(3).run(_train_and_count, replace(run, precision=precision))
        losses[precision], payload[precision] = found[0][0], sum(of_rank for _, of_rank in found)
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["bf16"] != losses["fp32"]
    assert payload["bf16"] == pytest.approx(payload["fp32"] / 2, rel=0.1)  # a few tokens are routed otherwise


def _train_and_count(context: Context, run: Run) -> tuple[list[float], int]:
    trainer = run.trainer(context)
    history = trainer.run()
    payload = trainer.runner.exchanges.ledger.total().payload
    trainer.close()
    return [metrics.loss for metrics in history], payload
