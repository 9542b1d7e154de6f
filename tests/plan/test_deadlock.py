"""Deadlocks: named by their cycle, and found exactly where a slow executor gets stuck."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagmoe.plan.dependencies import PlanError, build_graph
from disagmoe.plan.program import Program
from disagmoe.plan.text import from_text
from disagmoe.plan.verify import verify
from tests.plan.handwritten import COLOCATED, DISAGGREGATED, SPLIT, TUTEL, edited, repacked


def test_a_deadlock_across_workers_is_named_by_its_cycle() -> None:
    """Sends match receives and the dependencies have no cycle; only the in-order streams block each other."""
    crossed = edited(
        DISAGGREGATED,
        ("D0F0>1 D0F1>1 D1F0>1", "D0F0>1 D1F0>1 D0F1>1"),
        ("D0F0<0 D0F1<0 D1F0<0", "D0F0<0 D1F0<0 D0F1<0"),
        ("C0F0>0 C0F1>0", "C0F1>0 C0F0>0"),
        ("C0F0<1 C0F1<1", "C0F1<1 C0F0<1"),
    )
    with pytest.raises(PlanError) as error:
        verify(crossed)
    assert str(error.value) == (
        "deadlock: A1F0@w0 -> D1F0 w0>w1 -> D0F1 w0>w1 -> M0F1@w1 -> C0F1 w1>w0 -> C0F0 w1>w0 -> A1F0@w0"
    )


def test_a_long_cycle_is_cut_in_the_middle() -> None:
    """The last of 40 operations comes first: all 40 wait in a ring, and the message counts what it leaves out."""
    forward = [f"{kind}{layer}F0" for layer in range(20) for kind in "AM"]
    backward = [token.replace("F", "B") for token in reversed(forward)]
    order = " ".join([forward[-1], *forward[:-1], *backward])
    with pytest.raises(PlanError) as error:
        verify(from_text(f"program workers=1 layers=20 microbatches=1 chunks=1\nw0 COMPUTE: {order}\n"))
    named = [f"{token}@w0" for token in [forward[-1], *forward]]  # the ring, closed
    assert str(error.value) == "deadlock: " + " -> ".join([*named[:6], "(28 more)", *named[-7:]])


def runs_to_its_end(program: Program) -> bool:
    """Execute step by step: start anything whose data is there and that heads all its streams."""
    graph = build_graph(program)
    needs: dict[int, set[int]] = {n: set() for n in range(graph.n_nodes)}
    for n in range(graph.n_nodes):
        for m in graph.succ[graph.succ_ptr[n] : graph.succ_ptr[n + 1]]:
            needs[int(m)].add(n)
    streams: dict[tuple[int, int], list[int]] = {}
    for row in range(len(program)):
        streams.setdefault((int(program.worker[row]), int(program.stream[row])), []).append(int(graph.node[row]))
    done: set[int] = set()
    progress = True
    while progress:
        progress = False
        for queue in streams.values():
            if queue and needs[queue[0]] <= done:
                node = queue[0]
                holders = [q for q in streams.values() if node in q]
                if all(q[0] == node for q in holders):
                    for q in holders:
                        q.pop(0)
                    done.add(node)
                    progress = True
    return len(done) == graph.n_nodes


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([DISAGGREGATED, TUTEL, SPLIT, COLOCATED]), st.integers(0, 3), st.randoms(use_true_random=False))
def test_deadlocks_agree_with_step_by_step_execution(text: str, swaps: int, rng: random.Random) -> None:
    """Swap neighbours on random streams: refused exactly if a slow executor gets stuck."""
    program = from_text(text)
    rows = list(program.rows())
    for _ in range(swaps):
        i = rng.randrange(len(rows) - 1)
        if rows[i][:2] == rows[i + 1][:2]:
            rows[i], rows[i + 1] = rows[i + 1], rows[i]
    changed = repacked(program, rows)
    if runs_to_its_end(changed):
        verify(changed)
    else:
        with pytest.raises(PlanError, match=r"^deadlock: |^swapped receive: "):
            verify(changed)
