"""Training runs: equal to one process over several steps, alike on all replicas, whatever the placement."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from disagmoe.model import ReferenceModel
from disagmoe.ops import Kind
from disagmoe.train.plan import RingShape
from tests.model.shapes import BASE, FAMILIES
from tests.runtime.conftest import Pools
from tests.runtime.trainer_cases import RECIPE, Run, same_bits, train, train_single
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


def _train_with_one_busy_expert(context, run):  # type: ignore[no-untyped-def]
    from tests.runtime.trainer_cases import Ran

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
