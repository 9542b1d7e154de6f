"""CostModel: what one operation of one model costs on one GPU of one cluster.

Decides what belongs to an operation and combines the formulas of `compute`,
`network` and `copies` under a calibration. Seconds and bytes only: which
operations run where and when is the plan's and the simulator's business.
"""

from __future__ import annotations

from functools import cache

from disagmoe.cost import compute as work
from disagmoe.cost.calibration import TRANSPORTS, Calibration, Contention
from disagmoe.cost.compute import BF16, Compute, Gemm
from disagmoe.cost.copies import CopyWork, copy_work, distinct_units
from disagmoe.cost.network import Copies, GpuGroup, Network, Transfer, check_merge, colocated_copies
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Phase
from disagmoe.specs import ClusterSpec, ModelSpec, Workload, device


class CostModel:
    """Prices of one (model, cluster, calibration, workload); all results are cached per instance."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, calibration: Calibration, workload: Workload) -> None:
        self.model = model
        self.cluster = cluster
        self.calibration = calibration
        self.workload = workload
        self.like = self._alike()
        """Per layer: the first layer with the same prices (MoE or not, and window, are all that differs)."""
        self._compute = Compute(calibration.rates, device(cluster.device))
        self._network = Network(calibration.rates, cluster.nvlink_gbs, cluster.spine_oversubscription)
        self._attention = cache(self._attention_s)
        self._ffn = cache(self._ffn_s)
        self._exchange = cache(self._exchange_of)
        self._pools = cache(self._m2n_of)

    # Compute: seconds on one GPU.

    def embed(self, phase: Phase, tokens: float) -> float:
        """Look up `tokens` rows; backward adds them to the fp32 gradient (phase W, nothing in I)."""
        moved = {Phase.F: 2 * BF16, Phase.I: 0, Phase.W: BF16 + work.MAIN_GRAD}
        total = 0.0
        for part in work.phases(phase):
            nbytes = tokens * self.model.hidden * moved[part]
            total += self._compute.seconds([self._compute.pointwise(nbytes)]) if nbytes else 0.0
        return total

    def attention(self, layer: int, phase: Phase, sequences: float, *, packed: float | None = None) -> float:
        """Norms, projections, rotary, scores, residual, router and permutation of `sequences` sequences.

        `packed` is how many copies of a token the exchange wants laid out (None: top-k; see `copy_work`).
        """
        return self._attention(self.model.is_moe(layer), self.model.window(layer), phase, float(sequences), packed)

    def ffn(
        self,
        layer: int,
        phase: Phase,
        *,
        home_tokens: float,
        rows: float,
        local_experts: float,
        returned: float | None = None,
        normed: float = 0.0,
    ) -> float:
        """Experts on `rows` token-expert rows over `local_experts` experts, and what home ranks do.

        `rows` includes imbalance (0 in a dense layer). `home_tokens` are the
        tokens whose shared expert or dense MLP, sum of copies and residual this
        GPU computes; `returned` is how many copies of a token the exchange leaves to
        sum up (None: top-k; see `copy_work`). `normed` rows arrive without the norm
        before the experts and get it here.
        """
        given = (float(home_tokens), float(rows), float(local_experts), returned, float(normed))
        return self._ffn(self.model.is_moe(layer), phase, *given)

    def attention_redone(self, layer: int, sequences: float, recompute: Recompute) -> float:
        """What selective recompute repeats inside the backward of one attention block (nothing for other modes)."""
        tokens = float(sequences) * self.workload.seq
        gemms, nbytes = work.dropped_attention(self.model, self.model.is_moe(layer), tokens, recompute)
        kernels = [self._compute.gemm(gemm, Phase.F) for gemm in gemms]
        return self._compute.seconds(kernels + [self._compute.pointwise(n) for n in nbytes])

    def experts_redone(self, rows: float, recompute: Recompute) -> float:
        """What selective recompute repeats inside the backward of the experts of `rows` rows."""
        if not (rows > 0.0 and recompute.drops("moe_act")):
            return 0.0
        return self._compute.seconds([self._compute.pointwise(work.activation_bytes(self.model, rows))])

    def head(self, phase: Phase, tokens: float, vocab_shards: int = 1) -> float:
        """Final norm, output GEMM and cross entropy over 1 / `vocab_shards` of the vocabulary.

        The loss runs in chunks of tokens that keep the GEMM saturated; logits are
        bf16, read once forward and turned into their gradient in place backward.
        """
        if vocab_shards < 1:
            raise ValueError(f"vocab_shards must be at least 1, got {vocab_shards}")
        vocab = -(-self.model.vocab // vocab_shards)
        gemm = Gemm(float(tokens), self.model.hidden, vocab)
        total = 0.0
        for part in work.phases(phase):
            kernels = [self._compute.gemm(gemm, part)]
            if part is not Phase.W:
                logits = tokens * vocab * BF16
                norm = tokens * 2.0 * self.model.hidden * BF16
                kernels += [
                    self._compute.pointwise(logits if part is Phase.F else 2.0 * logits),
                    self._compute.pointwise(norm if part is Phase.F else norm * work.POINTWISE_BACKWARD),
                ]
            total += self._compute.seconds(kernels)
        return total

    def optimizer(self, params_updated: float) -> float:
        """Adam on `params_updated` parameters (this GPU's shard), bound by HBM."""
        return self._compute.seconds([self._compute.pointwise(params_updated * work.ADAM_BYTES)])

    def expert_halves(self, phase: Phase, rows: float, local_experts: float) -> tuple[float, float, float]:
        """Seconds of (first GEMM, activation, second GEMM) of the experts where kernels are fused around them.

        Phase F: gate and up, SwiGLU, down. Phase I, mirrored: the gradient
        through down, through SwiGLU, through gate and up. Sorting by expert and
        weighting copies ride in the GEMMs' loads and stores and cost nothing.
        """
        if phase not in (Phase.F, Phase.I):
            raise ValueError(f"the halves of an expert exist in phases F and I, not {phase.name}")
        m = self.model
        up, down = (
            self._compute.seconds([self._compute.gemm(gemm, phase)])
            for gemm in work.mlp(m.hidden, m.expert_width, rows, local_experts, use="grouped")
        )
        scale = 1.0 if phase is Phase.F else work.POINTWISE_BACKWARD
        activation = self._compute.seconds([self._compute.pointwise(work.activation_bytes(m, rows) * scale)])
        return (up, activation, down) if phase is Phase.F else (down, activation, up)

    # Network: seconds and bytes of one transfer.

    @property
    def network(self) -> Network:
        """Rates of the links, for schedules that time parts of an exchange themselves."""
        return self._network

    def all_to_all(
        self,
        *,
        tokens: float,
        ep: int,
        nodes: int,
        transport: str,
        merge: str,
        nic_gbs: float,
        phase: Phase,
        combine: bool,
        volume_factor: float = 1.0,
    ) -> Transfer:
        """Expert-parallel exchange of a colocated group of `ep` ranks on `nodes` nodes.

        `tokens` per rank. `volume_factor` >= 1 is the fullest rank's share of the
        mean (padding, routing skew); merged copies are capped at one per token and
        unit. Dispatch and combine, forward and backward, move the same rows.
        """
        self._check_transport(transport)
        return self._exchange(float(tokens), ep, nodes, merge, float(nic_gbs), float(volume_factor))

    def two_level_all_to_all(
        self,
        *,
        tokens: float,
        ep: int,
        nodes: int,
        transport: str,
        merge: str,
        nic_gbs: float,
        phase: Phase,
        combine: bool,
        volume_factor: float = 1.0,
    ) -> Transfer:
        """The same exchange through the node first (Tutel's 2DH, see `network.two_level`); it cannot merge copies."""
        self._check_transport(transport)
        if merge != "none":
            raise ValueError(f"a two-level all-to-all moves every copy: merge none is allowed, not {merge}")
        sent = tokens * self.model.top_k * self.model.hidden * BF16 * volume_factor
        copy_s = self._compute.seconds([self._compute.pointwise(2.0 * sent)])
        return self._network.two_level(sent, ep, nodes, nic_gbs, copy_s)

    def gathered(
        self, *, tokens: float, ep: int, nic_gbs: float, volume_factor: float = 1.0
    ) -> tuple[Transfer, Transfer]:
        """All-gather of every token inside one node, and the way back: one row per rank that holds one of its experts.

        What the open Comet kernels move (https://github.com/bytedance/flux).
        """
        nbytes = tokens * self.model.hidden * BF16
        on_ranks = min(float(ep), self.distinct(ep) * volume_factor)
        there = self._network.exchange(Copies(nic=0.0, nvlink=ep - 1.0), nbytes, nic_gbs)
        back = self._network.exchange(Copies(nic=0.0, nvlink=on_ranks * (ep - 1.0) / ep), nbytes, nic_gbs)
        return there, back

    def m2n(
        self,
        *,
        tokens: float,
        senders: GpuGroup,
        receivers: GpuGroup,
        copies: str,
        transport: str,
        merge: str,
        phase: Phase,
        combine: bool,
        local: float = 0.0,
    ) -> Transfer:
        """Exchange between an attention group (`senders`) and an expert group (`receivers`).

        `tokens` per attention GPU. `copies` = "experts": a token goes to its top-k
        experts; "one": to its home rank alone (dense layers). A forward dispatch
        and a backward combine travel to the experts, the other two come back
        pre-reduced, the same rows the other way. `local` is the share of the expert
        GPUs that lies on an attention GPU's own node (0: the groups are on different
        nodes): these rows stay on NVLink. The slower of the sending NICs, the
        receiving NICs and NVLink sets the time.
        """
        self._check_transport(transport)
        if not 0.0 <= local <= 1.0:
            raise ValueError(f"local is a share of the receivers, from 0 to 1, got {local!r}")
        to_experts = combine == (phase not in (Phase.F, Phase.R))
        ends = (senders.gpus, float(senders.nic_gbs), receivers.gpus, receivers.nodes, float(receivers.nic_gbs))
        return self._pools(float(tokens), *ends, copies, merge, to_experts, float(local))

    def p2p(self, *, tokens: float, nic_gbs: float, inter_node: bool) -> Transfer:
        """Activations of `tokens` tokens from one GPU to its peer in the next stage."""
        return self._network.p2p(tokens * self.model.hidden * BF16, nic_gbs, inter_node)

    def reduce_scatter(self, *, nbytes: float, ranks: int, nodes: int, nic_gbs: float) -> Transfer:
        """Ring reduce-scatter of a tensor of `nbytes` per rank; nothing for one rank."""
        return self._network.ring(nbytes, ranks, nodes, nic_gbs, passes=1)

    def all_gather(self, *, nbytes: float, ranks: int, nodes: int, nic_gbs: float) -> Transfer:
        """Ring all-gather to a tensor of `nbytes` per rank; nothing for one rank."""
        return self._network.ring(nbytes, ranks, nodes, nic_gbs, passes=1)

    def all_reduce(self, *, nbytes: float, ranks: int, nodes: int, nic_gbs: float) -> Transfer:
        """Ring all-reduce of a tensor of `nbytes` per rank; nothing for one rank."""
        return self._network.ring(nbytes, ranks, nodes, nic_gbs, passes=2)

    def contention(self, transport: str) -> Contention:
        """Stretch factors of compute and transfer while they run side by side."""
        self._check_transport(transport)
        return self.calibration.contention[transport]

    def distinct(self, units: int) -> float:
        """Expected distinct units (ranks or nodes) among `units` that hold experts of one token."""
        m = self.model
        return distinct_units(m.experts, m.top_k, units, m.n_group, m.topk_group)

    def copy_work(self, merge: str, ranks: int) -> CopyWork:
        """What kernels around an exchange with the experts on `ranks` ranks do with copies of a token."""
        check_merge(merge)
        return copy_work(merge, self.model.top_k, ranks, self.distinct(ranks))

    def _alike(self) -> tuple[int, ...]:
        first: dict[tuple[bool, int | None], int] = {}
        layers = range(self.model.layers)
        return tuple(first.setdefault((self.model.is_moe(x), self.model.window(x)), x) for x in layers)

    # What the caches hold.

    def _attention_s(
        self, moe: bool, window: int | None, phase: Phase, sequences: float, packed: float | None
    ) -> float:
        seq = self.workload.seq
        tokens = sequences * seq
        gemms = work.projections(self.model, moe, tokens)
        pointwise = work.attention_pointwise(self.model, moe, tokens, packed)
        total = 0.0
        for part in work.phases(phase):
            total += self._block_s(gemms, pointwise, part)
            if part is not Phase.W:
                total += self._compute.seconds([self._compute.scores(self.model, window, seq, sequences, part)])
        return total

    def _ffn_s(
        self,
        moe: bool,
        phase: Phase,
        home_tokens: float,
        rows: float,
        local_experts: float,
        returned: float | None,
        normed: float,
    ) -> float:
        m = self.model
        gemms: list[Gemm] = []
        pointwise = [work.norm_bytes(m, normed)] if normed > 0.0 else []
        if home_tokens > 0.0:
            width = m.shared_width if moe else m.dense_width
            gemms += work.mlp(m.hidden, width, home_tokens) if width else []
            pointwise += work.home_pointwise(m, moe, home_tokens, returned)
        if rows > 0.0:
            if not (moe and local_experts > 0.0):
                raise ValueError(f"{rows:g} expert rows need a MoE layer and at least one local expert")
            gemms += work.mlp(m.hidden, m.expert_width, rows, local_experts, use="grouped")
            pointwise += work.expert_pointwise(m, rows)
        return sum(self._block_s(gemms, pointwise, part) for part in work.phases(phase))

    def _block_s(self, gemms: list[Gemm], pointwise: list[float], part: Phase) -> float:
        """GEMMs and memory-bound kernels of one block in phase F, I or W."""
        kernels = [self._compute.gemm(gemm, part) for gemm in gemms]
        if part is not Phase.W:
            scale = 1.0 if part is Phase.F else work.POINTWISE_BACKWARD
            kernels += [self._compute.pointwise(nbytes * scale) for nbytes in pointwise]
        return self._compute.seconds(kernels)

    def _exchange_of(self, tokens: float, ep: int, nodes: int, merge: str, nic_gbs: float, factor: float) -> Transfer:
        if not 1 <= nodes <= ep:
            raise ValueError(f"{ep} expert-parallel ranks cannot span {nodes} nodes; allowed: 1 to {ep}")
        on_ranks, on_nodes = self.distinct(ep), self.distinct(nodes)
        copies = colocated_copies(merge, ep, nodes, self.model.top_k, on_ranks, on_nodes)
        nic, nvlink = self._skewed(merge, factor, ep / on_ranks, nodes / on_nodes)
        copies = Copies(nic=copies.nic * nic, nvlink=copies.nvlink * nvlink)
        peers = nodes - 1 if merge == "node" else ep - 1
        return self._network.exchange(copies, tokens * self.model.hidden * BF16, nic_gbs, peers)

    def _m2n_of(
        self,
        tokens: float,
        attention_gpus: int,
        attention_nic_gbs: float,
        expert_gpus: int,
        expert_nodes: int,
        expert_nic_gbs: float,
        copies: str,
        merge: str,
        to_experts: bool,
        local: float,
    ) -> Transfer:
        check_merge(merge)
        if copies not in ("experts", "one"):
            raise ValueError(f"unknown copies {copies!r}; known: experts, one")
        # Rows of one token: over NICs, from GPU to GPU inside a node, and over NVLink into the expert GPUs.
        rows, inside, arriving, nic_skew, fan_skew = 1.0, local, local, 1.0, 1.0
        if copies == "experts":
            on_ranks, on_nodes = self.distinct(expert_gpus), self.distinct(expert_nodes)
            rows = {"none": float(self.model.top_k), "rank": on_ranks, "node": on_nodes}[merge]
            inside = local * (self.model.top_k if merge == "none" else on_ranks)
            arriving = on_ranks if merge == "node" else inside  # what came over a NIC fans out on its node
            caps = (expert_gpus / on_ranks, expert_nodes / on_nodes)
            nic_skew, fan_skew = self._skewed(merge, self.workload.skew, *caps)
        token_bytes = tokens * self.model.hidden * BF16
        at_attention = token_bytes * rows * (1.0 - local)
        per_expert_gpu = token_bytes * attention_gpus / expert_gpus
        at_experts = per_expert_gpu * rows * (1.0 - local)
        nic_s = 0.0
        if local < 1.0:
            nic_s = max(
                at_attention / self._network.nic(attention_nic_gbs),
                at_experts * nic_skew / self._network.nic(expert_nic_gbs),
            )
        nvlink_bytes = max(token_bytes * inside, per_expert_gpu * arriving * fan_skew)
        return self._network.timed(at_attention if to_experts else at_experts, nvlink_bytes, nic_s)

    @staticmethod
    def _skewed(merge: str, factor: float, rank_cap: float, node_cap: float) -> tuple[float, float]:
        """Factors on the NIC and the NVLink rows of the fullest unit.

        A merged unit receives at most one copy of every token, whatever the skew.
        """
        if factor < 1.0:
            raise ValueError(f"volume_factor is max/mean load and at least 1, got {factor!r}")
        if merge == "none":
            return factor, factor
        per_rank = min(factor, rank_cap)
        return (per_rank if merge == "rank" else min(factor, node_cap)), per_rank

    @staticmethod
    def _check_transport(transport: str) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {transport!r}; known: {', '.join(TRANSPORTS)}")
