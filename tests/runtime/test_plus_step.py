"""Every switch of `disagmoe_plus` executes: loss and all gradients equal the single-process model's."""

from __future__ import annotations

from itertools import product

import pytest

from disagmoe.ops import Kind
from tests.model.shapes import FAMILIES
from tests.runtime.conftest import Pools
from tests.runtime.plus_cases import Switched, SwitchedPipeline, early_and_late
from tests.runtime.test_training_step import check, name
from tests.runtime.training_cases import one_step

AGAIN = (Kind.ATTN, Kind.DISPATCH, Kind.FFN)

RINGS = [
    Switched(put_off=0, layers=3, microbatches=4),
    Switched(put_off=2, p=2, layers=5, microbatches=5, sequences=6, family="deepseek"),
    Switched(put_off=0, streams=2, layers=3, microbatches=5, sequences=5),
    Switched(rows=4, put_off=0, m=2, n=2, layers=3, microbatches=3, sequences=6, family="gpt_oss"),
    Switched(rows=8, put_off=0, p=2, layers=4, head="spread", microbatches=4, order="megatron"),
    Switched(early=True, p=2, layers=3, microbatches=4, family="tied_all_experts"),
    Switched(attn=(0, 1, 1, 0), p=2, layers=4, microbatches=4, family="gpt_oss"),
    Switched(attn=(0, 1, 1, 0, 1), p=2, layers=5, microbatches=4, rows=5, put_off=0, early=True),
    Switched(p_f=2, p=1, m=2, layers=4, microbatches=3, sequences=6, family="deepseek"),
    Switched(p_f=1, p=2, n=2, layers=4, microbatches=4, put_off=1),
    Switched(p_f=3, p=1, layers=3, head="spread", microbatches=3, rows=6, put_off=0, early=True),
    Switched(p_f=2, p=1, m=2, layers=3, head="spread", microbatches=4, sequences=8, put_off=1),
    Switched(shared_nodes=2, m=2, n=2, layers=3, microbatches=3, sequences=6, merge="node", family="deepseek"),
    Switched(shared_nodes=1, p=2, layers=4, microbatches=4, merge="node", head="spread"),
]
PIPELINES = [
    SwitchedPipeline(system="plain", p=2, layers=4, microbatches=4, gpus=2, ep=2, chunks=2, rows=4),
    SwitchedPipeline(system="plain", p=2, v=2, layers=4, microbatches=4, family="deepseek", recompute=AGAIN, rows=6),
    SwitchedPipeline(system="combined", p=2, v=2, layers=5, microbatches=4, rows=8, early=True),
    SwitchedPipeline(system="combined", gpus=2, ep=2, microbatches=3, chunks=2, family="deepseek", rows=4),
    SwitchedPipeline(system="combined", p=2, v=1, layers=4, microbatches=4, recompute=AGAIN, chunks=2),
    SwitchedPipeline(system="dualpipev", p=2, layers=4, microbatches=4, family="gpt_oss", rows=16, early=True),
    SwitchedPipeline(system="dualpipev", p=2, gpus=2, ep=2, layers=4, microbatches=5, chunks=2, sequences=10),
]


@pytest.mark.parametrize("case", RINGS, ids=name)
def test_rings(pools: Pools, case: Switched) -> None:
    check(pools(case.ranks).run(one_step, case), case)


@pytest.mark.parametrize("case", PIPELINES, ids=name)
def test_pipelines(pools: Pools, case: SwitchedPipeline) -> None:
    check(pools(case.ranks).run(one_step, case), case)


TRAINED = [
    Switched(p=2, layers=3, microbatches=4, head="spread"),
    Switched(dp=2, layers=2, sequences=4, family="tied_all_experts"),
    SwitchedPipeline(system="combined", p=2, v=2, gpus=2, ep=2, layers=4, microbatches=4),
]


@pytest.mark.parametrize("case", TRAINED, ids=name)
def test_when_parameters_are_gathered_changes_no_bit(pools: Pools, case: Switched | SwitchedPipeline) -> None:
    assert max(pools(case.ranks).run(early_and_late, case)) == 0.0


def _grid() -> list[Switched]:
    found = []
    for (p, p_f), rows, put_off, head in product(
        ((1, 1), (2, 2), (1, 2), (2, 1), (3, 1)), (0, 3, 12), (-1, 0, 2), ("last_f", "spread")
    ):
        layers = 4 if p < 3 else 5
        found.append(
            Switched(
                p=p,
                p_f=0 if p == p_f else p_f,
                layers=layers,
                microbatches=4,
                sequences=5,
                seq=3,
                rows=rows,
                put_off=put_off,
                head=head,
                early=rows == 3,
                family=list(FAMILIES)[(p + p_f + rows + put_off) % len(FAMILIES)] if head == "last_f" else "qwen3",
            )
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", _grid(), ids=name)
def test_the_grid_of_ring_switches(pools: Pools, case: Switched) -> None:
    check(pools(case.ranks).run(one_step, case), case)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 4, 24])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("recompute", [(), (Kind.ATTN,), (Kind.FFN,), AGAIN])
@pytest.mark.parametrize("system", ["plain", "combined", "dualpipev"])
def test_the_grid_of_pipelines(pools: Pools, system: str, recompute: tuple[Kind, ...], chunks: int, rows: int) -> None:
    case = SwitchedPipeline(
        system=system,
        p=2,
        v=1 if system == "dualpipev" else 2,
        gpus=2,
        ep=2,
        layers=5,
        microbatches=5,
        sequences=10,
        seq=3,
        chunks=chunks,
        recompute=recompute,
        rows=rows,
        early=bool(rows),
    )
    check(pools(case.ranks).run(one_step, case), case)
