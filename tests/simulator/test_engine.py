"""The simulator against times worked out by hand and against an exact reference."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_programs import Task, exact_times, pack, task_lists

from disagmoe.kernels import compute_rate, transfer_rate
from disagmoe.ops import Kind, Stream
from disagmoe.simulator import DeadlockError, simulate
from disagmoe.timeline.timeline import Timeline


def task(kind: Kind, *places: tuple[int, Stream], s: float, **options: object) -> Task:
    return Task(kind, places, Fraction(s), **options)  # type: ignore[arg-type]


def run(tasks: list[Task], n_workers: int = 1) -> Timeline:
    return simulate(*pack(tasks, n_workers))


def spans(timeline: Timeline, stream: Stream | None = None) -> dict[int, tuple[float, float]]:
    """Start and end of every task (its index is the micro-batch number)."""
    program = timeline.program
    rows = range(len(program)) if stream is None else np.flatnonzero(program.stream == int(stream))
    return {int(program.microbatch[r]): (timeline.start_s[r], timeline.end_s[r]) for r in rows}


def posts(timeline: Timeline, stream: Stream) -> dict[int, float]:
    rows = np.flatnonzero(timeline.program.stream == int(stream))
    return {int(timeline.program.microbatch[r]): float(timeline.post_s[r]) for r in rows}


C, CB, COLL, SYNC = Stream.COMPUTE, Stream.COMPUTE_B, Stream.COLL, Stream.SYNC
SEND, RECV, SEND_B, RECV_B = Stream.SEND, Stream.RECV, Stream.SEND_B, Stream.RECV_B


# --- order and readiness, without contention ---------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=30))
def test_a_chain_is_the_exact_running_sum(durations: list[float]) -> None:
    timeline = run([task(Kind.ATTN, (0, C), s=d) for d in durations])
    ends = [sum(durations[: i + 1]) for i in range(len(durations))]
    assert timeline.end_s.tolist() == ends
    assert timeline.start_s.tolist() == [0.0, *ends[:-1]]
    assert timeline.post_s.tolist() == timeline.start_s.tolist()


def test_workers_run_in_parallel() -> None:
    timeline = run([task(Kind.ATTN, (w, C), s=3 + w) for w in range(3)], 3)
    assert spans(timeline) == {0: (0, 3), 1: (0, 4), 2: (0, 5)}


def test_a_dependency_is_waited_for_and_a_stream_is_in_order() -> None:
    # Worker 1 heads with task 2, which needs task 1 (ends at 5); task 3 is free but stands behind it.
    timeline = run(
        [
            task(Kind.ATTN, (0, C), s=2),
            task(Kind.ATTN, (0, C), s=3),
            task(Kind.FFN, (1, C), s=1, after=(1,)),
            task(Kind.FFN, (1, C), s=1),
        ],
        2,
    )
    assert spans(timeline) == {0: (0, 2), 1: (2, 5), 2: (5, 6), 3: (6, 7)}
    assert posts(timeline, C) == {0: 0, 1: 2, 2: 5, 3: 6}


def test_a_transfer_is_a_rendezvous_that_holds_both_streams() -> None:
    # Worker 2 receives task 3 (from worker 1, ready at 10) before task 2 (from worker 0, ready at 3).
    tasks = [
        task(Kind.ATTN, (0, C), s=3),
        task(Kind.ATTN, (1, C), s=10),
        task(Kind.DISPATCH, (1, SEND), (2, RECV), s=1, after=(1,)),
        task(Kind.DISPATCH, (0, SEND), (2, RECV), s=2, after=(0,)),
        task(Kind.DISPATCH, (0, SEND), (1, RECV), s=4, after=(0,)),  # behind task 3 on worker 0's send stream
        task(Kind.FFN, (2, C), s=5, after=(3,)),
    ]
    timeline = run(tasks, 3)
    assert spans(timeline) == {0: (0, 3), 1: (0, 10), 2: (10, 11), 3: (11, 13), 4: (13, 17), 5: (13, 18)}
    # A sender is ready when its data are; a receiver as soon as its stream is free.
    assert posts(timeline, SEND) == {2: 10, 3: 3, 4: 13}
    assert posts(timeline, RECV) == {2: 0, 3: 11, 4: 0}
    assert timeline.step_s == 18


def test_operations_without_duration_take_no_time_and_do_not_disturb() -> None:
    tasks = [
        task(Kind.ATTN, (0, C), s=2),
        task(Kind.DISPATCH, (0, SEND), (1, RECV), s=0, after=(0,), slows=Fraction(3), slowed=Fraction(3)),
        task(Kind.DISPATCH, (0, SEND), (1, RECV), s=0, after=(0,)),
        task(Kind.FFN, (1, C), s=0, after=(1, 2)),
        task(Kind.ATTN, (0, C), s=2),
        task(Kind.FFN, (1, C), s=1, after=(3,)),
    ]
    assert spans(run(tasks, 2)) == {0: (0, 2), 1: (2, 2), 2: (2, 2), 3: (2, 2), 4: (2, 4), 5: (2, 3)}
    assert run([task(Kind.ATTN, (0, C), s=0)] * 100).step_s == 0.0


def test_an_empty_program_takes_no_time() -> None:
    assert run([]).step_s == 0.0


# --- contention, worked out by hand ------------------------------------------------------------------------


def test_compute_and_communication_slow_each_other() -> None:
    # While both run: communication at 1/1.5 needs 4 * 1.5 = 6 s; compute at 1/1.25 has 6 * 0.8 = 4.8 of 10 s done,
    # the other 5.2 s run undisturbed.
    tasks = [
        task(Kind.ATTN, (0, C), s=10),
        task(Kind.DISPATCH, (0, COLL), s=4, slows=Fraction(5, 4), slowed=Fraction(3, 2)),
    ]
    assert spans(run(tasks)) == {0: (0, pytest.approx(11.2, rel=1e-12)), 1: (0, pytest.approx(6, rel=1e-12))}


def test_communication_outlives_compute() -> None:
    # Compute: 4 * 1.25 = 5 s. Communication: 5 / 1.5 = 10/3 of 10 s done by then, the rest at full speed: 5 + 20/3.
    tasks = [
        task(Kind.ATTN, (0, C), s=4),
        task(Kind.DISPATCH, (0, COLL), s=10, slows=Fraction(5, 4), slowed=Fraction(3, 2)),
    ]
    assert spans(run(tasks)) == {0: (0, pytest.approx(5, rel=1e-12)), 1: (0, pytest.approx(35 / 3, rel=1e-12))}


def test_a_transfer_is_slowed_by_compute_on_either_end_and_slows_both() -> None:
    # Compute only at the receiver (worker 1). Transfer 2 * 2 = 4 s; compute has 4 / 1.6 = 2.5 of 3 s done then.
    tasks = [
        task(Kind.DISPATCH, (0, SEND), (1, RECV), s=2, slows=Fraction(8, 5), slowed=Fraction(2)),
        task(Kind.FFN, (1, C), s=3),
        task(Kind.FFN, (2, C), s=3),  # a worker that takes no part is not slowed
    ]
    assert spans(run(tasks, 3)) == {0: (0, 4), 1: (0, pytest.approx(4.5, rel=1e-12)), 2: (0, 3)}


def test_the_largest_slow_down_counts_once() -> None:
    # Two collectives on different links: compute runs at 1/2 (not 1/3) for 3 s, then at 1/1.5.
    tasks = [
        task(Kind.ATTN, (0, C), s=3),
        task(Kind.DISPATCH, (0, COLL), s=3, slows=Fraction(2)),
        task(Kind.GRAD_SYNC, (0, SYNC), s=9, link=1, slows=Fraction(3, 2)),
    ]
    assert spans(run(tasks)) == {0: (0, pytest.approx(3 + 1.5 * 1.5)), 1: (0, 3), 2: (0, 9)}


def test_two_compute_streams_share_the_rate() -> None:
    # Both at 1/2 until the 4 s operation ends at 8; the other has 6 of 10 s left.
    tasks = [task(Kind.ATTN, (0, C), s=10), task(Kind.ATTN, (0, CB), s=4)]
    assert spans(run(tasks)) == {0: (0, 14), 1: (0, 8)}


def test_collectives_of_a_worker_share_a_link_of_one_class() -> None:
    both = [task(Kind.DISPATCH, (0, COLL), s=4), task(Kind.GRAD_SYNC, (0, SYNC), s=6)]
    assert spans(run(both)) == {0: (0, 8), 1: (0, 10)}
    assert spans(run([both[0], replace(both[1], link=1)])) == {0: (0, 4), 1: (0, 6)}


def test_a_link_carries_both_directions_at_once() -> None:
    tasks = [task(Kind.DISPATCH, (0, SEND), (1, RECV), s=4), task(Kind.COMBINE, (1, SEND), (0, RECV), s=6)]
    assert spans(run(tasks, 2)) == {0: (0, 4), 1: (0, 6)}
    # A collective uses both directions of its worker, so it shares with either.
    collective = task(Kind.GRAD_SYNC, (0, SYNC), s=5)
    # 0: shares until 8 (4 s at 1/2). Collective: 4 of 5 s by then, still sharing with 1 (4 of 6 s): ends at 10,
    # when 1 has 1 s left.
    assert spans(run([*tasks, collective], 2)) == {0: (0, 8), 1: (0, 11), 2: (0, 10)}


def test_the_busier_end_decides_the_share() -> None:
    # 0 -> 2 and 1 -> 2 share worker 2's way in; 0 -> 3 shares worker 0's way out with the first.
    tasks = [
        task(Kind.DISPATCH, (0, SEND), (2, RECV), s=2),
        task(Kind.DISPATCH, (1, SEND_B), (2, RECV_B), s=3),
        task(Kind.DISPATCH, (0, SEND_B), (3, RECV_B), s=4),
    ]
    # All at 1/2 until 4, when the first is done; then 1 s and 2 s are left at full speed.
    assert spans(run(tasks, 4)) == {0: (0, 4), 1: (0, 5), 2: (0, 6)}


def test_the_rate_rules_are_the_ones_of_the_loop() -> None:
    assert compute_rate(1, 1.0) == 1.0
    assert compute_rate(2, 1.25) == pytest.approx(0.4)
    assert transfer_rate(1.5, False, 1) == 1.0
    assert transfer_rate(1.5, True, 2) == pytest.approx(1 / 3)


# --- against the exact reference ---------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(task_lists())
def test_equals_the_exact_reference(case: tuple[list[Task], int]) -> None:
    tasks, n_workers = case
    program, pricing, graph = pack(tasks, n_workers)
    timeline = simulate(program, pricing, graph)
    start, end, post = exact_times(tasks)
    for row in range(len(program)):
        i = int(graph.node[row])
        side = int(graph.first_row[i] != row)
        expected = [float(x) for x in (start[i], end[i], post[i][side])]
        found = [timeline.start_s[row], timeline.end_s[row], timeline.post_s[row]]
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


ALONE = {CB: C, SEND_B: SEND, RECV_B: RECV}


@settings(max_examples=100, deadline=None)
@given(task_lists(contention=False), st.floats(0.1, 3.0))
def test_without_sharing_times_are_plain_sums(case: tuple[list[Task], int], scale: float) -> None:
    """One stream of each sort and factors of 1: every operation ends at exactly start + duration."""
    tasks, n_workers = case
    alone = [
        replace(t, places=tuple((w, ALONE.get(stream, stream)) for w, stream in t.places))
        for t in tasks
        if t.places[0][1] not in (COLL, SYNC)
    ]
    program, pricing, graph = pack([replace(t, after=()) for t in alone], n_workers)
    pricing = replace(pricing, duration_s=pricing.duration_s * scale)
    timeline = simulate(program, pricing, graph)
    assert timeline.end_s.tolist() == (timeline.start_s + pricing.duration_s).tolist()


@settings(max_examples=50, deadline=None)
@given(task_lists())
def test_equal_inputs_give_equal_bytes(case: tuple[list[Task], int]) -> None:
    runs = [run(*case) for _ in range(2)]
    for name in ("start_s", "end_s", "post_s"):
        assert getattr(runs[0], name).tobytes() == getattr(runs[1], name).tobytes()


def test_storage_order_of_workers_does_not_matter() -> None:
    tasks = [
        task(Kind.ATTN, (0, C), s=5),
        task(Kind.DISPATCH, (0, SEND), (1, RECV), s=2, after=(0,), slows=Fraction(5, 4), slowed=Fraction(3, 2)),
        task(Kind.ATTN, (0, C), s=5),
        task(Kind.FFN, (1, C), s=5, after=(1,)),
    ]
    mirrored = [replace(t, places=tuple((1 - w, stream) for w, stream in t.places)) for t in tasks]
    assert spans(run(tasks, 2)) == spans(run(mirrored, 2))


# --- faults ------------------------------------------------------------------------------------------------


def test_a_deadlock_names_the_blocked_operations() -> None:
    # Two circles of dependencies: 0 waits for 3 and 3 for 0, 1 waits for 2 and 2 for 1.
    tasks = [
        task(Kind.DISPATCH, (0, SEND), (1, RECV), s=1, after=(3,)),
        task(Kind.COMBINE, (1, SEND), (0, RECV), s=1, after=(2,)),
        task(Kind.ATTN, (0, C), s=1, after=(1,)),
        task(Kind.FFN, (1, C), s=1),
    ]
    tasks[3] = replace(tasks[3], after=(0,))
    with pytest.raises(DeadlockError, match=r"deadlock, 4 of 4 operations left: .*A0F2@w0.* waits for its inputs") as e:
        run(tasks, 2)
    assert "\n" not in str(e.value)
    assert isinstance(e.value, ValueError)


def test_a_swapped_receive_is_a_deadlock_waiting_for_its_peer() -> None:
    program, pricing, graph = pack(
        [task(Kind.DISPATCH, (0, SEND), (1, RECV), s=1), task(Kind.DISPATCH, (0, SEND), (1, RECV), s=1)], 2
    )
    second = graph.second_row[::-1].copy()
    node = graph.node.copy()
    node[second] = [0, 1]
    with pytest.raises(DeadlockError, match=r"D0F0 w0>w1 \(SEND\) waits for its peer"):
        simulate(program, pricing, replace(graph, node=node, second_row=second))


def test_a_long_deadlock_message_is_cut() -> None:
    tasks = [task(Kind.ATTN, (w, C), s=1, after=((w + 1) % 20,)) for w in range(20)]
    with pytest.raises(DeadlockError, match=r"and 14 more streams$"):
        run(tasks, 20)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("duration_s", float("nan"), r"duration_s of A0F0@w0 \(COMPUTE\) is nan; it must be a finite number"),
        ("duration_s", -1.0, "is -1.0; it must be a finite number of seconds >= 0"),
        ("duration_s", float("inf"), "is inf"),
        ("slows_compute", 0.5, "must be a finite factor >= 1"),
        ("slowed_by_compute", float("nan"), "slowed_by_compute of"),
        ("link", 2, "a link class from 0 to 1"),
    ],
)
def test_a_price_without_meaning_is_refused(field: str, value: float, message: str) -> None:
    program, pricing, graph = pack([task(Kind.ATTN, (0, C), s=1), task(Kind.ATTN, (0, C), s=1)], 1)
    values = getattr(pricing, field).copy()
    values[0] = value
    with pytest.raises(ValueError, match=message):
        simulate(program, replace(pricing, **{field: values}), graph)


def test_both_ends_of_a_transfer_must_agree() -> None:
    program, pricing, graph = pack([task(Kind.DISPATCH, (0, SEND), (1, RECV), s=1)], 2)
    with pytest.raises(ValueError, match=r"duration_s of D0F0 w0>w1 \(SEND\) is 1.0 where it is sent and 2.0"):
        simulate(program, replace(pricing, duration_s=np.array([1.0, 2.0])), graph)
    with pytest.raises(ValueError, match="has 2 rows"):
        simulate(program, replace(pricing, duration_s=np.array([1.0])), graph)
