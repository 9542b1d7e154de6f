"""Programs with hand-made graphs, and an exact event simulator to compare the compiled one with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from disagmoe.ops import COMPUTE_KINDS, Kind, Op, Phase, Stream
from disagmoe.plan.dependencies import Graph
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program, Row


@dataclass(frozen=True)
class Task:
    """One operation: where it runs (sender first), how long, after which earlier tasks."""

    kind: Kind
    places: tuple[tuple[int, Stream], ...]
    duration: Fraction
    after: tuple[int, ...] = ()
    link: int = 0
    slows: Fraction = Fraction(1)
    slowed: Fraction = Fraction(1)


def pack(tasks: Sequence[Task], n_workers: int) -> tuple[Program, Pricing, Graph]:
    """Streams in the order of the tasks, dependencies as given; the micro-batch number is the task's index."""
    rows: list[Row] = []
    owner: list[tuple[int, int]] = []  # (task, 0 for its first row and 1 for its second)
    for i, task in enumerate(tasks):
        for end, (worker, stream) in enumerate(task.places):
            peer = task.places[1 - end][0] if len(task.places) == 2 else -1
            rows.append(Row(worker, stream, Op(task.kind, Phase.F, 0, i), peer))
            owner.append((i, end))
    program = Program.from_rows(rows, n_workers=n_workers, n_layers=1, n_microbatches=len(tasks))
    node = program.microbatch.astype(np.int32)
    order = sorted(range(len(rows)), key=lambda r: (rows[r].worker, rows[r].stream, r))
    first, second = np.full(len(tasks), -1, np.int32), np.full(len(tasks), -1, np.int32)
    for position, r in enumerate(order):
        task_index, end = owner[r]
        (second if end else first)[task_index] = position
    successors: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for j in task.after:
            successors[j].append(i)
    graph = Graph(
        node=node,
        n_nodes=len(tasks),
        succ_ptr=np.cumsum([0, *map(len, successors)]).astype(np.int32),
        succ=np.array([i for later in successors for i in later], dtype=np.int32),
        indegree=np.array([len(task.after) for task in tasks], dtype=np.int32),
        first_row=first,
        second_row=second,
    )

    def per_row(values: list[float]) -> np.ndarray:
        return np.array(values)[node]

    pricing = Pricing(
        duration_s=per_row([float(t.duration) for t in tasks]),
        link=np.array([t.link for t in tasks], dtype=np.int8)[node],
        slows_compute=per_row([float(t.slows) for t in tasks]),
        slowed_by_compute=per_row([float(t.slowed) for t in tasks]),
        wire_bytes=np.zeros(len(program)),
    )
    return program, pricing, graph


def exact_times(tasks: Sequence[Task]) -> tuple[list[Fraction], list[Fraction], list[list[Fraction]]]:
    """Start and end of every task and the post of each of its rows, by rational arithmetic on work left.

    Written from the rules (design: streams in order, rates by contention), not from the compiled loop.
    """
    queues: dict[tuple[int, Stream], list[int]] = {}
    for i, task in enumerate(tasks):
        for place in task.places:
            queues.setdefault(place, []).append(i)
    now = Fraction(0)
    left = {i: task.duration for i, task in enumerate(tasks)}
    start: dict[int, Fraction] = {}
    end: dict[int, Fraction] = {}
    running: set[int] = set()
    while left:
        progress = True
        while progress:
            progress = False
            for i, task in enumerate(tasks):
                heads = all(queues[place][0] == i for place in task.places if queues[place])
                if i in left and i not in start and heads and all(j in end for j in task.after):
                    start[i], progress = now, True
                    running.add(i)
            for i in sorted(running):
                if left[i] == 0:
                    end[i], progress = now, True
                    del left[i]
                    running.discard(i)
                    for place in tasks[i].places:
                        queues[place].pop(0)
        if not left:
            break
        rates = {i: _rate(tasks, i, running) for i in running}
        step = min(left[i] / rates[i] for i in running)
        now += step
        for i in running:
            left[i] -= rates[i] * step
    posts = []
    for i, task in enumerate(tasks):
        met = max((end[j] for j in task.after), default=Fraction(0))
        mine = []
        for number, place in enumerate(task.places):
            before = [j for j in range(i) if place in tasks[j].places]
            head = end[before[-1]] if before else Fraction(0)
            mine.append(head if number == 1 else max(head, met))
        posts.append(mine)
    return [start[i] for i in range(len(tasks))], [end[i] for i in range(len(tasks))], posts


def _rate(tasks: Sequence[Task], i: int, running: set[int]) -> Fraction:
    """The contention rules, one operation at a time."""
    task = tasks[i]

    def computes_on(worker: int) -> int:
        return sum(1 for j in running if tasks[j].kind in COMPUTE_KINDS and tasks[j].places[0][0] == worker)

    if task.kind in COMPUTE_KINDS:
        worker = task.places[0][0]
        beside = [
            tasks[j].slows
            for j in running
            if tasks[j].kind not in COMPUTE_KINDS and worker in {w for w, _ in tasks[j].places}
        ]
        return 1 / (computes_on(worker) * max(beside, default=Fraction(1)))

    def uses(j: int) -> set[tuple[int, str]]:
        if tasks[j].kind in COMPUTE_KINDS or tasks[j].link != task.link:
            return set()
        workers = [w for w, _ in tasks[j].places]
        return {(workers[0], "out"), (workers[-1], "in")}

    share = max(sum(1 for j in running if use in uses(j)) for use in uses(i))
    slowed = task.slowed if any(computes_on(w) for w, _ in task.places) else Fraction(1)
    return 1 / (slowed * share)


@st.composite
def task_lists(draw: st.DrawFn, *, contention: bool = True, max_tasks: int = 25) -> tuple[list[Task], int]:
    """Random Programs that cannot deadlock: every stream follows one order of all tasks."""
    n_workers = draw(st.integers(1, 4))
    factors = st.sampled_from([Fraction(1), Fraction(5, 4), Fraction(3, 2), Fraction(3)])
    tasks: list[Task] = []
    for i in range(draw(st.integers(1, max_tasks))):
        shape = draw(st.sampled_from(["compute", "collective"] + ["transfer"] * 2 * (n_workers > 1)))
        a = draw(st.integers(0, n_workers - 1))
        if shape == "compute":
            kind = draw(st.sampled_from([Kind.ATTN, Kind.FFN, Kind.STAGE]))
            places: tuple[tuple[int, Stream], ...] = ((a, draw(st.sampled_from([Stream.COMPUTE, Stream.COMPUTE_B]))),)
        elif shape == "collective":
            kind = draw(st.sampled_from([Kind.DISPATCH, Kind.GRAD_SYNC]))
            places = ((a, draw(st.sampled_from([Stream.COLL, Stream.SYNC]))),)
        else:
            kind = draw(st.sampled_from([Kind.DISPATCH, Kind.COMBINE, Kind.P2P]))
            b = (a + draw(st.integers(1, n_workers - 1))) % n_workers
            backward = draw(st.booleans())
            places = (
                (a, Stream.SEND_B if backward else Stream.SEND),
                (b, Stream.RECV_B if backward else Stream.RECV),
            )
        after = draw(st.lists(st.integers(0, i - 1), unique=True, max_size=3)) if i else []
        tasks.append(
            Task(
                kind,
                places,
                Fraction(draw(st.integers(0, 12)), 4),
                tuple(after),
                link=draw(st.integers(0, 1)),
                slows=draw(factors) if contention and shape != "compute" else Fraction(1),
                slowed=draw(factors) if contention and shape != "compute" else Fraction(1),
            )
        )
    return tasks, n_workers
