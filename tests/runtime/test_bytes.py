"""Wire bytes: counted by hand from the expert ids, and against the formulas of the cost model.

Against the formulas every choice of experts occurs once per owner, so that expected
and exact numbers of distinct ranks and nodes are the same.
"""

from dataclasses import replace
from itertools import product
from math import comb
from types import SimpleNamespace

import pytest
import torch

from disagmoe.cost import CostModel
from disagmoe.ops import Phase
from disagmoe.runtime.ledger import WireBytes
from tests.problems import problem
from tests.runtime.cases import Case, Problem, run_cases

HEADER = 104
ROW_METADATA, COPY_METADATA = 8, 12  # fp64 runs: token and flags; expert id and gate weight


def sent(pools, cases):
    """Per case the wire bytes of every rank."""
    per_rank = pools(4).run(run_cases, cases)
    return [[per_rank[rank][i].sent for rank in range(4)] for i in range(len(cases))]


def units(case, unit_of_holder, rows):
    """Distinct units per token (by expert ids), for the tokens `rows`."""
    per_holder = -(-case.experts // len(case.holders))
    ids = Problem.of(case).ids
    assert case.experts % len(case.holders) == 0
    return [{unit_of_holder(case.holders[int(e) // per_holder]) for e in ids[row]} for row in rows]


@pytest.mark.parametrize("transport", ["pairs", "union"])
def test_a_and_f_on_nodes_of_their_own(pools, transport):
    """2:2, A on node 0 and F on node 1: all but the fan-out crosses nodes."""
    cases = [Case(2, 2, merge, transport, 2, tokens=(7, 4), top_k=3) for merge in ("none", "rank", "node")]
    row = 4 * 8
    for case, ranks in zip(cases, sent(pools, cases), strict=True):
        by_rank = [units(case, lambda r: r, case.blocks.range_of(owner)) for owner in case.owners]
        hops, peers = (2, 1) if case.merge == "node" else (1, 2)
        for owner, held in enumerate(by_rank):
            tokens = len(held)
            rows = {"none": tokens * 3, "rank": sum(map(len, held)), "node": tokens}[case.merge]
            metadata = rows * ROW_METADATA + tokens * 3 * COPY_METADATA
            expected = WireBytes(payload_inter=rows * row, metadata_inter=metadata, header_inter=HEADER * peers)
            assert ranks[owner]["dispatch F"] == expected
            # The same rows travel in the backward of the combine; nothing but rows is left to say.
            assert ranks[owner]["combine B"] == replace(expected, metadata_inter=0)
        for holder in case.holders:
            got = [[holder in units_ for units_ in held] for held in by_rank]
            copies = [[e // 3 == holder - 2 for e in ids] for ids in Problem.of(case).ids.tolist()]
            number = sum(map(sum, copies)) if case.merge == "none" else sum(map(sum, got))
            forward, back = ranks[holder]["dispatch F"], ranks[holder]["dispatch B"]
            if hops == 1:
                assert forward == WireBytes(header_inter=HEADER * 2)
                gradients = sum(map(sum, copies)) * 8
                assert back == WireBytes(0, number * row, 0, gradients, 0, HEADER * 2)
                assert ranks[holder]["combine F"] == WireBytes(0, number * row, 0, number * 4, 0, HEADER * 2)
            else:
                # The gateway of owner 0 is holder 2, that of owner 1 holder 3.
                other = 5 - holder
                passed = sum(other in units_ for units_ in by_rank[holder - 2])
                kept = sum(holder in units_ for units_ in by_rank[holder - 2])
                assert (forward.payload_intra, forward.local, forward.payload_inter) == (passed * row, kept * row, 0)
                answered = len(by_rank[holder - 2])
                combine = ranks[holder]["combine F"]
                assert combine.payload_inter == back.payload_inter == answered * row
                assert combine.metadata_inter == answered * 4
                to_other = sum(holder in units_ for units_ in by_rank[other - 2])
                assert combine.payload_intra == back.payload_intra == to_other * row


def cost_model(case):
    """The cost model of a model with this case's experts and width."""
    costs = problem("mixtral_8x7b").costs
    model = replace(costs.model, hidden=case.width, experts=case.experts, top_k=case.top_k)
    return CostModel(model, costs.cluster, costs.calibration, costs.workload)


def every(m, n, merge, node_size, colocated=False):
    tokens = (comb(8, 3),) * m
    return Case(m, n, merge, "pairs", node_size, colocated, 8, 3, tokens, "every", dtype=torch.bfloat16, width=8)


@pytest.mark.parametrize(("merge", "m"), [*product(("none", "rank", "node"), (2,)), ("rank", 1), ("node", 1)])
def test_m2n_equals_the_cost_model_to_the_byte(pools, merge, m):
    case = every(m, 2, merge, 2) if m == 2 else every(1, 2, merge, 1)
    (ranks,) = sent(pools, [case])
    costs, tokens = cost_model(case), comb(8, 3)
    nodes = len({case.nodes(4)[rank] for rank in case.holders})
    senders = SimpleNamespace(gpus=m, nodes=1, nic_gbs=50.0)
    receivers = SimpleNamespace(gpus=2, nodes=nodes, nic_gbs=50.0)
    for combine, phase in product((False, True), (Phase.F, Phase.B)):
        transfer = costs.m2n(
            tokens=tokens, senders=senders, receivers=receivers, copies="experts", transport="deepep", merge=merge,
            phase=phase, combine=combine,
        )  # fmt: skip
        to_experts = combine == (phase is Phase.B)
        name = f"{'combine' if combine else 'dispatch'} {phase.name}"
        counted = [ranks[r][name] for r in (case.owners if to_experts else case.holders)]
        assert sum(c.payload_inter for c in counted) == pytest.approx(transfer.nic_bytes * len(counted), abs=1e-6)
        held = [ranks[r][name] for r in case.holders]
        if merge == "node":
            # The formula's fan-out counts every row a rank receives, its own included. Kept rows are `local`.
            assert sum(c.payload_intra + c.local for c in held) == pytest.approx(transfer.nvlink_bytes * 2, abs=1e-6)


@pytest.mark.parametrize(("merge", "node_size"), [*product(("none", "rank", "node"), (2, 4))])
def test_colocated_equals_the_cost_model_to_the_byte(pools, merge, node_size):
    case = every(4, 4, merge, node_size, colocated=True)
    (ranks,) = sent(pools, [case])
    costs, nodes = cost_model(case), 4 // node_size
    transfer = costs.all_to_all(
        tokens=comb(8, 3),
        ep=4,
        nodes=nodes,
        transport="deepep",
        merge=merge,
        nic_gbs=50.0,
        phase=Phase.F,
        combine=False,
    )
    row_bytes = comb(8, 3) * case.width * 2
    for name in ("dispatch F", "combine F", "dispatch B", "combine B"):
        assert sum(r[name].payload_inter for r in ranks) == pytest.approx(4 * transfer.nic_bytes, abs=1e-6)
        intra = sum(r[name].payload_intra for r in ranks) / 4
        if merge == "node" and nodes > 1:
            # Of the rows that a gateway passes on, it keeps one in node_size.
            assert intra == pytest.approx(transfer.nvlink_bytes * (1 - 1 / node_size), abs=1e-6)
        elif merge == "none":
            assert intra == pytest.approx(transfer.nvlink_bytes, abs=1e-6)
        else:
            on_ranks = costs.distinct(4)
            assert intra == pytest.approx(row_bytes * on_ranks * (4 / nodes - 1) / 4, abs=1e-6)
