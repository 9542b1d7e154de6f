"""Comet and Tutel against what others measured of them.

The single-layer log of Comet's artefact (https://github.com/ZSL98/Megatron-LM,
timing_results.csv, written by tests/unit_tests/transformer/moe/test_moe.py) ran on 8
GPUs of one node (H800, to judge by the paper): hidden 4096, experts 14336 wide,
ungated with GELU, forward only, Tutel at degree 1 and capacity factor 1. Its column
`tp` is the tensor-parallel size that Comet ran with (8, so expert parallelism 1);
Tutel has none and runs EP8 in every row.

A rank has only 1024 tokens there, so a large part of each time is host time of the
eager code around the kernels (gate, one-hot and cumulative sums over experts,
autograd functions): it does not grow with the work and is not modelled here, as it
hides behind the GPU at training sizes. That is why ratios of whole times are in
reach only where the work is large, and why the increments are what is tested.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from disagmoe.cost.calibration import load_calibration
from disagmoe.cost.comet import exchange_of, tile_costs, tile_split
from disagmoe.cost.compute import BF16, Compute, Gemm
from disagmoe.cost.copies import distinct_units
from disagmoe.cost.model import CostModel
from disagmoe.cost.network import Copies, Network
from disagmoe.ops import Kind, Phase
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.pricing import Pricing
from disagmoe.simulator import simulate
from disagmoe.specs import Workload, device, load_model
from tests.cost.reference import Row, rows_of
from tests.problems import small_cluster

GPUS, HIDDEN, WIDTH = 8, 4096, 14336
H800 = load_calibration("h800")
COMPUTE = Compute(H800.rates, device("H800"))
NETWORK = Network(H800.rates, 200.0, 1.0)
NIC_GBS = 50.0  # not used inside a node


def moved_s(nbytes: float) -> float:
    return COMPUTE.seconds([COMPUTE.pointwise(nbytes)])


def gemms_s(rows: float, groups: float, width: int) -> tuple[float, float, float]:
    """Up GEMM, GELU and down GEMM of ungated experts on one GPU."""
    up, down = (
        COMPUTE.seconds([COMPUTE.gemm(Gemm(rows, *shape, groups, "grouped"), Phase.F)])
        for shape in ((HIDDEN, width), (width, HIDDEN))
    )
    return up, moved_s(2 * width * BF16 * rows), down


def comet_s(row: Row) -> float:
    """All-gather, tiles, reduce-scatter; with tp = 8 every rank has an eighth of every expert."""
    tokens, experts, top_k = int(row["tokens"]) / GPUS, int(row["experts"]), int(row["top_k"])
    sharded = row["tp"] == str(GPUS)
    rows, groups = tokens * top_k * (GPUS if sharded else 1), experts / (1 if sharded else GPUS)
    back = GPUS - 1.0 if sharded else distinct_units(experts, top_k, GPUS) * (GPUS - 1) / GPUS
    both = (
        NETWORK.exchange(Copies(nic=0.0, nvlink=copies), tokens * HIDDEN * BF16, NIC_GBS)
        for copies in (GPUS - 1.0, back)
    )
    arriving, leaving = (exchange_of(t, NETWORK, NIC_GBS, fan_out=False) for t in both)
    return tile_costs(
        tile_split(GPUS, 1, HIDDEN, gather=True),
        gemms_s(rows, groups, WIDTH // GPUS if sharded else WIDTH),
        moved_s((top_k + 1) * HIDDEN * BF16 * tokens),
        arriving,
        leaving,
        sms=132,
        stretch=H800.contention["nccl"].comm,
    ).seconds


def tutel_s(row: Row) -> float:
    """Encode, exchange, reorder, experts, reorder, exchange, decode, one after the other."""
    tokens, experts, top_k = int(row["tokens"]) / GPUS, int(row["experts"]), int(row["top_k"])
    rows = tokens * top_k
    token_bytes = tokens * HIDDEN * BF16
    exchange = NETWORK.exchange(Copies(nic=0.0, nvlink=top_k * (GPUS - 1) / GPUS), token_bytes, NIC_GBS)
    around = 2 * moved_s((1 + top_k) * token_bytes) + 2 * moved_s(2 * HIDDEN * BF16 * rows)
    return around + 2 * exchange.seconds + sum(gemms_s(rows, experts / GPUS, WIDTH))


def increment(rows: list[Row], seconds: list[float]) -> float:
    """Seconds per further expert of a token, by least squares over top-k."""
    return float(np.polyfit([int(row["top_k"]) for row in rows], seconds, 1)[0])


@pytest.mark.parametrize("experts", [8, 16, 32, 64])
def test_comet_against_tutel_per_expert_of_a_token(experts: int) -> None:
    """What one more expert costs, Tutel over Comet: measured 1.20 to 1.31, within 25 % (in fact 12 %)."""
    rows = [row for row in rows_of("comet_artefact") if row["experts"] == str(experts) and row["tp"]]
    assert [row["top_k"] for row in rows] == ["2", "3", "4", "5"]
    measured = [increment(rows, [float(row[f"{name}_ms"]) for row in rows]) for name in ("tutel", "comet")]
    modelled = [increment(rows, [system(row) for row in rows]) for system in (tutel_s, comet_s)]
    assert modelled[0] / modelled[1] == pytest.approx(measured[0] / measured[1], rel=0.25)


TEN_ROWS = (
    "AE-4096-E8-k2",
    "AE-8192-E8-k2",
    *(f"AE-8192-E{experts}-k{top_k}-tp8" for experts in (8, 16, 32, 64) for top_k in (2, 4)),
)
IN_REACH = {"AE-8192-E8-k4-tp8", "AE-8192-E16-k4-tp8", "AE-8192-E64-k2-tp8", "AE-8192-E64-k4-tp8"}
"""Of these, the ratio of whole times is within 25 %; of the others host time is too large a part."""


@pytest.mark.parametrize("name", TEN_ROWS)
def test_comet_against_tutel_per_layer(name: str) -> None:
    """Ratios of whole layers, measured 1.37 to 2.04; every miss is on the side that host time explains."""
    row = next(row for row in rows_of("comet_artefact") if row["id"] == name)
    measured = float(row["tutel_ms"]) / float(row["comet_ms"])
    modelled = tutel_s(row) / comet_s(row)
    assert 1.0 < modelled < measured
    assert (modelled >= 0.75 * measured) is (name in IN_REACH)
    # Neither is slower than measured, and what is missing of Tutel is more than what is missing of Comet.
    missing = [
        float(row[f"{kind}_ms"]) - 1e3 * seconds for kind, seconds in (("tutel", tutel_s(row)), ("comet", comet_s(row)))
    ]
    assert missing[0] > missing[1] > 0.0


def test_host_time_of_tutel_does_not_shrink_with_the_work() -> None:
    """Half the tokens save Tutel 0.44 of 2.37 ms: the other 1.5 ms are there without any tokens."""
    half, whole = (float(row["tutel_ms"]) for row in rows_of("comet_artefact")[:2])
    assert whole - 2 * (whole - half) == pytest.approx(1.485, abs=0.001)
    saved = tutel_s(rows_of("comet_artefact")[1]) - tutel_s(rows_of("comet_artefact")[0])
    assert 1e3 * saved == pytest.approx(whole - half, rel=0.25)


# Tutel, arXiv 2206.03382, Table 2: GPUs, compute ms, all-to-all ms, whole layer ms, ideal speed-up of overlapping.
TABLE_2 = ((16, 371.8, 189.1, 560.9, 1.51), (64, 375.1, 323.8, 698.9, 1.86), (256, 386.3, 491.3, 866.4, 1.76))


@pytest.mark.parametrize(("gpus", "compute", "exchange", "whole", "ideal"), TABLE_2)
def test_ideal_speed_ups_of_tutels_table(
    gpus: int, compute: float, exchange: float, whole: float, ideal: float
) -> None:
    """Ideal overlap leaves the longer of the two; ever more chunks approach it from above."""
    assert round(whole / max(compute, exchange), 2) == ideal
    times = {}
    for degree in (1, 2, 4, 8, 512):
        built = colocated_program(p=1, v=1, m=1, group=None, stage_layers=[[0]], moe=[True], chunks=degree)
        seconds = np.zeros(len(built))
        forward = built.phase == int(Phase.F)
        seconds[forward & np.isin(built.kind, (Kind.DISPATCH, Kind.COMBINE))] = exchange / 2 / degree
        seconds[forward & (built.kind == int(Kind.FFN))] = compute / degree
        times[degree] = simulate(built, Pricing.ideal(seconds)).step_s
    assert times[1] == pytest.approx(compute + exchange)
    # The whole layer of the 256-GPU row is 1.3 % less than its parts, by the table itself.
    assert times[1] == pytest.approx(whole, rel=0.014)
    assert all(finer <= coarser * (1 + 1e-12) for coarser, finer in pairwise(times.values()))
    assert times[512] == pytest.approx(max(compute, exchange), rel=0.002)
    assert times[512] >= max(compute, exchange) * (1 - 1e-12)


def test_megascale_gains_bracket_operator_level_overlap() -> None:
    """MegaScale-MoE (arXiv 2505.11432): overlap between operators adds 8 %, fused kernels on top of it 5 %.

    The suite has no system with both, so what is compared is one of them alone:
    Comet-style kernels on its layer (hidden 4096, 32 experts of 14336, top-3; SP8
    attention, EP8 in one node, 8192 tokens a sequence) gain more than the 5 % they
    add where operators overlap already, and less than both together (13 %).
    """
    layer = replace(load_model("mixtral_8x7b"), experts=32, top_k=3)
    costs = CostModel(layer, small_cluster(nodes=1), H800, Workload(8192, 8))
    tokens, exposed, hidden = 1024.0, 0.0, 0.0
    gathered = costs.gathered(tokens=tokens, ep=GPUS, nic_gbs=NIC_GBS)
    arriving, leaving = (exchange_of(t, NETWORK, NIC_GBS, fan_out=False) for t in gathered)
    # Unfused, three copies are fewer than the seven of an all-gather.
    copies = Copies(nic=0.0, nvlink=3 * (GPUS - 1) / GPUS)
    all_to_all = NETWORK.exchange(copies, tokens * HIDDEN * BF16, NIC_GBS).seconds
    for phase, fused in ((Phase.F, Phase.F), (Phase.B, Phase.I)):
        attention = costs.attention(0, phase, tokens / 8192)
        experts = costs.ffn(0, phase, home_tokens=tokens, rows=3 * tokens, local_experts=4.0)
        exposed += attention + experts + 2 * all_to_all
        tiles = tile_costs(
            tile_split(GPUS, 1, HIDDEN, gather=True),
            costs.expert_halves(fused, 3 * tokens, 4.0),
            costs.ffn(0, fused, home_tokens=tokens, rows=0.0, local_experts=0.0),
            arriving,
            leaving,
            sms=132,
            stretch=H800.contention["nccl"].comm,
        )
        weights = 0.0
        if phase is Phase.B:
            weights = costs.ffn(0, Phase.W, home_tokens=tokens, rows=3 * tokens, local_experts=4.0)
        second_gemm = sum(tiles.gemms[len(tiles.first) :])
        hidden += attention + max(tiles.seconds, tiles.first_half_s + second_gemm + weights)
    assert 1.28 / 1.22 < exposed / hidden < 1.28 / 1.13
