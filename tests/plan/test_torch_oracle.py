"""The interleaved order equals the one PyTorch generates (torch.distributed.pipelining)."""

from __future__ import annotations

import pytest

from disagmoe.plan.orders import interleaved
from tests.plan.event_loops import Action, actions

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_order(p: int, v: int, m: int, rank: int) -> list[Action]:
    """One rank's order by torch's own generator, called without building stages or process groups."""
    schedule = object.__new__(schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size = p
    schedule.n_local_stages = v
    schedule._n_microbatches = m
    schedule.microbatches_per_round = m // max(1, m // p)
    letter = {schedules.FORWARD: "F", schedules.FULL_BACKWARD: "B"}
    return [
        (letter[a.computation_type], a.stage_index // p, a.microbatch_index)
        for a in schedule._calculate_single_rank_operations(rank)
        if a is not None
    ]


@pytest.mark.parametrize(
    ("p", "v", "m"),
    [(2, 2, 4), (4, 2, 8), (4, 2, 4), (4, 3, 12), (8, 2, 16), (3, 5, 9), (4, 4, 32), (4, 2, 10), (3, 2, 8), (4, 2, 3)],
)
def test_interleaved_order_equals_torch(p: int, v: int, m: int) -> None:
    """torch's group is m // max(1, m // p): p itself, or larger where m is not a multiple of p."""
    ours = interleaved(p, v, m, max(p, m // max(1, m // p)))
    for rank in range(p):
        assert actions(ours[rank]) == torch_order(p, v, m, rank)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 10), (4, 2, 3), (8, 2, 18)])
def test_default_group_agrees_where_torch_enlarges_its_rounds(p: int, v: int, m: int) -> None:
    assert [actions(o) for o in interleaved(p, v, m)] == [torch_order(p, v, m, r) for r in range(p)]
