"""Capacity: places in the queue of an expert, rows of the padded buffer, and who is dropped."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.runtime.capacity import queue_places, seat


def test_first_choices_come_before_second_ones() -> None:
    """Three tokens, two choices: token 2's first choice is served before token 0's second."""
    ids = torch.tensor([[0, 1], [0, 1], [1, 0]])
    assert queue_places(ids, 2).tolist() == [[0, 1], [1, 2], [0, 2]]


COPIES = st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True), max_size=12)


@given(COPIES, st.integers(1, 3), st.integers(1, 4))
def test_every_copy_has_a_row_of_its_own_or_is_dropped(tokens: list[list[int]], degree: int, rows: int) -> None:
    ids = torch.tensor(tokens, dtype=torch.int64).view(-1, 2)
    seating = seat(ids, queue_places(ids, 5), rows * degree, degree)
    expected = {}
    for expert in range(5):
        queue = [(t, choice) for choice in (0, 1) for t, chosen in enumerate(tokens) if chosen[choice] == expert]
        for place, copy in enumerate(queue[: rows * degree]):
            expected[copy] = (place // rows, expert * rows + place % rows)
    found = {
        (copy // 2, copy % 2): (index, row)
        for index, chunk in enumerate(seating.chunks)
        for copy, row in zip(chunk.copy.tolist(), chunk.row.tolist(), strict=True)
    }
    assert found == expected
    assert seating.dropped == 2 * len(tokens) - len(expected)
