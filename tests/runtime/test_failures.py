"""Ranks that disagree, die or hang: everybody ends, and the right one is named."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from disagmoe.runtime.errors import RankError
from disagmoe.runtime.launch import spawn
from tests.runtime.failures import DISAGREEMENTS, disagree, exchange_until, lone_disagreement

SAYS = {
    "operation": ("different operations", "micro-batch 8", "micro-batch 7"),
    "tokens": ("tokens of the micro-batch", "6", "5"),
    "dtype": ("type of the rows", "float32", "float64"),
    "width": ("width of the rows", "3", "4"),
    "rows": ("rows", "rank 1 sends 4 rows", "rank 0 expects 5"),
    "words": ("words of metadata", "rank 1 sends 18 words", "rank 0 expects 20"),
}
OWN_FAULT = {
    "split": "cannot be split into [0, 6]",
    "swapped": "5 rows for rank 0",
    "shape": "[rows, 4]",
    "ids": "allowed 0 to 5",
    "weights": "gate weights must be [5, 2]",
}


@pytest.mark.parametrize("transport", ["pairs", "union"])
def test_a_disagreement_raises_on_both_sides_and_nobody_hangs(pools, transport):
    owner, holder = pools(2).run(disagree, transport)
    assert set(owner) == set(DISAGREEMENTS) == {*SAYS, *OWN_FAULT}
    for what, words in SAYS.items():
        for kind, message, _ in (owner[what], holder[what]):
            assert kind == "ExchangeError"
            for word in (*words, "rank 0", "rank 1"):
                assert word in message.replace("ranks 0 and 1", "rank 0 rank 1").replace(
                    "ranks 1 and 0", "rank 0 rank 1"
                )
    for what, words in OWN_FAULT.items():
        assert owner[what][0] == "ExchangeError" and words in owner[what][1]
        assert "rank 0" in owner[what][1]
        assert holder[what][0] == "PeerLostError"
        assert "rank 0 refused to exchange with rank 1" in holder[what][1]
    # The time-out of the group is 20 s; none of these waited for it.
    assert max(seconds for side in (owner, holder) for _, _, seconds in side.values()) < 5.0


def test_ranks_that_had_no_part_in_a_disagreement_end_too():
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank [123] of 4 failed: ExchangeError: .*width of the rows") as caught:
        spawn(4, lone_disagreement, group_timeout_s=20.0, timeout_s=30.0)
    assert "check_headers" in caught.value.details
    assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize(
    ("rank", "how", "says"),
    [
        (0, "killed", r"was killed by signal 9 \(SIGKILL\)"),
        (3, "killed", r"was killed by signal 9 \(SIGKILL\)"),
        (2, "left", r"ended with exit code 3 and no word"),
        (1, "raised", r"failed: ZeroDivisionError: loss is not finite"),
        (0, "stopped", r"does not answer \(the process is stopped\)"),
        (3, "hung", r"does not answer, it is in .*failures\.py"),
    ],
)
def test_a_rank_that_goes_wrong_is_named_and_nobody_is_left(rank, how, says):
    before = children()
    with pytest.raises(RankError, match=rf"^rank {rank} of 4 {says}") as caught:
        spawn(4, exchange_until, (rank, how), group_timeout_s=1.0, timeout_s=25.0)
    assert caught.value.rank == rank
    assert children() == before


@pytest.mark.parametrize("how", ["stopped", "hung"])
def test_the_launchers_own_deadlines(how):
    """Peers that would wait far longer do not keep the launcher waiting."""
    before = children()
    with pytest.raises(RankError, match=r"^rank 2 of 4 did not finish before the deadline"):
        spawn(4, exchange_until, (2, how), group_timeout_s=60.0, timeout_s=1.5)
    with pytest.raises(RankError, match=r"^rank 2 of 4 gave no sign of life for 1 s"):
        spawn(4, exchange_until, (2, how), group_timeout_s=60.0, silence_s=1.0)
    assert children() == before


def children():
    """Processes whose parent this one is."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.add(stat.parent.name)
    return found
