"""The communication roofline: who is bound by arithmetic, who by the network, and the split that follows.

Decides the first guess of an attention:expert split from three numbers of a
model (FLOPs of either side and bytes between them) and two of a cluster. As in
the DisagMoE paper (arXiv 2605.11005), with M of W GPUs and M_a of the NICs for
attention,

    T_a = max(C_a / (M P), V / (M_a B))      T_f = max(C_f / (N P), V / (M_f B)),

where P is a GPU's peak FLOP/s and B a NIC's bytes/s in one direction. Links are
full duplex and either side sends what the other receives, so V is the traffic of
one direction. Intensity is FLOPs per byte on the NIC; below the turning point
P / (NIC bytes/s of a GPU) a pool waits for the network. Because V is the same at
both ends, no split of the NICs beats halves in this model, whatever the GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from disagmoe.cost.calibration import MERGES
from disagmoe.cost.copies import distinct_units
from disagmoe.cost.flops import TRAIN_OVER_FORWARD, forward_flops
from disagmoe.specs import ClusterSpec, ModelSpec, device

BF16 = 2
PASSES = 2.0
"""One-way traffic of a training step over that of a forward pass: gradients travel like activations."""


@dataclass(frozen=True)
class Work:
    """One training step of one token over all layers.

    `attention_flops` covers attention and router, `expert_flops` every MLP (not
    the output head), both forward and backward. `wire_bytes` leave the attention
    GPUs in that time; as many come back.
    """

    attention_flops: float
    expert_flops: float
    wire_bytes: float

    @property
    def attention_intensity(self) -> float:
        """FLOPs of the attention side per byte on its NICs."""
        return self.attention_flops / self.wire_bytes

    @property
    def expert_intensity(self) -> float:
        """FLOPs of the expert side per byte on its NICs."""
        return self.expert_flops / self.wire_bytes


def work(model: ModelSpec, seq: int, *, merge: str = "node", ep: int = 16, nodes: int = 2) -> Work:
    """Our own count of a token's Work; experts of a layer lie on `ep` ranks of `nodes` nodes.

    A token crosses once per expert (`none`), per distinct rank (`rank`) or per
    distinct node (`node`); in a dense layer once.
    """
    if merge not in MERGES:
        raise ValueError(f"unknown merge {merge!r}; known: {', '.join(MERGES)}")
    rows = float(model.top_k)
    if merge != "none":
        units = min(model.experts, ep if merge == "rank" else nodes)
        rows = distinct_units(model.experts, model.top_k, units, model.n_group, model.topk_group)
    crossings = model.moe_layers * rows + (model.layers - model.moe_layers)
    flops = forward_flops(model, seq)
    return Work(
        attention_flops=TRAIN_OVER_FORWARD * flops.attention_side,
        expert_flops=TRAIN_OVER_FORWARD * flops.expert_side,
        wire_bytes=PASSES * crossings * model.hidden * BF16,
    )


@dataclass(frozen=True)
class PaperIntensity:
    """The paper's own formula (forward, one direction, copies not merged, no gate matrix, scores not halved)."""

    attention: float
    expert: float


def paper_intensity(model: ModelSpec, seq: int) -> PaperIntensity | None:
    """I_attn = (H (2 + 2/g) + 4 s) / (2 k) and I_ffn = 2 D_e; None for latent attention, which it does not cover."""
    if model.mla is not None:
        return None
    per_kv_head = model.heads / model.kv_heads
    projections = model.hidden * (2.0 + 2.0 / per_kv_head)
    return PaperIntensity(
        attention=(projections + 4.0 * seq) / (2.0 * model.top_k), expert=2.0 * float(model.expert_width)
    )


def turning_point(peak_flops: float, nic_bytes_per_s: float) -> float:
    """FLOPs per byte at which a GPU's arithmetic and its share of NICs take equally long."""
    if not nic_bytes_per_s > 0.0:
        raise ValueError(f"a turning point needs NIC bandwidth above 0 bytes/s, got {nic_bytes_per_s!r}")
    return peak_flops / nic_bytes_per_s


@dataclass(frozen=True)
class Machine:
    """What the formula knows of a cluster: GPUs, NICs, FLOP/s of a GPU, bytes/s of a NIC in one direction."""

    gpus: int
    nics: float
    peak_flops: float
    nic_bytes_per_s: float

    @property
    def turning_point(self) -> float:
        """The turning point where every GPU has its even share of the NICs."""
        return turning_point(self.peak_flops, self.nics * self.nic_bytes_per_s / self.gpus)


def machine(cluster: ClusterSpec) -> Machine:
    """A cluster by its sums; NICs of different speeds count as so many of the mean speed."""
    gbs = sum(nics * gbit / 8.0 for _, nics, gbit in cluster.node_list)
    return Machine(
        gpus=cluster.gpus,
        nics=cluster.nics,
        peak_flops=device(cluster.device).peak_bf16_tflops * 1e12,
        nic_bytes_per_s=gbs * 1e9 / cluster.nics,
    )


@dataclass(frozen=True)
class Split:
    """GPUs and NICs of both pools, and what one token of a step takes in each by the formula.

    `attention_point` and `expert_point` are the turning points of the pools:
    2m / (m + n) and 2n / (m + n) times the even one where each has half of the NICs.
    """

    attention_gpus: int
    expert_gpus: int
    attention_nics: float
    expert_nics: float
    attention_compute_s: float
    expert_compute_s: float
    attention_network_s: float
    expert_network_s: float
    attention_point: float
    expert_point: float

    @property
    def attention_s(self) -> float:
        """T_a."""
        return max(self.attention_compute_s, self.attention_network_s)

    @property
    def expert_s(self) -> float:
        """T_f."""
        return max(self.expert_compute_s, self.expert_network_s)

    @property
    def bottleneck_s(self) -> float:
        return max(self.attention_s, self.expert_s)

    @property
    def binds(self) -> str:
        """What sets the bottleneck; the first of equals."""
        named = (
            ("compute A", self.attention_compute_s),
            ("compute F", self.expert_compute_s),
            ("NIC A", self.attention_network_s),
            ("NIC F", self.expert_network_s),
        )
        return max(named, key=lambda pair: pair[1])[0]


def split(
    need: Work,
    where: Machine,
    attention_gpus: int,
    expert_gpus: int,
    attention_nics: float | None = None,
    expert_nics: float | None = None,
) -> Split:
    """The formula at one split; NICs default to halves. GPUs or NICs may be left out, never exceeded."""
    nics_a = where.nics / 2.0 if attention_nics is None else float(attention_nics)
    nics_f = where.nics - nics_a if expert_nics is None else float(expert_nics)
    if min(attention_gpus, expert_gpus) < 1 or attention_gpus + expert_gpus > where.gpus:
        raise ValueError(
            f"a split of {attention_gpus}:{expert_gpus} GPUs needs at least one each and at most {where.gpus} in all"
        )
    if not (nics_a > 0.0 and nics_f > 0.0 and nics_a + nics_f <= where.nics * (1.0 + 1e-12)):
        raise ValueError(f"{nics_a:g} and {nics_f:g} NICs: both pools need some and the cluster has {where.nics:g}")
    rate_a, rate_f = nics_a * where.nic_bytes_per_s, nics_f * where.nic_bytes_per_s
    return Split(
        attention_gpus=attention_gpus,
        expert_gpus=expert_gpus,
        attention_nics=nics_a,
        expert_nics=nics_f,
        attention_compute_s=need.attention_flops / (attention_gpus * where.peak_flops),
        expert_compute_s=need.expert_flops / (expert_gpus * where.peak_flops),
        attention_network_s=need.wire_bytes / rate_a,
        expert_network_s=need.wire_bytes / rate_f,
        attention_point=turning_point(where.peak_flops, rate_a / attention_gpus),
        expert_point=turning_point(where.peak_flops, rate_f / expert_gpus),
    )


def seed(need: Work, where: Machine) -> Split:
    """The split of all GPUs with the shortest bottleneck, NICs in halves; of equals the most even one.

    Where the network binds at every split many are equal, so the second criterion
    is the shorter compute bottleneck and only the third evenness.
    """
    if where.gpus < 2:
        raise ValueError(f"needs at least 2 GPUs for disaggregation, the cluster has {where.gpus}")
    splits = [split(need, where, m, where.gpus - m) for m in range(1, where.gpus)]

    def order(s: Split) -> tuple[float, float, int]:
        return s.bottleneck_s, max(s.attention_compute_s, s.expert_compute_s), abs(s.attention_gpus - s.expert_gpus)

    return min(splits, key=order)


@dataclass(frozen=True)
class RatioRow:
    """One split at fixed NICs, relative to the first of its table."""

    split: Split
    speedup: float
    """Of the step: bottleneck of the first row over this one's."""
    per_gpu: float
    """The same per GPU that is used."""


def ratio_table(
    need: Work, where: Machine, ratios: Iterable[tuple[int, int]], nics: tuple[float, float]
) -> tuple[RatioRow, ...]:
    """The formula at several GPU counts and fixed NICs (the paper's 16:16, 16:10, ... on NICs 16:16).

    GPUs enter only the compute terms, in their denominators: fewer GPUs on one
    side never shorten the step, so `per_gpu` is at most GPUs of the first row
    over GPUs of this one: 32/26 = 1.23 for 16:10 against 16:16.
    """
    rows = [split(need, where, m, n, *nics) for m, n in ratios]
    if not rows:
        raise ValueError("a ratio table needs at least one A:F split")
    first = rows[0]
    table = []
    for row in rows:
        speedup = first.bottleneck_s / row.bottleneck_s
        gpus = (first.attention_gpus + first.expert_gpus) / (row.attention_gpus + row.expert_gpus)
        table.append(RatioRow(row, speedup, speedup * gpus))
    return tuple(table)
