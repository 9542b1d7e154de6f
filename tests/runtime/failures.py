"""What ranks do that go wrong, for the tests of exchanges and of the launcher."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from disagmoe.ops import Kind, Phase
from disagmoe.runtime import exchange as exchange_module
from disagmoe.runtime.child import Context
from disagmoe.runtime.exchange import Exchange
from disagmoe.runtime.ledger import Ledger
from disagmoe.runtime.merge import Blocks
from tests.runtime.cases import Bench, Case, Problem, op

PLAN = exchange_module.depart
DISAGREEMENTS = (
    "operation",
    "tokens",
    "dtype",
    "width",
    "weights",
    "rows",
    "words",
    "split",
    "swapped",
    "shape",
    "ids",
)


def disagree(context: Context, transport: str) -> dict[str, tuple[str, str, float]]:
    """Owner 0 and holder 1 disagree in each way: the error of this rank, its kind, and how long it took.

    Every disagreement has groups of its own, as one that went wrong is of no use any more.
    """
    found = {}
    for what in DISAGREEMENTS:
        bench = Bench(context)
        begin = time.monotonic()
        try:
            _disagree(bench, what, transport)
            found[what] = ("none", "", 0.0)
        except (RuntimeError, ValueError) as error:
            found[what] = (type(error).__name__, str(error), time.monotonic() - begin)
        exchange_module.depart = PLAN
        bench.destroy()
        dist.barrier()
    return found


def _disagree(bench: Bench, what: str, transport: str) -> None:
    wrong = bench.context.rank == 0
    case = Case(1, 1, "rank", transport, tokens=(5,))
    p = Problem.of(case)
    x, ids, weights = p.x, p.ids, p.weights
    if wrong and what == "dtype":
        case, x = replace(case, dtype=torch.float32), x.float()
    if wrong and what == "width":
        case, x = replace(case, width=3), x[:, :3].contiguous()
    if wrong and what == "shape":
        x = x[:, :3].contiguous()
    if wrong and what == "ids":
        ids = ids + case.experts
    if wrong and what == "weights":
        weights = weights[:, :1]
    exchange = bench.exchange(case, case.owners, case.holders, Ledger(), "dispatch")
    assert exchange is not None
    blocks = Blocks(case.owners, (6 if wrong and what == "tokens" else 5,))
    if wrong and what == "tokens":
        x, ids, weights = torch.cat((x, x[:1])), torch.cat((ids, ids[:1])), torch.cat((weights, weights[:1]))
    number = op(Kind.DISPATCH)._replace(microbatch=8 if wrong and what == "operation" else 7)
    given = {"x": x, "ids": ids, "weights": weights} if wrong else {}
    if wrong and what in ("split", "swapped"):
        given = _with_wrong_split(what, given)
    route, arrived = exchange.dispatch(number, blocks, **given)
    _disagree_in_backward(exchange, what, wrong, route, arrived)


def _with_wrong_split(what: str, given: dict) -> dict:
    """Planning returns sizes that are wrong: more than there is, or for the wrong rank."""

    def wrong_plan(*args, **kwargs):
        leaving = PLAN(*args, **kwargs)
        splits = leaving.rows.splits
        splits = (0, splits[1] + 1) if what == "split" else splits[::-1]
        return replace(leaving, rows=replace(leaving.rows, splits=splits))

    exchange_module.depart = wrong_plan
    return given


def _disagree_in_backward(exchange: Exchange, what: str, wrong: bool, route, arrived) -> None:
    """The holder sends one row, or one gate weight gradient, fewer than the owner has on record."""
    if what not in ("rows", "words"):
        return
    rows = weights = None
    if arrived is not None:
        (leg,) = route.legs
        rows, weights = arrived.rows, arrived.weights
        if what == "rows":
            short = replace(leg.lower, size=leg.lower.size - 1, splits=(leg.lower.splits[0] - 1, 0))
            route, rows = replace(route, legs=(replace(leg, lower=short),)), rows[:-1]
        else:
            short = replace(leg.lower_copies, splits=(leg.lower_copies.splits[0] - 1, 0))
            route = replace(route, legs=(replace(leg, lower_copies=short),), cells=route.cells[:-1])
    exchange.dispatch_backward(op(Kind.DISPATCH, Phase.B), route, rows, weights)


def lone_disagreement(context: Context) -> None:
    """2:2, and owner 1 believes in other rows than everybody else: all ranks must end."""
    bench = Bench(context)
    case = Case(2, 2, "rank")
    if context.rank == 1:
        case = replace(case, width=5)
    exchange = bench.exchange(case, case.owners, case.holders, Ledger(), "dispatch")
    p, mine = Problem.of(case), case.blocks.range_of(context.rank)
    cut = slice(mine.start, mine.stop)
    given = {"x": p.x[cut], "ids": p.ids[cut], "weights": p.weights[cut]} if context.rank < 2 else {}
    exchange.dispatch(op(Kind.DISPATCH), case.blocks, **given)


def exchange_until(context: Context, rank: int, how: str) -> None:
    """Exchanges go on until `rank` dies, stops, hangs or raises."""
    bench = Bench(context)
    case = Case(2, 2, "node", node_size=2)
    exchange = bench.exchange(case, case.owners, case.holders, Ledger(), "dispatch")
    p, mine = Problem.of(case), case.blocks.range_of(context.rank)
    cut = slice(mine.start, mine.stop)
    given = {"x": p.x[cut], "ids": p.ids[cut], "weights": p.weights[cut]} if context.rank < 2 else {}
    for step in range(1000):
        if step == 3 and context.rank == rank:
            fail(how)
        context.beat()
        exchange.dispatch(op(Kind.DISPATCH)._replace(microbatch=step), case.blocks, **given)


def fail(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "hung":
        time.sleep(600.0)
    elif how == "left":
        os._exit(3)
    raise ZeroDivisionError("loss is not finite")
