"""One dispatch of 4 MiB per attention rank against a bare all-to-all of the same rows, in turns, on CPU ranks.

The exchange also swaps headers, finds the route, packs rows by destination and
places them on arrival; the bare call moves rows that lie ready. Nothing is
asserted: both share the machine with whatever else runs.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from disagmoe.ops import Kind, Op, Phase
from disagmoe.runtime.child import Context
from disagmoe.runtime.exchange import Exchange, Experts
from disagmoe.runtime.launch import Pool
from disagmoe.runtime.ledger import Ledger
from disagmoe.runtime.merge import Blocks, Sides
from disagmoe.runtime.scheduling import patient_threads
from disagmoe.runtime.transport import Link, make_transport
from disagmoe.runtime.wire import Format

PAYLOAD_BYTES = 4 << 20
WIDTH, DTYPE = 1024, torch.float32
EXPERTS_PER_RANK = 4
ROUNDS, TURNS = 5, 10
AIM = 0.85


class Pair(NamedTuple):
    """Seconds of one exchange and of one bare call, taken one after the other."""

    exchange_s: float
    bare_s: float


class Duel:
    """The exchange and the bare call on one rank: `m` owners of tokens, `n` holders of experts."""

    def __init__(self, context: Context, m: int, n: int, transport: str) -> None:
        me, world = context.rank, m + n
        owners, holders = tuple(range(m)), tuple(range(m, world))
        sides = Sides(owners, holders, "rank", dict.fromkeys(range(world), 0))
        with patient_threads():  # as the trainer's groups are made; the bare call uses the same group
            group = dist.new_group(list(range(world)))
        link = Link(sides.members, me, group, group, context.group_timeout_s)
        wires = make_transport(transport, link)
        experts = Experts(n * EXPERTS_PER_RANK, n)
        form = Format(WIDTH, DTYPE, context.device)
        self.group = group
        self.exchange = Exchange(
            sides, forward=wires, backward=wires, form=form, experts=experts, home="first_expert", ledger=Ledger()
        )
        rows = PAYLOAD_BYTES // form.row_bytes
        each = rows // n  # every token goes to one expert of every holder: one copy per rank after merging
        self.tokens = Blocks.each(owners, each)
        draw = torch.Generator().manual_seed(me)
        ids = torch.randint(0, EXPERTS_PER_RANK, (each, n), generator=draw) + EXPERTS_PER_RANK * torch.arange(n)
        x = torch.randn(each, WIDTH, generator=draw, dtype=DTYPE)
        self.given = {"x": x, "ids": ids, "weights": torch.rand(each, n, generator=draw)} if me < m else {}
        self.sent = [0] * m + [each] * n if me < m else [0] * world
        self.received = [0] * world if me < m else [each] * m + [0] * n
        self.outgoing = torch.randn(sum(self.sent), WIDTH, dtype=DTYPE)
        self.incoming = torch.empty(sum(self.received), WIDTH, dtype=DTYPE)

    def run_exchange(self) -> None:
        route, _ = self.exchange.dispatch(Op(Kind.DISPATCH, Phase.F, 0, 0), self.tokens, **self.given)
        if self.given and list(route.legs[0].upper.splits) != self.sent:
            raise ValueError(f"the exchange sent {route.legs[0].upper.splits} rows, the bare call {self.sent}")

    def run_bare(self) -> None:
        dist.all_to_all_single(self.incoming, self.outgoing, self.received, self.sent, group=self.group)

    def timed(self, what: str) -> float:
        """Seconds from a common start to this rank's end."""
        dist.barrier(self.group)
        begin = time.perf_counter()
        getattr(self, what)()
        return time.perf_counter() - begin


_DUELS: dict[tuple[int, int, str], Duel] = {}
"""Per rank: groups and buffers outlive one call of the pool."""


def turns(context: Context, m: int, n: int, transport: str) -> list[Pair]:
    """`TURNS` exchanges and bare calls by turns, on this rank."""
    key = m, n, transport
    if key not in _DUELS:
        _DUELS[key] = Duel(context, m, n, transport)
    return [Pair(_DUELS[key].timed("run_exchange"), _DUELS[key].timed("run_bare")) for _ in range(TURNS)]


@pytest.mark.parametrize("transport", ["pairs", "union"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 2)])
def test_dispatch(benchmark: Any, capsys: pytest.CaptureFixture[str], m: int, n: int, transport: str) -> None:
    """The table times `TURNS` turns of both; the line printed says what each took on the slowest rank."""
    found: list[Pair] = []
    with Pool(m + n) as pool:

        def once() -> None:
            per_rank = pool.run(turns, m, n, transport)
            found.extend(Pair(*(max(side) for side in zip(*turn, strict=True))) for turn in zip(*per_rank, strict=True))

        once()
        found.clear()
        benchmark.pedantic(once, rounds=ROUNDS)
    exchange_s, bare_s = (statistics.median(side) for side in zip(*found, strict=True))
    best_s = Pair(*(min(side) for side in zip(*found, strict=True)))
    ratio, best = bare_s / exchange_s, best_s.bare_s / best_s.exchange_s
    benchmark.extra_info |= {"exchange_s": exchange_s, "bare_s": bare_s, "ratio": ratio, "ratio_of_best": best}
    with capsys.disabled():
        print(
            f"\n{m} A + {n} F, {transport}, 4 MiB per A: exchange {exchange_s * 1e3:.2f} ms, all_to_all_single "
            f"{bare_s * 1e3:.2f} ms, ratio {ratio:.2f} (of the fastest turns {best:.2f}; aim {AIM})"
        )
