"""Exchange against a single process: every shape, merge and transport, forward and backward."""

from itertools import product

import pytest
import torch

from tests.runtime.cases import Case, reference, run_cases

SHAPES = ((1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (2, 2))
MERGES = (("none", 1), ("rank", 1), ("node", 1), ("node", 2), ("node", 4))
TRANSPORTS = ("pairs", "union")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}


def check(pools, world, cases):
    per_rank = pools(world).run(run_cases, cases)
    for i, case in enumerate(cases):
        results = [per_rank[rank][i] for rank in range(world)]
        y, x_grad, weights_grad = reference(case)
        assert_close(case, "y", gathered(results, case.answers.ranks, "y"), y)
        assert_close(case, "x_grad", gathered(results, case.owners, "x_grad"), x_grad)
        if not case.dense:
            assert_close(case, "weights_grad", gathered(results, case.owners, "weights_grad"), weights_grad)
        size = max(1.0, float(y.abs().sum()))
        assert abs(sum(r.identity for r in results)) <= TOLERANCE[case.dtype] * size, case


def gathered(results, ranks, name):
    return torch.cat([getattr(results[rank], name) for rank in ranks])


def assert_close(case, name, found, expected):
    assert found.shape == expected.shape, (case, name)
    if expected.numel():
        error = float((found.double() - expected).abs().max()) / max(1.0, float(expected.abs().max()))
        assert error <= TOLERANCE[case.dtype], (case, name, error)


def test_every_shape_merge_and_transport(pools):
    cases = [
        Case(m, n, merge, transport, node_size)
        for (m, n), (merge, node_size), transport in product(SHAPES, MERGES, TRANSPORTS)
    ]
    check(pools, 4, cases)


def test_colocated(pools):
    cases = [
        Case(m, m, merge, transport, node_size, colocated=True)
        for m, (merge, node_size), transport in product((1, 2, 4), MERGES, TRANSPORTS)
    ]
    check(pools, 4, cases)


def test_dense_layers_and_an_answer_to_the_experts_own_ranks(pools):
    """Blocks of tokens as homes; a combine inside the F-group, as before an output head."""
    cases = [
        Case(m, n, merge, transport, node_size, routing=routing, answer=answer)
        for (m, n), (merge, node_size), transport in product(((2, 2), (1, 3), (3, 1)), MERGES, TRANSPORTS)
        for routing, answer in (("dense", "owners"), ("dense", "holders"), ("random", "holders"))
    ]
    check(pools, 4, cases)


def test_idle_experts_and_sources_without_tokens(pools):
    loads = ((2, (0, 7)), (2, (3, 0)), (2, (0, 0)), (3, (4, 0, 1)))
    routings = (("first", "owners", 1, 4), ("random", "holders", 5, 5), ("dense", "owners", 1, 4))
    cases = [
        Case(m, 4 - m, merge, transport, nodes, False, experts, k, tokens, routing, answer)
        for m, tokens in loads
        for (merge, nodes), transport in product(MERGES, TRANSPORTS)
        for routing, answer, k, experts in routings
    ]
    check(pools, 4, cases)


def test_types(pools):
    """Row types; in bf16 the sums are taken in fp32 and rounded once per hop."""
    cases = [
        Case(2, 2, merge, transport, 2, dtype=dtype, width=16, tokens=(9, 6), experts=8, top_k=3)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for merge, transport in product(("none", "rank", "node"), TRANSPORTS)
    ]
    check(pools, 4, cases)


def test_transports_agree_to_the_bit_and_repeat(pools):
    """Sums have one order, whoever carries the rows."""
    for merge in ("none", "rank", "node"):
        case = Case(2, 2, merge, "pairs", 2, tokens=(40, 30), experts=8, top_k=4, dtype=torch.float32, width=16)
        twin = Case(2, 2, merge, "union", 2, tokens=(40, 30), experts=8, top_k=4, dtype=torch.float32, width=16)
        for first, *others in pools(4).run(run_cases, [case, twin, case]):
            for other in others:
                for name in ("y", "x_grad", "weights_grad"):
                    one, two = getattr(first, name), getattr(other, name)
                    assert (one is None and two is None) or torch.equal(one, two)


@pytest.mark.parametrize("k", [1, 6])
def test_one_expert_or_all_of_them(pools, k):
    check(
        pools,
        4,
        [Case(2, 2, merge, "pairs", 1, experts=6, top_k=k, tokens=(5, 4)) for merge in ("none", "rank", "node")],
    )


@pytest.mark.slow
def test_many_random_cases(pools):
    draw = torch.Generator().manual_seed(1)

    def one_of(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=draw))]

    cases = []
    for seed in range(400):
        m, n = one_of(*SHAPES)
        colocated = one_of(True, False, False)
        merge, node_size = one_of(*MERGES)
        experts = one_of(4, 5, 8, 13)
        routing = one_of("random", "random", "first") if colocated else one_of("random", "first", "dense")
        cases.append(
            Case(
                m, n, merge, one_of(*TRANSPORTS), node_size, colocated=colocated, experts=experts,
                top_k=one_of(1, 2, 3, 4), tokens=tuple(one_of(0, 1, 2, 17, 64) for _ in range(m)), routing=routing,
                answer="owners" if colocated else one_of("owners", "holders"), seed=seed, width=one_of(1, 3, 8),
            )
        )  # fmt: skip
    check(pools, 4, cases)
