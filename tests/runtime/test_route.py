"""Index lists of a route, the sums over them, and who passes what to whom. No processes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.runtime.errors import ExchangeError
from disagmoe.runtime.exchange import Experts
from disagmoe.runtime.merge import Blocks, Sides, near_equal
from disagmoe.runtime.party import Party
from disagmoe.runtime.route import End, Load, arrive, depart, return_end
from disagmoe.runtime.transport import Slab
from disagmoe.runtime.wire import Format

FORM = Format(2, torch.float64, torch.device("cpu"))


@given(st.integers(0, 50), st.integers(1, 9))
def test_blocks_are_near_equal_and_contiguous(total, parts):
    blocks = Blocks.split(range(10, 10 + parts), total)
    assert sum(blocks.counts) == total
    assert max(blocks.counts) - min(blocks.counts) <= 1
    numbers = [n for rank in blocks.ranks for n in blocks.range_of(rank)]
    assert numbers == list(range(total))
    owner = [blocks.ranks[i] for i in blocks.index_of(torch.arange(total)).tolist()]
    assert all(n in blocks.range_of(rank) for n, rank in enumerate(owner))
    assert blocks.range_of(99) == range(0)


def test_experts_that_do_not_divide():
    """6 on 4 ranks are placed 2, 2, 1, 1; 2 on 4 ranks are refused."""
    assert near_equal(6, 4) == (2, 2, 1, 1)
    sides = Sides((0,), (1, 2, 3, 4), "rank", dict.fromkeys(range(5), 0))
    party = Party(sides, 3, FORM, Experts(6, 2), "first_expert")
    assert party.expert_holder.tolist() == [0, 0, 1, 1, 2, 3]
    assert list(party.placed.range_of(3)) == [4]
    with pytest.raises(ValueError, match="2 experts on 4 ranks: each rank needs at least one"):
        Party(sides, 3, FORM, Experts(2, 1), "first_expert")


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 4))
def test_going_up_is_the_transpose_of_going_down(order, width):
    """add_up adds what pack copied: <pack x, y> = <x, add_up y>, and equals index_add."""
    end = End(7, (len(order),), torch.tensor(order, dtype=torch.int64))
    draw = torch.Generator().manual_seed(len(order))
    x = torch.randn(7, width, generator=draw, dtype=torch.float64)
    y = torch.randn(len(order), width, generator=draw, dtype=torch.float64)
    up = end.add_up(y, torch.float64)
    assert torch.allclose(up, torch.zeros_like(x).index_add(0, end.order, y))
    assert torch.allclose((end.pack(x).packed * y).sum(), (x * up).sum())


def test_bf16_is_added_in_fp32():
    """1 + 256 values of 1/256: in bf16, one after the other, they would all be lost."""
    wire = torch.tensor([1.0] + [1 / 256] * 256, dtype=torch.bfloat16).view(-1, 1)
    end = End(1, (257,), torch.zeros(257, dtype=torch.int64))
    assert end.add_up(wire, torch.float32).item() == 2.0
    assert end.add_up(wire, torch.float32).dtype == torch.bfloat16


def load(tokens, copies, home, experts):
    row = torch.tensor([r for r, held in enumerate(copies) for _ in held], dtype=torch.int64)
    expert = torch.tensor([e for held in copies for e in held], dtype=torch.int64)
    weight = torch.arange(1.0, 1.0 + len(expert), dtype=torch.float64)
    return Load(torch.tensor(tokens), torch.tensor(home), row, expert, weight)


@pytest.mark.parametrize("merged", [True, False])
def test_a_departure_describes_itself(merged):
    """Experts 0, 1 on holder 0 (member 1), 2, 3 on holder 1 (member 2); token 11 goes to 3, 0; token 12 to 1, 0."""
    mine = load([11, 12], [[3, 0], [1, 0]], [1, 0], 4)
    leaving = depart(mine, torch.tensor([1, 2]), torch.tensor([0, 0, 1, 1]), 3, merged=merged)
    if merged:
        assert leaving.rows.order.tolist() == [0, 1, 0] and leaving.rows.splits == (0, 2, 1)
    else:
        assert leaving.rows.order.tolist() == [0, 1, 1, 0] and leaving.rows.splits == (0, 3, 1)
    # One rank takes all of it: metadata back to a load.
    words = Slab(leaving.words.data, leaving.words.splits)
    found, copies = arrive(words, leaving.rows.splits, FORM, (0, 1, 2), 9)
    assert found.tokens.tolist() == [mine.tokens[r] for r in leaving.rows.order.tolist()]
    assert found.expert.tolist() == [0, 1, 0, 3] and found.weight.tolist() == [2.0, 3.0, 4.0, 1.0]
    assert copies == (0, 3, 1)
    if merged:
        assert found.home.tolist() == [1, 0, 1] and found.row.tolist() == [0, 1, 1, 2]
    else:
        # Token 12 is at home once, with the first of its two copies there.
        assert found.home.tolist() == [-1, 0, -1, 1] and found.row.tolist() == [0, 1, 2, 3]


def test_metadata_that_does_not_fit_names_both_ranks():
    mine = load([0, 1], [[0], [1]], [0, 0], 2)
    leaving = depart(mine, torch.tensor([1]), torch.tensor([0, 0]), 2, merged=True)
    with pytest.raises(ExchangeError, match="rank 6 sent rank 9 3 rows with 10 words"):
        arrive(leaving.words, (0, 3), FORM, (5, 6), 9)
    words = leaving.words.data.clone()
    words[1] += 1 << 16  # row 0 claims a second copy
    with pytest.raises(ExchangeError, match="rank 6 sent rank 9 2 expert ids for 3 copies"):
        arrive(Slab(words, leaving.words.splits), (0, 2), FORM, (5, 6), 9)


def test_experts_out_of_reach():
    with pytest.raises(ExchangeError, match=r"experts \[1\] cannot be reached"):
        depart(load([0], [[0, 1]], [0], 2), torch.tensor([0, -1]), torch.tensor([0, 1]), 1, merged=True)


def test_rows_go_back_by_member_and_stay_in_order():
    end, words = return_end(torch.tensor([5, 2, 9, 3]), torch.tensor([1, 0, 1, 0]), 2)
    assert end.order.tolist() == [1, 3, 0, 2] and end.splits == (2, 2)
    assert words.data.tolist() == [2, 3, 5, 9]
    rows = torch.arange(4.0).view(4, 1)
    assert torch.equal(end.place(end.pack(rows).packed), rows)
    in_order, _ = return_end(torch.tensor([2, 3]), torch.tensor([0, 1]), 2)
    assert in_order.order is None


def test_gateways():
    """Owners 0, 1 on node 0; holders 2, 3 on node 1 and 4, 5 on node 2: owner i goes through holder i of each node."""
    nodes = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    sides = Sides((0, 1), (2, 3, 4, 5), "node", nodes)
    assert [[sides.gateway(o, n) for n in (1, 2)] for o in (0, 1)] == [[2, 4], [3, 5]]
    assert sides.peers(0, 0) == (2, 4) and sides.peers(2, 0) == (0,) and sides.peers(0, 1) == ()
    assert sides.peers(2, 1) == (3,) and sides.reach(0, 0) == (2, 2, 4, 4) and sides.reach(3, 1) == (2, 3, -1, -1)
    # Shared nodes: in its own node an owner serves the holders itself.
    shared = Sides((0, 1), (2, 3), "node", {0: 0, 2: 0, 1: 1, 3: 1})
    assert shared.gateway(0, 0) == 0 and shared.gateway(0, 1) == 3
    assert shared.peers(0, 1) == (2,) and shared.peers(0, 0) == (3,)
    with pytest.raises(ValueError, match="unknown merge 'rack'; known: none, rank, node"):
        Sides((0,), (1,), "rack", {0: 0, 1: 0})


def test_homes_that_make_no_sense():
    sides = Sides((0,), (1,), "rank", {0: 0, 1: 0})
    for experts, home, says in (
        (None, "first_expert", "does not go with a dense layer"),
        (Experts(4, 2), "blocks", "does not go with experts"),
        (Experts(4, 2), "source", "owners that are holders"),
        (Experts(4, 2), "moon", "unknown home"),
    ):
        with pytest.raises(ValueError, match=says):
            Party(sides, 0, FORM, experts, home)
