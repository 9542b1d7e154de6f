"""Exchanges against a single-process reference: what runs on every rank of a pool.

An "expert" here is a matrix: row -> row @ w[e]. A layer is
y = x + sum over k of weights[k] * (x @ w[ids[k]]); the reference runs it in one
process with index_select and index_add, autograd included.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor

from disagmoe.ops import Kind, Op, Phase
from disagmoe.runtime.child import Context
from disagmoe.runtime.exchange import Arrived, Exchange, Experts
from disagmoe.runtime.ledger import Ledger, WireBytes
from disagmoe.runtime.merge import Blocks, Sides
from disagmoe.runtime.transport import Link, make_transport
from disagmoe.runtime.wire import Format

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One exchange: `m` owners and `n` holders, apart or (colocated) the same ranks."""

    m: int
    n: int
    merge: str = "rank"
    transport: str = "pairs"
    node_size: int = 1
    colocated: bool = False
    experts: int = 6
    top_k: int = 2
    tokens: tuple[int, ...] = ()  # per owner; () = 5 each
    routing: str = "random"  # random, first (all to expert 0 and up), every (each choice once per owner), dense
    answer: str = "owners"  # who gets the combined tokens: owners, or near-equal blocks over the holders
    dtype: torch.dtype = torch.float64
    width: int = 4
    seed: int = 0

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(range(self.m))

    @property
    def holders(self) -> tuple[int, ...]:
        return self.owners if self.colocated else tuple(range(self.m, self.m + self.n))

    @property
    def dense(self) -> bool:
        return self.routing == "dense"

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.owners, self.tokens) if self.tokens else Blocks.each(self.owners, 5)

    @property
    def answers(self) -> Blocks:
        return self.blocks if self.answer == "owners" else Blocks.split(self.holders, self.blocks.total)

    def nodes(self, world: int) -> dict[int, int]:
        return {rank: rank // self.node_size for rank in range(world)}


@dataclass
class Problem:
    """The tensors of a case, equal on every rank."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w: Tensor
    out_grad: Tensor

    @classmethod
    def of(cls, case: Case) -> Problem:
        draw = torch.Generator().manual_seed(case.seed)
        total, k = case.blocks.total, case.top_k

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        if case.routing == "random":
            ids = torch.rand(total, case.experts, generator=draw).argsort(1)[:, :k]
        elif case.routing == "every":
            ids = torch.tensor([*combinations(range(case.experts), k)]).repeat(len(case.owners), 1)
        else:
            ids = torch.arange(k).expand(total, k).contiguous()
        scale = case.width**-0.5
        return cls(
            x=normal(total, case.width).to(case.dtype),
            ids=ids,
            weights=torch.rand(total, k, generator=draw, dtype=torch.float64),
            w=(normal(case.experts, case.width, case.width) * scale).to(case.dtype),
            out_grad=normal(total, case.width).to(case.dtype),
        )


@dataclass
class Result:
    """What a rank has at the end, each with the numbers of its tokens."""

    y: Tensor | None = None
    x_grad: Tensor | None = None
    weights_grad: Tensor | None = None
    sent: dict[str, WireBytes] = field(default_factory=dict)
    identity: float = 0.0


def reference(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """y, gradient of x, gradient of the weights; everything in fp64."""
    p = Problem.of(case)
    x, weights = p.x.double().requires_grad_(), p.weights.clone().requires_grad_()
    y = x
    if not case.dense:
        token = torch.arange(case.blocks.total).repeat_interleave(case.top_k)
        copies = torch.bmm(x.index_select(0, token).unsqueeze(1), p.w.double()[p.ids.flatten()]).squeeze(1)
        y = x.index_add(0, token, copies * weights.flatten().unsqueeze(1))
    y.backward(p.out_grad.double())
    assert x.grad is not None
    return y.detach(), x.grad, torch.zeros_like(weights) if weights.grad is None else weights.grad


def partial_sums(arrived: Arrived, w: Tensor) -> Tensor:
    """What a holder makes of its rows."""
    out = torch.zeros_like(arrived.rows)
    if arrived.ids is not None and arrived.weights is not None:
        for slot in range(arrived.ids.shape[1]):
            there = torch.nonzero(arrived.ids[:, slot] >= 0).flatten()
            rows = arrived.rows[there].unsqueeze(1)
            made = torch.bmm(rows, w[arrived.ids[there, slot]]).squeeze(1)
            out = out.index_add(0, there, (made * arrived.weights[there, slot].unsqueeze(1)).to(out.dtype))
    return out.index_add(0, arrived.home, arrived.rows[arrived.home])


class Bench:
    """Process groups of the cases of one call, shared between cases with the same members."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}

    def link(self, members: tuple[int, ...], direction: str) -> Link | None:
        """Made by every rank; None for a rank that is no member."""
        key = members, direction
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(members)) if len(members) > 1 else None
        me = self.context.rank
        group = self._groups[key]
        return Link(members, me, group, group, self.context.group_timeout_s) if me in members else None

    def exchange(
        self, case: Case, owners: tuple[int, ...], holders: tuple[int, ...], ledger: Ledger, name: str
    ) -> Exchange | None:
        sides = Sides(owners, holders, case.merge, case.nodes(self.context.world_size))
        forward, backward = (self.link(sides.members, f"{name}{direction}") for direction in ("", "_back"))
        if forward is None or backward is None:
            return None
        return Exchange(
            sides,
            forward=make_transport(case.transport, forward),
            backward=make_transport(case.transport, backward),
            form=Format(case.width, case.dtype, CPU),
            experts=None if case.dense else Experts(case.experts, case.top_k),
            home="blocks" if case.dense else "source" if case.colocated else "first_expert",
            ledger=ledger,
        )

    def destroy(self) -> None:
        for group in self._groups.values():
            if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def op(kind: Kind, phase: Phase = Phase.F) -> Op:
    return Op(kind, phase, layer=3, microbatch=7)


def run_cases(context: Context, cases: list[Case]) -> list[Result]:
    """Every case, one after the other."""
    bench = Bench(context)
    results = [_run(bench, case) for case in cases]
    bench.destroy()
    return results


def _run(bench: Bench, case: Case) -> Result:
    ledgers = {"dispatch": Ledger(), "combine": Ledger()}
    dispatch = bench.exchange(case, case.owners, case.holders, ledgers["dispatch"], "dispatch")
    combine = bench.exchange(case, case.answers.ranks, case.holders, ledgers["combine"], "combine")
    result = Result()
    p = Problem.of(case)
    me = bench.context.rank
    mine, answered = case.blocks.range_of(me), case.answers.range_of(me)
    route = arrived = leaf = leaf_weights = partial = combined = None
    if dispatch is not None:
        given = {}
        if me in case.owners:
            given["x"] = p.x[mine.start : mine.stop]
            if not case.dense:
                given |= {"ids": p.ids[mine.start : mine.stop], "weights": p.weights[mine.start : mine.stop]}
        route, arrived = dispatch.dispatch(op(Kind.DISPATCH), case.blocks, **given)
        again = dispatch.dispatch_again(op(Kind.DISPATCH, Phase.R), route, given.get("x"))
        assert (again is None) == (arrived is None)
        assert arrived is None or torch.equal(again, arrived.rows)
    if arrived is not None:
        leaf = arrived.rows.clone().requires_grad_()
        leaf_weights = None if arrived.weights is None else arrived.weights.clone().requires_grad_()
        partial = partial_sums(dataclasses.replace(arrived, rows=leaf, weights=leaf_weights), p.w)
    if combine is not None:
        combined, result.y = combine.combine(
            op(Kind.COMBINE), case.answers, route if arrived is not None else None, partial
        )
        y_again = combine.combine_again(
            op(Kind.COMBINE, Phase.R), combined, None if partial is None else partial.detach()
        )
        assert (y_again is None) == (result.y is None)
        assert result.y is None or torch.equal(y_again, result.y)
        grad_in = p.out_grad[answered.start : answered.stop] if me in case.answers.ranks else None
        partial_grad = combine.combine_backward(op(Kind.COMBINE, Phase.B), combined, grad_in)
        if partial_grad is not None:
            assert partial is not None
            # <combine p, g> - <p, combine_T g>, summed over ranks below.
            result.identity -= float((partial.detach().double() * partial_grad.double()).sum())
        if result.y is not None and grad_in is not None:
            result.identity += float((result.y.double() * grad_in.double()).sum())
    rows_grad = weights_grad = None
    if leaf is not None and partial is not None:
        inputs = [leaf] if leaf_weights is None else [leaf, leaf_weights]
        grads = torch.autograd.grad(partial, inputs, partial_grad, allow_unused=True)
        rows_grad = torch.zeros_like(leaf) if grads[0] is None else grads[0]
        weights_grad = grads[1] if leaf_weights is not None else None
    if dispatch is not None:
        back = dispatch.dispatch_backward(op(Kind.DISPATCH, Phase.B), route, rows_grad, weights_grad)
        if back is not None:
            result.x_grad, result.weights_grad = back
    for name, ledger in ledgers.items():
        for phase in (Phase.F, Phase.R, Phase.B):
            result.sent[f"{name} {phase.name}"] = ledger.total(lambda o, phase=phase: o.phase is phase)
    return result
