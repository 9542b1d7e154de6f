"""DisagMoE: attention and experts on separate GPU groups, run as one ring (AF-Pipe).

Decides how many GPUs and NICs an attention group (M) and an expert group (N)
get, how deep the ring is (p), how often it is replicated (dp), and which order
it runs in. The paper (arXiv 2605.11005) is known from summaries only; where they
are silent the choice is a field of `DisagMoE` or a candidate of its search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil

from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.plan import Batch, Layout, Placement, Worker
from disagmoe.plan.program import Program
from disagmoe.system import Candidate, NotApplicable, Problem

NIC_RULES = ("halves", "own", "shared_nodes")
ORDERS = ("megatron", "comm_stage")


@dataclass(frozen=True)
class DisagMoE:
    """Options of the planner; None lets the tuner choose.

    `p` depth of the ring, `dp` its replicas, `m` and `n` GPUs per A- and F-group,
    `nics` how NICs follow the pools (see `_pools`), `order` and `group` the
    interleaved order and its in-flight group size (2p <= group <= 4p).
    """

    p: int | None = None
    dp: int | None = None
    m: int | None = None
    n: int | None = None
    nics: str | None = None
    order: str | None = None
    group: int | None = None

    name: str = "disagmoe"
    native_transport: str = "m2n_rdma"

    def __post_init__(self) -> None:
        for label, value, allowed in (("nics", self.nics, NIC_RULES), ("order", self.order, ORDERS)):
            if value is not None and value not in allowed:
                raise ValueError(f"disagmoe {label}={value!r}: allowed are {', '.join(allowed)}")
        for label, number in (("p", self.p), ("dp", self.dp), ("m", self.m), ("n", self.n), ("group", self.group)):
            if number is not None and number < 1:
                raise ValueError(f"disagmoe {label}={number}: must be at least 1")

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """Every (N, NIC rule, p, dp, micro-batch); M fills what is left of its pool."""
        cluster = problem.cluster
        if cluster.gpus < 2:
            raise NotApplicable(f"needs at least 2 GPUs for disaggregation, the cluster has {cluster.gpus}")
        for index, n in enumerate(self._expert_sizes(problem)):
            # An EP size that was asked for is kept wherever it fits; a free one is all one tier.
            tier = 0 if problem.ep is None else index
            for nics, p, dp, m in self._splits(problem, n):
                for sequences in self._micro_batches(problem, dp * m):
                    yield {
                        "tier": tier,
                        "nics": nics,
                        "p": p,
                        "dp": dp,
                        "m": m,
                        "n": n,
                        "micro_batch": sequences,
                        "order": self.order or ORDERS[0],
                        "group": self.group or 4 * p,
                    }

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        """Every order and in-flight group size of a split."""
        p = int(candidate["p"])
        for order in (self.order,) if self.order else ORDERS:
            for group in (self.group,) if self.group else _groups(p):
                yield {**candidate, "order": order, "group": group}

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        p, dp = int(candidate["p"]), int(candidate["dp"])
        m, n = int(candidate["m"]), int(candidate["n"])
        layers = problem.model.layers
        pools = _pools(problem, str(candidate["nics"]), p * dp * n)
        if pools is None or p * dp * m > pools[0].gpus:
            raise NotApplicable(f"{p * dp * m} attention and {p * dp * n} expert GPUs do not fit this cluster's nodes")
        attention = pools[0].group("A", m, p * dp)
        expert = pools[1].group("F", n, p * dp)
        placement = Placement(
            workers=tuple(
                Worker(f"{g.name}{i}", g.pool, g.gpus, g.nodes, g.nic_gbs)
                for g in (attention, expert)
                for i in range(p)
            ),
            attn=tuple(layer % p for layer in range(layers)),
            ffn=tuple(p + layer % p for layer in range(layers)),
            embed=0,
            head=p + (layers - 1) % p,
            replicas=dp,
        )
        sequences = int(candidate["micro_batch"])
        data_ranks = dp * m
        count = ceil(problem.workload.global_batch / (sequences * data_ranks))
        group = int(candidate["group"])
        return Layout(
            system=self.name,
            variant="",
            placement=placement,
            batch=Batch(microbatches=count, sequences=sequences, data_ranks=data_ranks),
            ep=n,
            transport=problem.transport,
            merge=problem.merge,
            options={"p": p, "order": str(candidate["order"]), "group": group},
            details={
                "p": p,
                "virtual_stages": ceil(layers / p),
                "dp": dp,
                "A:F": f"{m}:{n}",
                "A_gpus": p * dp * m,
                "F_gpus": p * dp * n,
                "nics": str(candidate["nics"]),
                "A_nic_gbs_per_gpu": attention.nic_gbs,
                "F_nic_gbs_per_gpu": expert.nic_gbs,
                "ep": n,
                "micro_batch": sequences,
                "order": str(candidate["order"]),
                "group": group,
                "head": "last F-group",
                "compute_streams": 1,
            },
        )

    def program(self, problem: Problem, layout: Layout) -> Program:
        try:
            return af_pipe_program(
                p=int(layout.options["p"]),
                layers=problem.model.layers,
                m=layout.batch.microbatches,
                group=int(layout.options["group"]),
                order=str(layout.options["order"]),
            )
        except ValueError as reason:  # an (order, group) pair that would deadlock
            raise NotApplicable(str(reason)) from reason

    def _expert_sizes(self, problem: Problem) -> list[int]:
        """N asked for first, then larger ones, so that a model too big for it still gets a plan."""
        limit = min(problem.model.experts, problem.cluster.gpus - 1)
        if self.n is not None:
            if self.n > limit:
                raise NotApplicable(
                    f"n={self.n} expert GPUs: at most {limit} (experts, and one GPU left for attention)"
                )
            return [self.n]
        half = problem.cluster.gpus // 2
        if problem.ep is None:
            return list(range(1, min(limit, half) + 1))
        target = min(problem.ep, limit)
        larger = [size for size in _doublings(target) if size <= min(limit, half)]
        smaller = [size for size in reversed(_halvings(target)) if size < target]
        return [*(larger or [target]), *smaller]

    def _splits(self, problem: Problem, n: int) -> Iterator[tuple[str, int, int, int]]:
        """(NIC rule, p, dp, M) with M as large as its pool allows."""
        seen: set[tuple[object, ...]] = set()
        for rule in (self.nics,) if self.nics else NIC_RULES:
            for p in (self.p,) if self.p else range(1, problem.model.layers + 1):
                for dp in (self.dp,) if self.dp else range(1, problem.cluster.gpus + 1):
                    pools = _pools(problem, rule, p * dp * n)
                    if pools is None:
                        break
                    most = pools[0].gpus // (p * dp)
                    m = self.m if self.m is not None else most
                    key = (p, dp, m, pools)
                    if 1 <= m <= most and key not in seen:
                        seen.add(key)
                        yield rule, p, dp, m

    def _micro_batches(self, problem: Problem, data_ranks: int) -> list[int]:
        if problem.workload.micro_batch is not None:
            return [problem.workload.micro_batch]
        most = max(1, problem.workload.global_batch // data_ranks)
        return [b for b in (1, 2, 4, 8) if b <= most]


def _doublings(target: int) -> list[int]:
    return [target << i for i in range(8)]


def _halvings(target: int) -> list[int]:
    return [target >> i for i in range(target.bit_length())]


def _groups(p: int) -> list[int]:
    """In-flight group sizes tried: the ends and the middle of [2p, 4p]."""
    return sorted({2 * p, 3 * p, 4 * p})


@dataclass(frozen=True)
class Pool:
    """What one pool owns: GPUs, the nodes they lie on, and NIC bandwidth in all (GB/s, each way)."""

    gpus: int
    nodes: int
    nics_gbs: float
    node_nics_gbs: float

    def group(self, name: str, gpus: int, groups: int) -> Worker:
        """One of `groups` equal groups of `gpus` GPUs, spread over the pool's nodes."""
        per_node = self.gpus / self.nodes
        nodes = min(gpus, max(ceil(gpus / per_node), self.nodes // groups))
        # Few GPUs may share many NICs (16:10 on 16:16), but a GPU uses none beyond its own node's.
        nic_gbs = min(self.nics_gbs / (gpus * groups), self.node_nics_gbs)
        return Worker(name=name, pool=name, gpus=gpus, nodes=nodes, nic_gbs=nic_gbs)


def _pools(problem: Problem, rule: str, expert_gpus: int) -> tuple[Pool, Pool] | None:
    """The A- and the F-pool, or None where this rule has no room for the experts.

    `halves` gives each pool half of the nodes with all their NICs, `own` gives
    the F-pool the nodes it fills and the A-pool the rest. `shared_nodes` is used
    where the cluster is a single node: both pools lie on it and tokens stay on
    NVLink. Nodes of different sizes count as the smallest of them.
    """
    cluster = problem.cluster
    size, total = cluster.gpus_per_node, cluster.nodes
    node_nics_gbs = cluster.nic_gbs_per_gpu() * size
    if (rule == "shared_nodes") != (total == 1):
        return None
    if total == 1:
        attention_gpus = size - expert_gpus
        if attention_gpus < 1:
            return None
        share = cluster.nic_gbs_per_gpu()
        return (
            Pool(attention_gpus, 1, share * attention_gpus, node_nics_gbs),
            Pool(expert_gpus, 1, share * expert_gpus, node_nics_gbs),
        )
    expert_nodes = total // 2 if rule == "halves" else ceil(expert_gpus / size)
    attention_nodes = total // 2 if rule == "halves" else total - expert_nodes
    if attention_nodes < 1 or expert_gpus > expert_nodes * size:
        return None
    return (
        Pool(attention_nodes * size, attention_nodes, attention_nodes * node_nics_gbs, node_nics_gbs),
        Pool(expert_nodes * size, expert_nodes, expert_nodes * node_nics_gbs, node_nics_gbs),
    )
