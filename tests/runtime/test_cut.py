"""The cut of the batch: every token is somebody's exactly once, whatever divides and whatever does not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.runtime.cut import Cut, StepBatch


@pytest.mark.parametrize(
    ("sequences", "replicas", "microbatches", "ranks", "expected"),
    [
        (10, 1, 2, 4, [(2, 1, 1, 1), (2, 1, 1, 1)]),  # batch 10 on 4 ranks, micro-batches of at most 2 sequences each
        (8, 1, 3, 1, [(3,), (3,), (2,)]),
        (2, 1, 1, 4, [(1, 1, 0, 0)]),
        (7, 2, 2, 2, [(1, 1), (1, 1), (1, 1), (1, 0)]),
    ],
)
def test_batches_that_do_not_divide(
    sequences: int, replicas: int, microbatches: int, ranks: int, expected: list[tuple[int, ...]]
) -> None:
    cut = Cut(sequences, 3, replicas, microbatches)
    found = [cut.shares(i, b, ranks) for i in range(replicas) for b in range(microbatches)]
    assert found == [tuple(3 * n for n in share) for share in expected]
    assert sum(map(sum, found)) == cut.tokens == 3 * sequences


def test_a_micro_batch_needs_a_sequence() -> None:
    with pytest.raises(ValueError, match=r"3 sequences cannot be cut into 4 micro-batches \(2 replicas x 2\)"):
        Cut(3, 5, 2, 2)


@given(
    st.integers(1, 20), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4)
)
def test_every_token_and_its_target_are_fetched_once(
    sequences: int, seq: int, replicas: int, microbatches: int, ranks: int, blocks: int
) -> None:
    if sequences < replicas * microbatches:
        return
    data = torch.arange(sequences * (seq + 1)).view(sequences, seq + 1)
    cut = Cut(sequences, seq, replicas, microbatches)
    batch = StepBatch(cut, lambda wanted: data[wanted.start : wanted.stop])
    inputs, targets = [], []
    for replica in range(replicas):
        for b in range(microbatches):
            first = 0
            for share in cut.shares(replica, b, ranks):
                inputs.append(batch.inputs(replica, b, range(first, first + share)))
                first += share
            ends = [first * i // blocks for i in range(blocks + 1)]  # an expert group's blocks cut sequences
            targets += [batch.targets(replica, b, range(a, z)) for a, z in pairwise(ends)]
    assert torch.equal(torch.cat(inputs), data[:, :-1].flatten())
    assert torch.equal(torch.cat(targets), data[:, 1:].flatten())
