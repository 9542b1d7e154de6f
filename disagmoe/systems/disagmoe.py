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

NIC_RULES = ("halves", "own")
ORDERS = ("megatron", "comm_stage")


@dataclass(frozen=True)
class DisagMoE:
    """Options of the planner; None lets the tuner choose.

    `p` depth of the ring, `dp` its replicas, `m` and `n` GPUs per A- and F-group,
    `nics` how NICs follow the pools, `order` and `group` the interleaved order
    and its in-flight group size (p <= group/2 <= 2p).
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
        sizes = self._expert_sizes(problem)
        for tier, n in enumerate(sizes):
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
        nodes = _pool_nodes(problem, str(candidate["nics"]), p * dp * n)
        if nodes is None or p * dp * m > nodes[0] * _node_gpus(problem):
            raise NotApplicable(f"{p * dp * m} attention and {p * dp * n} expert GPUs do not fit this cluster's nodes")
        attention = _group("A", m, p, dp, nodes[0], problem)
        expert = _group("F", n, p, dp, nodes[1], problem)
        placement = Placement(
            workers=tuple(
                Worker(f"{g.name}{i}", g.pool, g.gpus, g.nodes, g.nic_gbs) for g in (attention, expert) for i in range(p)
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
                raise NotApplicable(f"n={self.n} expert GPUs: at most {limit} (experts, and one GPU left for attention)")
            return [self.n]
        target = min(problem.ep or 16, limit)
        half = problem.cluster.gpus // 2
        larger = [size for size in _doublings(target) if size <= min(limit, half)]
        smaller = [size for size in reversed(_halvings(target)) if size < target]
        return [*(larger or [target]), *smaller]

    def _splits(self, problem: Problem, n: int) -> Iterator[tuple[str, int, int, int]]:
        """(NIC rule, p, dp, M) with M as large as its pool allows."""
        seen: set[tuple[float, ...]] = set()
        for rule in (self.nics,) if self.nics else NIC_RULES:
            for p in (self.p,) if self.p else range(1, problem.model.layers + 1):
                for dp in (self.dp,) if self.dp else range(1, problem.cluster.gpus + 1):
                    nodes = _pool_nodes(problem, rule, p * dp * n)
                    if nodes is None:
                        break
                    most = nodes[0] * _node_gpus(problem) // (p * dp)
                    m = self.m if self.m is not None else most
                    if not 1 <= m <= most:
                        continue
                    key = (p, dp, m, *nodes)
                    if key not in seen:
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


def _node_gpus(problem: Problem) -> int:
    return problem.cluster.gpus_per_node


def _pool_nodes(problem: Problem, rule: str, expert_gpus: int) -> tuple[int, int] | None:
    """Nodes of the A- and the F-pool, or None where the experts leave no room.

    `halves` gives each pool half of the nodes with all their NICs; `own` gives
    the F-pool the nodes it fills and the A-pool the rest. A cluster of a single
    node is divided by GPUs (nodes are then virtual, one GPU each).
    """
    total = problem.cluster.nodes
    size = _node_gpus(problem)
    if total == 1:
        return None
    expert_nodes = total // 2 if rule == "halves" else -(-expert_gpus // size)
    attention_nodes = total // 2 if rule == "halves" else total - expert_nodes
    if attention_nodes < 1 or expert_gpus > expert_nodes * size:
        return None
    return attention_nodes, expert_nodes


def _group(pool: str, gpus: int, p: int, dp: int, pool_nodes: int, problem: Problem) -> Worker:
    """One group of a pool: its GPUs spread over the pool's nodes, all NICs shared evenly."""
    size = _node_gpus(problem)
    nodes = max(-(-gpus // size), pool_nodes // (p * dp), 1)
    node_nic_gbs = problem.cluster.nic_gbs_per_gpu() * size
    # Few GPUs may share many NICs (16:10 on 16:16), but none beyond their own node's.
    nic_gbs = min(pool_nodes * node_nic_gbs / (gpus * p * dp), node_nic_gbs)
    return Worker(name=pool, pool=pool, gpus=gpus, nodes=min(nodes, gpus), nic_gbs=nic_gbs)
