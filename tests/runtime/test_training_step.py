"""One training step on several ranks: loss and every gradient equal the single-process model's.

Parameters are scrambled so that no term is zero. In fp64 the differences found are around 1e-15; the bound is the
promised 1e-10. Every rank compares the gradients of all it holds, so replicas are compared too.
"""

from __future__ import annotations

import pytest

from disagmoe.ops import Kind
from tests.model.shapes import FAMILIES
from tests.runtime.conftest import Pools
from tests.runtime.mutations import MUTATIONS, faulty_step
from tests.runtime.training_cases import Case, Outcome, one_step

EXACT = 1e-10

FAMILY_CASES = [Case(family=family, sequences=5, microbatches=3) for family in FAMILIES]
SHAPE_CASES = [
    Case(m=2, sequences=6),
    Case(n=2, layers=3),
    Case(m=3, sequences=7, seq=4),
    Case(n=3, family="deepseek_v3", layers=3),
    Case(m=2, n=2, microbatches=3, sequences=8, family="gpt_oss"),
    Case(p=2, layers=5, microbatches=5, sequences=6),
    Case(p=2, layers=3, family="deepseek", microbatches=6, sequences=6, order="megatron"),
    Case(p=2, layers=1, microbatches=1, sequences=2),
    Case(layers=1, microbatches=1, sequences=1),
    Case(layers=4, microbatches=6, sequences=6, order="megatron", group=2),
    Case(dp=2, sequences=5, layers=2, family="deepseek_v3"),
    Case(dp=2, layers=2, sequences=4, family="tied_all_experts"),
    Case(p=2, layers=3, family="tied_all_experts", sequences=5),
]
HEAD_CASES = [
    Case(head="next_a", layers=3, microbatches=3),
    Case(head="next_a", m=2, n=2, layers=2, sequences=5),
    Case(head="next_a", p=2, layers=3, microbatches=4, family="deepseek"),
    Case(head="next_a", layers=2, family="tied_all_experts"),
    Case(streams=2, layers=3, microbatches=5, sequences=5),
    Case(streams=2, p=2, layers=3, microbatches=6, sequences=6, head="next_a"),
]
SPREAD_CASES = [
    Case(head="spread", p=2, layers=2),
    Case(head="spread", p=2, n=1, layers=3, microbatches=5, sequences=6, order="megatron", family="deepseek"),
    Case(head="spread", layers=2),  # one expert group: a whole head
    Case(head="spread", p=2, layers=3, streams=2, sequences=5, family="gpt_oss"),
]
EXCHANGE_CASES = [
    Case(m=2, n=2, layers=3, merge=merge, transport=transport, node_size=size, sequences=6, family="deepseek")
    for merge, transport, size in (
        ("none", "pairs", None),
        ("none", "union", None),
        ("rank", "union", None),
        ("node", "pairs", 2),
        ("node", "union", 1),
        ("node", "pairs", 4),
    )
]
EDGE_CASES = [
    Case(m=3, sequences=2, microbatches=1),  # one attention rank without a sequence
    Case(n=3, spec=(("experts", 8), ("top_k", 1)), sequences=2, seq=2),  # expert ranks without a token
    Case(n=3, spec=(("experts", 7), ("top_k", 7))),  # every expert, 3 + 2 + 2 of them
    Case(m=2, sequences=3, microbatches=3, seq=3),  # a whole micro-batch on one of two ranks
]
RECOMPUTE_CASES = [
    Case(recompute=(Kind.ATTN,), layers=3, family="deepseek_v3"),
    Case(recompute=(Kind.FFN,), n=2, layers=3, family="gpt_oss"),
    Case(recompute=(Kind.ATTN, Kind.FFN), m=2, n=2, streams=2, layers=2),
]


def check(outcomes: list[Outcome], case: Case, bound: float = EXACT) -> None:
    for rank, found in enumerate(outcomes):
        assert found.loss <= bound, f"rank {rank}: loss differs by {found.loss}"
        assert found.gradient <= bound, f"rank {rank}: gradient of {found.worst} differs by {found.gradient}"
        assert found.counts_equal
        assert found.as_planned
        assert found.names > 0 or case.p > case.layers  # a stage without a layer


def name(case: Case) -> str:
    default = type(case)()
    fields = [f for f in case.__dataclass_fields__ if getattr(case, f) != getattr(default, f)]
    return "-".join(f"{f}={getattr(case, f)}" for f in fields) or "plain"


@pytest.mark.parametrize("case", FAMILY_CASES, ids=name)
def test_every_family_of_models(pools: Pools, case: Case) -> None:
    check(pools(2).run(one_step, case), case)


@pytest.mark.parametrize("case", [*SHAPE_CASES, *HEAD_CASES, *SPREAD_CASES], ids=name)
def test_every_shape_of_ring(pools: Pools, case: Case) -> None:
    check(pools(case.shape.ranks).run(one_step, case), case)


@pytest.mark.parametrize("case", EXCHANGE_CASES, ids=name)
def test_every_way_to_exchange(pools: Pools, case: Case) -> None:
    check(pools(case.shape.ranks).run(one_step, case), case)


@pytest.mark.parametrize("case", EDGE_CASES, ids=name)
def test_ranks_and_experts_without_tokens(pools: Pools, case: Case) -> None:
    check(pools(case.shape.ranks).run(one_step, case), case)


@pytest.mark.parametrize("case", RECOMPUTE_CASES, ids=name)
def test_recomputing_changes_nothing(pools: Pools, case: Case) -> None:
    check(pools(case.shape.ranks).run(one_step, case), case)


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_deliberate_fault_is_noticed(pools: Pools, fault: str) -> None:
    case = MUTATIONS[fault][1]
    outcomes = pools(case.shape.ranks).run(faulty_step, fault)
    with pytest.raises(AssertionError, match=r"(loss|gradient of .*) differs by"):
        check(outcomes, case)
    assert max(max(found.loss, found.gradient) for found in outcomes) > 1e-6
