"""Lanes: in order, beside compute, and an error ends everything that follows."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from disagmoe.ops import Kind, Phase
from disagmoe.runtime.errors import PeerLostError
from disagmoe.runtime.lane import Lane
from disagmoe.runtime.ledger import Ledger
from tests.runtime.cases import Bench, Case, Problem, op


@pytest.fixture
def lane():
    lane = Lane("test")
    yield lane
    lane.close()


def test_one_after_the_other(lane):
    order = []
    gate = threading.Event()
    first = lane.post("first", lambda: (gate.wait(5.0), order.append(1)))
    second = lane.post("second", order.append, 2)
    assert not second.done
    gate.set()
    second.wait(5.0)
    assert order == [1, 2] and first.done
    assert first.posted_s <= first.started_s <= first.finished_s <= second.started_s


def test_results_and_keyword_arguments(lane):
    assert lane.post("sum", lambda a, *, b: a + b, 1, b=2).wait() == 3


def test_an_error_fails_what_follows(lane):
    def fail():
        raise KeyError("rows")

    broken, after = lane.post("broken", fail), lane.post("after", int)
    for ticket in (broken, after):
        with pytest.raises(KeyError, match="rows"):
            ticket.wait(5.0)


def test_waiting_has_an_end(lane):
    gate = threading.Event()
    ticket = lane.post("DISPATCH F of layer 0", gate.wait, 5.0)
    with pytest.raises(PeerLostError, match=r"DISPATCH F of layer 0 was not through after 0\.05 s"):
        ticket.wait(0.05)
    gate.set()


def test_exchanges_run_beside_compute_and_in_opposite_orders(pools):
    """Two exchanges on two lanes, forward and backward at once, posted in opposite orders on the two sides."""
    for computed, equal in pools(2).run(overlapping):
        assert computed and equal


def overlapping(context):
    bench = Bench(context)
    case = Case(1, 1, "rank", tokens=(300,), width=64)
    p = Problem.of(case)
    one = bench.exchange(case, case.owners, case.holders, Ledger(), "one")
    two = bench.exchange(case, case.owners, case.holders, Ledger(), "two")
    given = {"x": p.x, "ids": p.ids, "weights": p.weights} if context.rank == 0 else {}
    route, arrived = one.dispatch(op(Kind.DISPATCH), case.blocks, **given)
    grads = (None, None) if arrived is None else (arrived.rows, arrived.weights)
    lanes = [Lane("forward"), Lane("backward")]
    number = op(Kind.DISPATCH)._replace(microbatch=8)

    def forward():
        return lanes[0].post("forward", two.dispatch, number, case.blocks, **given)

    def backward():
        return lanes[1].post("backward", one.dispatch_backward, op(Kind.DISPATCH, Phase.B), route, *grads)

    posts = (forward, backward) if context.rank == 0 else (backward, forward)
    tickets = [post() for post in posts]
    begin = time.perf_counter()
    product = torch.randn(64, 64)
    for _ in range(20):  # compute goes on, whatever the lanes do
        product = product @ torch.eye(64)
    computed = time.perf_counter() - begin < 5.0 and bool(product.isfinite().all())
    results = [ticket.wait(10.0) for ticket in tickets]
    back = results[posts.index(backward)]
    equal = back is None
    if back is not None:
        # Holder 1 sent its rows back as their own gradients; there is one holder, so one copy of each row.
        equal = torch.equal(back[0], p.x) and torch.equal(back[1], p.weights)
    for lane in lanes:
        lane.close()
    bench.destroy()
    dist.barrier()
    return computed, equal
