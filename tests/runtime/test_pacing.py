"""Paced steps: real ranks, real gradients, and the times that the simulator gives.

With more slack than any host needs, logical times do not depend on the machine where nothing slows anything else: what
is left is the order of the operations and the times in messages, and those must give the simulator's times exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from disagmoe.ops import COMM_KINDS, Kind, Phase, Stream
from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.dependencies import build_graph, is_wait
from disagmoe.plan.plan import Plan
from disagmoe.plan.pricing import Pricing
from disagmoe.plan.program import Program
from disagmoe.runtime.child import Context
from disagmoe.runtime.groups import Groups
from disagmoe.runtime.measured import gather_timeline
from disagmoe.runtime.pacing import HOLD, MOST_SLACK, Pace, Pacer, Pacing
from disagmoe.runtime.script import script_of
from disagmoe.runtime.step import StepRunner
from disagmoe.runtime.traffic import Logbook, Traffic
from disagmoe.simulator import simulate
from disagmoe.timeline.timeline import Timeline
from tests.runtime.conftest import Pools
from tests.runtime.test_colocated_step import Colocated
from tests.runtime.training_cases import Case, reference_of, rows_of, scramble_parts
from tests.simulator.task_programs import Task, pack

GENEROUS = Pace(dilation=1.0, slack_s=60.0)


def priced(program: Program, *, slows: float = 1.0, slowed: float = 1.0) -> Pricing:
    """10 to 30 ms for every exchange and compute operation, the same on both ends of a transfer.

    Nothing else takes any time, and what is sent again has a link of its own, so no two transfers share one.
    """
    graph = build_graph(program)
    seconds = np.random.default_rng(7).uniform(0.01, 0.03, graph.n_nodes)[graph.node]
    comm = np.isin(program.kind, [int(kind) for kind in COMM_KINDS])
    instant = is_wait(program) | np.isin(program.kind, (int(Kind.P2P), int(Kind.GRAD_SYNC)))
    if np.isin(program.kind[program.stream == int(Stream.SEND)], (int(Kind.DISPATCH), int(Kind.COMBINE))).any():
        instant |= program.stream == int(Stream.COLL)  # inside an expert group, beside its other transfers
    return Pricing(
        duration_s=np.where(instant, 0.0, seconds),
        link=(program.phase == int(Phase.R)).astype(np.int8),
        slows_compute=np.where(comm, slows, 1.0),
        slowed_by_compute=np.where(comm, slowed, 1.0),
        wire_bytes=np.zeros(len(program)),
    )


@dataclass(frozen=True)
class Again(Case):
    """A ring that redoes attention and experts, and sends the experts their tokens a second time."""

    @property
    def plan(self) -> Plan:
        kinds = (Kind.ATTN, Kind.DISPATCH, Kind.FFN)
        program = af_pipe_program(
            p=self.p, layers=self.layers, m=self.microbatches, group=4 * self.p, order=self.order, recompute=kinds
        )
        return replace(super().plan, program=program)


@dataclass(frozen=True)
class Paced:
    """What one rank saw; the timeline on rank 0 only."""

    timeline: Timeline | None
    gradient: float
    as_planned: bool


def paced_step(context: Context, case: Case, pricing: Pricing, path: Path) -> Paced:
    tokens = case.tokens()
    pacing = Pacing(pricing, GENEROUS, path)
    with StepRunner(context, case.plan, case.model, case.cut, case.options, pacing=pacing) as runner:
        scramble_parts(runner)
        record = runner.step(lambda wanted: tokens[wanted.start : wanted.stop]).record
        found = runner.gradients()
        planned = {stream: [task.row for task in tasks] for stream, tasks in runner.executor.script.streams.items()}
        timeline = gather_timeline(case.plan.program, runner.site.groups.ranks, record, 0.0, origin="emulated")
    reference = reference_of(case)
    reference.accumulate([(tokens[:, :-1], tokens[:, 1:])], case.weights)
    truth = reference.gradients()
    worst = max(float((gradient - rows_of(name, truth)).abs().max()) for name, gradient in found.items())
    return Paced(timeline, worst, record.ran == planned)


ALONE = {
    "ring": Case(m=2, n=2, layers=2, microbatches=3, sequences=6),
    "what is sent again": Again(m=2, n=2, layers=2, microbatches=3, sequences=6),
    "stages": Colocated(p=2, gpus=2, ep=2, layers=2, microbatches=3, sequences=6),
    "chunks": Colocated(gpus=2, ep=2, chunks=2, layers=2, microbatches=2),
    "dualpipe": Colocated(system="dualpipe", p=2, microbatches=4, exposed=True),
}


def run_paced(pools: Pools, case: Case, pricing: Pricing, folder: Path) -> Timeline:
    ranks = case.ranks if isinstance(case, Colocated) else case.shape.ranks
    path = Logbook.create(folder / "times", ranks, len(case.plan.program))
    results = pools(ranks).run(paced_step, case, pricing, path)
    assert max(result.gradient for result in results) <= 1e-10
    assert all(result.as_planned for result in results)
    timeline = results[0].timeline
    assert timeline is not None
    assert timeline.origin == "emulated"
    return timeline


def equal_times(timeline: Timeline, expected: Timeline) -> None:
    assert timeline.end_s == pytest.approx(expected.end_s, abs=2e-6)  # headers carry nanoseconds
    assert timeline.start_s == pytest.approx(expected.start_s, abs=2e-6)


@pytest.mark.parametrize("name", ALONE)
def test_gradients_and_times_of_a_paced_step(pools: Pools, name: str, tmp_path: Path) -> None:
    case = ALONE[name]
    pricing = priced(case.plan.program)
    equal_times(run_paced(pools, case, pricing, tmp_path), simulate(case.plan.program, pricing))


def test_two_compute_streams_run_side_by_side_and_share(pools: Pools, tmp_path: Path) -> None:
    case = Case(streams=2, layers=3, microbatches=4, sequences=4)
    pricing = priced(case.plan.program, slows=1.2, slowed=1.3)
    timeline = run_paced(pools, case, pricing, tmp_path)
    took = timeline.end_s - timeline.start_s
    assert (took >= pricing.duration_s - 1e-6).all()  # nothing goes faster than alone
    assert timeline.step_s > 0.99 * simulate(case.plan.program, priced(case.plan.program)).step_s
    first, second = (timeline.program.stream == int(s) for s in (Stream.COMPUTE, Stream.COMPUTE_B))
    beside = (timeline.start_s[first][:, None] < timeline.end_s[second]) & (
        timeline.end_s[first][:, None] > timeline.start_s[second]
    )
    assert beside.any()


def late_ops(context: Context, path: Path, pace: Pace, nap_s: float) -> tuple[list[float], list[float]]:
    """Two compute operations of 10 ms one after the other; the host sleeps before the second."""
    tasks = [Task(Kind.ATTN, ((0, Stream.COMPUTE),), 1), Task(Kind.FFN, ((0, Stream.COMPUTE),), 1)]  # type: ignore[arg-type]
    program, pricing, graph = pack(tasks, 1)
    pricing = replace(pricing, duration_s=0.01 * pricing.duration_s)
    case = Colocated(p=1, layers=1, microbatches=1)
    groups = Groups.create(case.plan, device=context.device, timeout_s=20.0)
    logbook = Logbook(path, 1, len(program))
    pacer = Pacer(pace, Traffic(program, pricing, groups.ranks, logbook), logbook, groups)
    pacer.begin()
    moments = []
    for task in script_of(program, 0, graph).tasks():
        if moments:
            time.sleep(nap_s)
        moments.append(pacer.run(task, lambda task: None))
    groups.destroy()
    return [m.start_s for m in moments], [m.end_s for m in moments]


def test_a_late_host_is_forgiven_up_to_the_slack_and_no_further(pools: Pools, tmp_path: Path) -> None:
    path = Logbook.create(tmp_path / "times", 1, 2)
    (forgiven,) = pools(1).run(late_ops, path, Pace(1.0, slack_s=60.0), 0.2)
    assert forgiven == ([0.0, 0.01], [0.01, 0.02])
    (late,) = pools(1).run(late_ops, path, Pace(1.0, slack_s=0.05), 0.2)
    starts, ends = late
    assert starts[1] >= 0.01 + 0.2 - 0.05
    assert ends[1] == pytest.approx(starts[1] + 0.01)


def test_a_pace_is_a_quarter_of_the_smallest_exchange_at_most() -> None:
    pace = Pace.of_exchange(2.0, 0.008)
    assert (MOST_SLACK, HOLD) == (0.25, 0.25)
    assert pace.slack_s == pytest.approx(0.002)
    assert pace.hold_s == pytest.approx(0.0005)
    for wrong in ((0.0, 1.0, 0.0), (1.0, -1.0, 0.0), (1.0, 0.1, 0.2)):
        with pytest.raises(ValueError, match="dilation > 0"):
            Pace(*wrong)
