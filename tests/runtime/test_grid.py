"""The whole grid of steps in fp64, and fp32 where no choice of experts is close."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from unittest import mock

import pytest
import torch
from torch import Tensor

from disagmoe.model import router
from disagmoe.specs import ModelSpec
from tests.runtime.conftest import Pools
from tests.runtime.grid import GROUPS
from tests.runtime.test_training_step import check, name
from tests.runtime.training_cases import Case, one_step, reference_of

MARGIN = 1e-4
SINGLE = [
    Case(precision="fp32", family=family, m=m, n=n, layers=2, sequences=4, seq=4)
    for family in ("qwen3", "mixtral", "gpt_oss", "deepseek", "sinks_mla")
    for m, n in ((1, 1), (2, 1), (1, 2))
]


def test_the_grid_has_every_ratio_at_every_depth_of_ring() -> None:
    rings = {(case.p, case.m, case.n) for case in GROUPS["rings"]}
    assert rings >= {(p, *ratio) for p in (1, 2, 3) for ratio in ((1, 1), (2, 1), (1, 2), (3, 2), (3, 1))}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for cases in GROUPS.values() for case in cases], ids=name)
def test_the_grid(pools: Pools, case: Case) -> None:
    check(pools(case.shape.ranks).run(one_step, case), case)


@pytest.mark.parametrize("case", SINGLE[:3], ids=name)
def test_single_precision(pools: Pools, case: Case) -> None:
    clear = with_clear_choices(case)
    check(pools(case.shape.ranks).run(one_step, clear), clear, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", SINGLE[3:], ids=name)
def test_single_precision_of_all_families(pools: Pools, case: Case) -> None:
    test_single_precision(pools, case)


def with_clear_choices(case: Case) -> Case:
    """The case with the first seed for which no expert is chosen or left by less than MARGIN."""
    return next(found for seed in count() if margin(found := replace(case, seed=seed)) > MARGIN)


def margin(case: Case) -> float:
    """Smallest distance between the last chosen and the first left expert, over all tokens and layers."""
    smallest = [1.0]
    whole = router.choose

    def watched(choice: Tensor, spec: ModelSpec) -> Tensor:
        ordered = choice.sort(dim=-1, descending=True).values
        if spec.top_k < spec.experts:
            smallest.append(float((ordered[:, spec.top_k - 1] - ordered[:, spec.top_k]).min()))
        return whole(choice, spec)

    with mock.patch.object(router, "choose", watched), torch.no_grad():
        reference_of(case).trunk(case.tokens()[:, :-1])
    return min(smallest)
