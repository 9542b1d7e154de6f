"""DisagMoE: attention and experts on separate GPU groups, run as one ring (AF-Pipe).

Decides how many GPUs and NICs an attention group (M) and an expert group (N)
get, how deep the ring is (p), how often it is replicated (dp), and which order
it runs in. The paper (arXiv 2605.11005) is known from summaries only; where they
are silent the choice is a field of `DisagMoE` or a candidate of its search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from disagmoe.cost.recompute import Recompute
from disagmoe.plan.af_pipe import ORDERS, af_pipe_program, group_sizes, most_held
from disagmoe.plan.af_ring import HEADS, head_workers
from disagmoe.plan.plan import Batch, Layout, Placement
from disagmoe.plan.program import Program
from disagmoe.system import SELECTIVE_LEVELS, Candidate, NotApplicable, Problem, recompute_of
from disagmoe.systems.pools import NIC_RULES, Shape, place, shapes
from disagmoe.systems.shortlist import shortlist

STREAMS = (2, 1)
"""Compute streams, the paper's form first."""
MOST_UNEVEN = 1.05
"""Load of the fullest expert rank over the mean, of the EP sizes tried where the tuner may choose."""
MOST_GROUPS = 4
"""In-flight group sizes tried for one split, the largest and the smallest among them."""
HEAD_NAMES = {"last_f": "last F-group", "next_a": "next A-group", "spread": "all F-groups"}


@dataclass(frozen=True)
class DisagMoE:
    """Options of the planner; None lets the tuner choose.

    `p` depth of the ring, `dp` its replicas, `m` and `n` GPUs per A- and F-group,
    `nics` how NICs follow the pools (see `pools.py`), `order` and `group` the
    interleaved order and its in-flight group size (2p <= group <= 4p), `head` where
    the output head is (see `af_ring.py`), `compute_streams` 2 for forwards and
    backwards side by side (the paper) or 1.
    """

    p: int | None = None
    dp: int | None = None
    m: int | None = None
    n: int | None = None
    nics: str | None = None
    order: str | None = None
    group: int | None = None
    head: str = "last_f"
    compute_streams: int | None = None

    name: str = "disagmoe"
    native_transport: str = "m2n_rdma"
    recompute_levels: ClassVar[tuple[Candidate, ...]] = (
        *SELECTIVE_LEVELS,
        {"recompute": "selective", "recompute_attention": "full"},
        {"recompute": "selective", "recompute_ffn": "full", "recompute_tokens": "keep"},
        {"recompute": "full"},
    )
    """The pools are full at different times, so each may recompute alone."""
    ring_choices: ClassVar[Mapping[str, tuple[str | int | float, ...]]] = {
        "order": (ORDERS[-1], ORDERS[0]),
        "compute_streams": STREAMS,
    }
    """What a division of the GPUs leaves open: keys of a candidate and their values, the usual one first."""

    def __post_init__(self) -> None:
        choices = (
            ("nics", self.nics, NIC_RULES),
            ("order", self.order, ORDERS),
            ("head", self.head, HEADS),
            ("compute_streams", self.compute_streams, STREAMS),
        )
        for label, value, allowed in choices:
            if value is not None and value not in allowed:
                raise ValueError(f"disagmoe {label}={value!r}: allowed are {', '.join(map(str, allowed))}")
        for label, number in (("p", self.p), ("dp", self.dp), ("m", self.m), ("n", self.n), ("group", self.group)):
            if number is not None and number < 1:
                raise ValueError(f"disagmoe {label}={number}: must be at least 1")

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """Every (N, NIC rule, p, dp, micro-batch) with the attention GPUs that it leaves."""
        cluster = problem.cluster
        if cluster.gpus < 2:
            raise NotApplicable(f"needs at least 2 GPUs for disaggregation, the cluster has {cluster.gpus}")
        if self.p is not None and self.p > problem.model.layers:
            raise NotApplicable(f"p={self.p} groups of each pool: at most one per layer, {problem.model.layers} here")
        sizes = self._expert_sizes(problem)
        placed = False
        # An EP size that was asked for is kept wherever it fits; a free one is all one tier.
        for tier, tried in enumerate([sizes] if problem.ep is None else [[n] for n in sizes]):
            splits = [{"tier": tier, **c} for n in tried for c in self._of_size(problem, n)]
            for split in shortlist(problem, splits):
                placed = True
                yield from self._extremes(problem, split)
        if not placed:
            asked = [f"{k}={getattr(self, k)}" for k in ("p", "dp", "m", "n", "nics") if getattr(self, k) is not None]
            room = f"{cluster.gpus} GPUs in {cluster.nodes} node{'s' * (cluster.nodes > 1)}"
            raise NotApplicable(f"{', '.join(asked) or 'no split'}: no place in {room}")

    def _extremes(self, problem: Problem, split: Candidate) -> Iterator[Candidate]:
        """The forms of a split that are the fastest as a rule, and the one that holds the least.

        Among the warm-ups, a slot for every transfer loses least where it is not the
        best; on one stream only one operation's temporaries exist at a time.
        """
        groups = self._groups(problem, split)
        fast, lean = (self.order,) * 2 if self.order else (ORDERS[-1], ORDERS[0])
        for group, order, streams in ((groups[0], fast, 2), (groups[0], fast, 1), (groups[-1], lean, 1)):
            yield {**split, "order": order, "group": group, "compute_streams": self.compute_streams or streams}

    def _of_size(self, problem: Problem, n: int) -> Iterator[Candidate]:
        for rule, shape in self._shapes(problem, n):
            for sequences in self._micro_batches(problem, shape.dp * shape.m):
                yield {
                    "nics": rule,
                    "p": shape.p,
                    "dp": shape.dp,
                    "m": shape.m if self.m is not None else _needed(problem, shape, sequences),
                    "n": n,
                    "stage_nodes": shape.stage_nodes,
                    "micro_batch": sequences,
                }

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        """Every order, in-flight group size and number of compute streams of a split."""
        for streams in (self.compute_streams,) if self.compute_streams else STREAMS:
            for order in (self.order,) if self.order else ORDERS:
                for group in self._groups(problem, candidate):
                    yield {**candidate, "order": order, "group": group, "compute_streams": streams}

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        p, dp = int(candidate["p"]), int(candidate["dp"])
        m, n = int(candidate["m"]), int(candidate["n"])
        rule, stage_nodes = str(candidate["nics"]), int(candidate.get("stage_nodes", 0))
        workers = place(problem.cluster, rule, Shape(p, dp, m, n, stage_nodes))
        if workers is None:
            raise NotApplicable(f"{p * dp * m} attention and {p * dp * n} expert GPUs do not fit this cluster's nodes")
        layers = problem.model.layers
        heads = head_workers(p, layers, self.head)
        placement = Placement(
            workers=workers,
            attn=tuple(layer % p for layer in range(layers)),
            ffn=tuple(p + layer % p for layer in range(layers)),
            embed=0,
            head=heads[0],
            replicas=dp,
            head_shards=heads if len(heads) > 1 else (),
        )
        streams = int(candidate.get("compute_streams", self.compute_streams or STREAMS[0]))
        order, group = str(candidate["order"]), int(candidate["group"])
        sequences = int(candidate["micro_batch"])
        recompute = recompute_of(candidate)
        held = self._held(p, layers, _microbatches(problem, candidate), group, order)
        return Layout(
            system=self.name,
            variant="",
            placement=placement,
            batch=Batch(microbatches=_microbatches(problem, candidate), sequences=sequences, data_ranks=dp * m),
            ep=n,
            transport=problem.transport,
            merge=problem.merge,
            options={"p": p, "order": order, "group": group, "compute_streams": streams, **held, **recompute},
            details={
                "p": p,
                "virtual_stages": ceil(layers / p),
                "dp": dp,
                "A:F": f"{m}:{n}",
                "A_gpus": p * dp * m,
                "F_gpus": p * dp * n,
                "nics": rule,
                **({"nodes_per_stage": stage_nodes} if stage_nodes else {}),
                "A_nic_gbs_per_gpu": workers[0].nic_gbs,
                "F_nic_gbs_per_gpu": workers[p].nic_gbs,
                "ep": n,
                "merge": problem.merge,
                "micro_batch": sequences,
                "order": order,
                "group": group,
                "head": HEAD_NAMES[self.head],
                "compute_streams": streams,
                **recompute,
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
                head=self.head,
                compute_streams=int(layout.options["compute_streams"]),
                recompute=Recompute.of(layout.options).repeated(disaggregated=True),
            )
        except ValueError as reason:  # an (order, group) pair that would deadlock
            raise NotApplicable(str(reason)) from reason

    def _held(self, p: int, layers: int, count: int, group: int, order: str) -> dict[str, int]:
        """Layers in flight that the order makes the first A- and F-group hold, for a bound on memory."""
        try:
            attention, experts = most_held(p, layers, count, group, order, self.head)
        except ValueError:  # no such order: `program` says why
            return {}
        return {"in_flight_A0": attention, "in_flight_F0": experts}

    def _groups(self, problem: Problem, candidate: Candidate) -> tuple[int, ...]:
        """In-flight group sizes of a split, largest first."""
        if self.group is not None:
            return (self.group,)
        sizes = group_sizes(int(candidate["p"]), problem.model.layers, _microbatches(problem, candidate))
        last = len(sizes) - 1
        return tuple(sizes[i] for i in sorted({round(last * k / (MOST_GROUPS - 1)) for k in range(MOST_GROUPS)}))

    def _expert_sizes(self, problem: Problem) -> list[int]:
        """N asked for first, then larger ones, so that a model too big for it still gets a plan."""
        experts = problem.model.experts
        limit = min(experts, problem.cluster.gpus - 1)
        if self.n is not None:
            if self.n > limit:
                raise NotApplicable(
                    f"n={self.n} expert GPUs: at most {limit} (experts, and one GPU left for attention)"
                )
            return [self.n]
        most = min(limit, problem.cluster.gpus // 2)
        if problem.ep is None:
            # One more GPU helps only where the fullest rank then holds fewer experts; ranks are nearly equal.
            few = [n for n in range(1, most + 1) if n == 1 or ceil(experts / n) < ceil(experts / (n - 1))]
            return [n for n in few if ceil(experts / n) * n <= MOST_UNEVEN * experts]
        target = min(problem.ep, limit)
        larger = [target << i for i in range(8) if target << i <= most]
        smaller = [size for i in reversed(range(1, target.bit_length())) if (size := target >> i) < target]
        return [*(larger or [target]), *smaller]

    def _shapes(self, problem: Problem, n: int) -> Iterator[tuple[str, Shape]]:
        """Every NIC rule, depth and number of replicas, without placements that are alike."""
        cluster = problem.cluster
        seen: set[object] = set()
        for rule in (self.nics,) if self.nics else NIC_RULES:
            for p in (self.p,) if self.p else range(1, min(problem.model.layers, cluster.gpus // n) + 1):
                for dp in (self.dp,) if self.dp else range(1, cluster.gpus // (p * n) + 1):
                    for most in shapes(cluster, rule, p, dp, n):
                        shape = most if self.m is None else Shape(p, dp, self.m, n, most.stage_nodes)
                        workers = place(cluster, rule, shape)
                        if workers is not None and (dp, workers) not in seen:
                            seen.add((dp, workers))
                            yield rule, shape

    def _micro_batches(self, problem: Problem, data_ranks: int) -> list[int]:
        if problem.workload.micro_batch is not None:
            return [problem.workload.micro_batch]
        most = max(1, problem.workload.global_batch // data_ranks)
        return [b for b in (1, 2, 4, 8) if b <= most]


def _microbatches(problem: Problem, candidate: Candidate) -> int:
    ranks = int(candidate["dp"]) * int(candidate["m"])
    return ceil(problem.workload.global_batch / (int(candidate["micro_batch"]) * ranks))


def _needed(problem: Problem, shape: Shape, sequences: int) -> int:
    """The fewest attention GPUs per group that need no more micro-batches than `shape.m` of them.

    What is beyond that would only fill the last micro-batch with nothing.
    """
    batch, per_gpu = problem.workload.global_batch, sequences * shape.dp
    count = ceil(batch / (per_gpu * shape.m))
    step = max(1, shape.stage_nodes)
    return min(shape.m, step * ceil(batch / (per_gpu * count * step)))
