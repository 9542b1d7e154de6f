"""Plans of every system on random problems: verified, simulated, accounted for, no faster than their resources."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from baselines import get_system, system_names
from disagmoe.ops import COMPUTE_KINDS, RECV_STREAMS, SEND_STREAMS, Stream
from disagmoe.plan.dependencies import is_wait
from disagmoe.plan.plan import Plan
from disagmoe.plan.pricing import price
from disagmoe.plan.verify import verify
from disagmoe.simulator import simulate
from disagmoe.system import NotApplicable, Problem, recompute_levels
from disagmoe.timeline.metrics import worker_metrics
from tests.problems import problem, small_cluster

SYSTEMS = system_names()
MODELS = ("tiny", "qwen3_30b", "deepseek_moe_16b", "gpt_oss_20b")


@st.composite
def plans(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A random candidate of a random system on a random problem, cut to a few layers so that it stays small."""
    model = draw(st.sampled_from(MODELS))
    cluster = small_cluster(draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([2, 4, 8])))
    transport, merge = draw(st.sampled_from([("nccl", "none"), ("deepep", "node"), ("m2n_rdma", "node")]))
    pr = problem(
        model,
        cluster,
        seq=draw(st.sampled_from([512, 3000, 4096])),
        global_batch=draw(st.integers(4, 96)),
        transport=transport,
        merge=merge,
        ep=draw(st.sampled_from([2, 4, 8])),
        skew=draw(st.sampled_from([1.0, 1.7])),
        layers=draw(st.integers(2, 6)),
    )
    system = get_system(draw(st.sampled_from(SYSTEMS)))
    try:
        candidates = list(system.candidates(pr))
        assume(candidates)
        candidate = draw(st.sampled_from(candidates))
        layout = system.layout(pr, {**candidate, **draw(st.sampled_from(recompute_levels(system)))})
        return pr, Plan(layout, system.program(pr, layout))
    except NotApplicable:
        reject()


def check(pr: Problem, plan: Plan) -> None:
    program = plan.program
    verify(program)
    pricing = price(plan.layout, program, pr.costs)
    timeline = simulate(program, pricing)
    step = timeline.step_s
    for worker in worker_metrics(timeline):
        parts = worker.compute_s + worker.exposed_s + worker.bubble_s
        assert parts == pytest.approx(step, rel=1e-9)
    # No step is shorter than what one resource has to do: a worker's compute, or one direction of one of its links.
    work = np.isin(program.kind, [int(k) for k in COMPUTE_KINDS]) & ~is_wait(program)
    waits = is_wait(program)
    collective = np.isin(program.stream, [int(s) for s in (Stream.COLL, Stream.SYNC, Stream.NVLINK)]) & ~waits
    out = (np.isin(program.stream, [int(s) for s in SEND_STREAMS]) | collective) & ~waits
    into = (np.isin(program.stream, [int(s) for s in RECV_STREAMS]) | collective) & ~waits
    for worker_index in range(program.n_workers):
        mine = program.worker == worker_index
        for rows in (work, *(direction & (pricing.link == link) for direction in (out, into) for link in (0, 1))):
            assert float(pricing.duration_s[mine & rows].sum()) <= step * (1 + 1e-9)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_small_random_programs_of_every_system(case: tuple[Problem, Plan]) -> None:
    check(*case)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_many_random_programs_of_every_system(case: tuple[Problem, Plan]) -> None:
    check(*case)
