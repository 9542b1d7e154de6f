"""The program against every division of every node, and the field's solver faults."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings

from disagmoe.allocator import engines, milp, solvers
from disagmoe.allocator.allocation import Allocation, AllocationModel, allocation_model
from disagmoe.allocator.milp import allocate, solve
from disagmoe.allocator.nodes import MODES
from disagmoe.allocator.options import Option
from disagmoe.allocator.shapes import Shape, Sizes
from disagmoe.allocator.solvers import Answer, Infeasible, NoAnswer, Settings, SolverError, SolverMissing
from disagmoe.specs import ClusterSpec, NodeGroup, load_cluster
from disagmoe.system import Problem
from tests.allocator.instances import Instance, best_by_hand, cluster_of, instances
from tests.problems import problem, small_cluster

HIGHS = solvers.installed("highs")
PROGRAMS = [
    "cbc",
    pytest.param("highs", marks=pytest.mark.skipif(not HIGHS, reason="highspy is not installed")),
]
SEARCHES = ["exhaustive", *PROGRAMS]
ROOT = Path(__file__).resolve().parents[2]


def on_rdma(
    model: str, cluster: ClusterSpec | str, *, seq: int = 4096, batch: int = 128, ep: int | None = 16
) -> Problem:
    return problem(model, cluster, seq=seq, global_batch=batch, ep=ep, transport="m2n_rdma", merge="node")


def check_against_hand(instance: Instance) -> None:
    """Same optimum and same plan from the enumeration, both solvers and the exhaustive search."""
    expected = best_by_hand(instance)
    plans: list[Allocation] = []
    for solver in ("exhaustive", "cbc", "highs") if HIGHS else ("exhaustive", "cbc"):
        if expected is None:
            with pytest.raises(Infeasible):
                solve(instance.model, Settings(solver))
            continue
        plan = solve(instance.model, Settings(solver))
        assert plan.proven
        assert plan.shape == expected[1]
        assert expected[0] <= plan.bottleneck_s <= expected[0] * (1 + 1e-9)
        check_ownership(instance.cluster, instance.mode, plan)
        plans.append(replace(plan, solver=""))
    assert all(plan == plans[0] for plan in plans)


def check_ownership(cluster: ClusterSpec, mode: str, plan: Allocation) -> None:
    """No node gives more GPUs or NICs than it has, and the rates are what its NICs give."""
    from disagmoe.allocator.nodes import node_kinds

    kinds = node_kinds(cluster, mode)
    used = [[0, 0], [0, 0]]
    for use in plan.nodes:
        if use is None:
            continue
        kind = kinds[use.kind]
        assert sum(use.gpus) <= kind.gpus
        assert sum(use.nics) <= kind.nics
        for pool, share in enumerate((plan.attention, plan.expert)):
            if use.gpus[pool]:
                used[pool][0] += use.gpus[pool]
                used[pool][1] += 1
                assert float(use.nics[pool] * Fraction(kind.nic_gbs) / use.gpus[pool]) >= share.nic_gbs_per_gpu
    assert used == [[share.gpus, share.nodes] for share in (plan.attention, plan.expert)]
    assert (plan.attention.gpus, plan.expert.gpus) == plan.shape.gpus


@settings(max_examples=60)
@given(instances())
def test_optimum_is_that_of_enumeration(instance: Instance) -> None:
    check_against_hand(instance)


@pytest.mark.slow
@settings(max_examples=300)
@given(instances(nodes=4))
def test_optimum_is_that_of_enumeration_on_more(instance: Instance) -> None:
    check_against_hand(instance)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model", "seq"), [("deepseek_moe", 4096), ("gpt_oss_20b", 16384)])
def test_real_models_get_one_plan_from_every_search(model: str, seq: int, mode: str) -> None:
    pr = on_rdma(model, small_cluster(nodes=4), seq=seq)
    plans = [
        replace(allocate(pr, mode=mode, settings=Settings(s)), solver="")
        for s in ("exhaustive", "cbc", "highs")[: 2 + HIGHS]
    ]
    assert all(plan == plans[0] for plan in plans)
    check_ownership(pr.cluster, mode, plans[0])


@pytest.mark.parametrize("solver", SEARCHES)
def test_large_clusters(solver: str) -> None:
    # 1,024 GPUs: 128 nodes. The plan fills both pools to whole rings and nothing exceeds its limit.
    one = load_cluster("h800_128")
    pr = on_rdma("qwen3", replace(one, groups=(replace(one.groups[0], count=128),)), seq=32768, batch=256)
    plan = allocate(pr, settings=Settings(solver))
    assert plan.proven
    assert plan.gpus_used <= 1024
    assert max(plan.attention.memory_gib, plan.expert.memory_gib) <= pr.cluster.limit_gib


@pytest.mark.parametrize("solver", SEARCHES)
@pytest.mark.parametrize("threads", [1, 2])
def test_same_input_same_plan(solver: str, threads: int) -> None:
    # Two identical nodes (several equal optima), five runs, nodes listed in another order each time.
    groups = [
        NodeGroup(1, 4, 4, 400.0),
        NodeGroup(1, 4, 4, 400.0),
        NodeGroup(1, 2, 1, 400.0),
        NodeGroup(2, 8, 4, 400.0),
    ]
    plans = []
    for run in range(5):
        random.Random(run).shuffle(groups)
        pr = on_rdma("deepseek_moe", cluster_of(*groups), ep=4)
        plans.append(allocate(pr, settings=Settings(solver, threads=threads)))
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.parametrize("solver", SEARCHES)
def test_shared_nodes_in_any_order_are_shared_alike(solver: str) -> None:
    groups = [NodeGroup(2, 2, 2, 400.0), NodeGroup(1, 4, 2, 400.0)]
    plans = [
        allocate(on_rdma("deepseek_moe", cluster_of(*order), ep=2), mode="shared_nodes", settings=Settings(solver))
        for order in (groups, groups[::-1])
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("solver", SEARCHES)
def test_twelve_gpus_in_nodes_of_four(solver: str) -> None:
    # Nodes of 4 GPUs and 2 NICs: 25 GB/s for each of 4 GPUs at work, 50 for each of 2.
    cluster = cluster_of(NodeGroup(3, 4, 2, 400.0))
    plan = allocate(on_rdma("deepseek_moe", cluster, ep=4), settings=Settings(solver))
    assert plan.gpus_used <= 12
    for share in (plan.attention, plan.expert):
        assert share.nic_gbs_per_gpu in (25.0, 100.0 / 3.0, 50.0, 100.0)
        assert share.nics <= 2 * share.nodes
    assert plan.attention.nodes + plan.expert.nodes <= 3


def test_a_pool_is_as_fast_as_its_slowest_node() -> None:
    # 8 GPUs / 4 NICs, 4 / 4 and 4 / 2 of 50 GB/s: 25, 50 and 25 GB/s where all GPUs work.
    cluster = cluster_of(NodeGroup(1, 8, 4, 400.0), NodeGroup(1, 4, 4, 400.0), NodeGroup(1, 4, 2, 400.0))
    option = Option(Shape(1, 1, 4, 12, 1), (1.0, 1.0), ((1.0,) * 20, (1.0,) * 20), (1.0, 1.0))
    from disagmoe.allocator.nodes import node_kinds, node_uses, rate_levels

    kinds = node_kinds(cluster)
    uses = node_uses(kinds)
    levels = rate_levels(uses)
    option = replace(option, network_s=((1.0,) * len(levels[0]), (1.0,) * len(levels[1])))
    plan = solve(AllocationModel(kinds, uses, levels, (option,), 50.0))
    # 12 attention GPUs need the node of 8 and one of 4; experts get the other.
    assert plan.attention.nic_gbs_per_gpu == 25.0
    assert plan.expert.nic_gbs_per_gpu in (25.0, 50.0)


@pytest.mark.parametrize("solver", SEARCHES)
def test_half_of_the_nics_each(solver: str) -> None:
    cluster = small_cluster(nodes=4)
    pr = on_rdma("deepseek_moe", cluster, ep=16)
    sizes = Sizes(p=(1,), dp=(1,), n=(10,), m=(16,))
    plan = allocate(pr, mode="equal_nics", sizes=sizes, settings=Settings(solver))
    # The paper's 16:10 on NICs 16:16: two nodes for each pool.
    assert (plan.attention.nodes, plan.expert.nodes) == (2, 2)
    assert (plan.attention.nics, plan.expert.nics) == (16.0, 16.0)
    assert plan.attention.nic_gbs_per_gpu == 50.0
    free = allocate(pr, sizes=sizes, settings=Settings(solver))
    assert free.bottleneck_s <= plan.bottleneck_s


def test_restricting_never_helps() -> None:
    pr = on_rdma("qwen3", "h800_128", seq=4096, batch=2048)
    whole, equal = (allocate(pr, mode=mode).bottleneck_s for mode in ("whole_nodes", "equal_nics"))
    assert whole <= equal


def test_sequence_moves_the_optimum_to_attention_unless_memory_forbids_it() -> None:
    free = []
    for seq in (4096, 16384, 32768):
        pr = on_rdma("qwen3", "h800_128", seq=seq, batch=8388608 // seq)
        plan = allocate(pr, memory=lambda shape: (1.0, 1.0))
        free.append(plan.attention.gpus / plan.gpus_used)
        bound = allocate(pr)
        assert bound.bottleneck_s >= plan.bottleneck_s
        # 227e9 expert parameters at 6 to 18 bytes: 4 groups of 16 are the fewest that hold them.
        assert bound.expert.gpus >= 64
    assert free == sorted(free)
    assert free[0] < free[-1]


def test_two_gpus_are_one_and_one_and_one_gpu_is_refused() -> None:
    plan = allocate(on_rdma("tiny", small_cluster(nodes=2, gpus=1, nics=1), seq=128, ep=8))
    assert (plan.attention.gpus, plan.expert.gpus) == (1, 1)
    single = allocate(on_rdma("tiny", small_cluster(nodes=1, gpus=2, nics=1), seq=128, ep=8))
    assert (single.attention.gpus, single.expert.gpus) == (1, 1)
    # One NIC of 50 GB/s between them.
    assert (single.attention.nic_gbs_per_gpu, single.expert.nic_gbs_per_gpu) == (25.0, 25.0)
    with pytest.raises(Infeasible, match="needs at least 2 GPUs for disaggregation, the cluster has 1"):
        allocate(on_rdma("tiny", small_cluster(nodes=1, gpus=1, nics=1), seq=128))


@pytest.mark.parametrize("solver", SEARCHES)
def test_too_large_names_memory_with_both_numbers(solver: str) -> None:
    pr = on_rdma("qwen3", small_cluster(nodes=2))
    with pytest.raises(Infeasible, match=r"memory: the smallest plan needs \d+\.\d GiB per GPU \(pool F\); 75\.6 GiB"):
        allocate(pr, settings=Settings(solver))


@pytest.mark.parametrize("solver", SEARCHES)
def test_other_limits_are_named_too(solver: str) -> None:
    # 8 + 8 GPUs are there, but a node belongs to one pool and each of 2 of 3 nodes has 4.
    cluster = cluster_of(NodeGroup(3, 4, 4, 400.0))
    pr = on_rdma("deepseek_moe", cluster)
    with pytest.raises(Infeasible, match="nodes: no admissible A:F sizes fit in mode=whole_nodes"):
        allocate(pr, sizes=Sizes(p=(1,), dp=(1,), m=(6,), n=(6,)), settings=Settings(solver))
    with pytest.raises(Infeasible, match="nodes: mode=equal_nics leaves a pool without any"):
        allocate(
            on_rdma("deepseek_moe", cluster_of(NodeGroup(1, 4, 4, 400.0), NodeGroup(1, 2, 2, 400.0))),
            mode="equal_nics",
            settings=Settings(solver),
        )
    with pytest.raises(Infeasible, match="sizes: no admissible A:F sizes"):
        allocate(pr, sizes=Sizes(n=(64,)), settings=Settings(solver))


def test_expert_groups_grow_only_where_the_size_asked_for_does_not_fit() -> None:
    pr = on_rdma("deepseek_moe", small_cluster(nodes=4), ep=4)
    assert allocate(pr).shape.n == 4
    assert allocate(pr, memory=lambda shape: (1.0, 1.0 if shape.n > 8 else 99.0)).shape.n == 16
    assert allocate(pr, memory=lambda shape: (1.0, 1.0 if shape.n < 4 else 99.0)).shape.n == 2
    with pytest.raises(Infeasible, match=r"memory: the smallest plan needs 76\.0 GiB per GPU \(pool A\)"):
        allocate(pr, memory=lambda shape: (75.0 + shape.n, 1.0))


def test_without_any_solver_the_search_is_exhaustive_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pr = on_rdma("deepseek_moe", small_cluster(nodes=4))
    expected = allocate(pr)
    monkeypatch.setattr(engines, "pulp_cbc_path", "/nowhere/cbc")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "highspy", None)
    plan = allocate(pr)
    assert plan.solver == "exhaustive"
    assert "exhaustive search instead of a solver" in plan.notes[0]
    assert replace(plan, solver="", notes=()) == replace(expected, solver="", notes=())
    with pytest.raises(SolverMissing, match=r"solver cbc: .* choose another with solver=auto"):
        allocate(pr, settings=Settings("cbc"))


class Stingy:
    """A solver that finds a first point (the plan with the fewest GPUs) and then runs out of time."""

    def __init__(self) -> None:
        self.original = solvers.IntegerProgram.minimise
        self.asked = 0

    def __call__(self, program: solvers.IntegerProgram, terms: solvers.Terms, how: Settings) -> Answer:
        self.asked += 1
        if self.asked > 1:
            raise NoAnswer("cbc: no feasible point within 1 s")
        few = [(("z", shape), float(sum(shape.gpus))) for shape in shapes_of(program)]
        return replace(self.original(program, few, how), proven=False, bound=0.0)


def shapes_of(program: solvers.IntegerProgram) -> list[Shape]:
    return [key[1] for key in program._bounds if isinstance(key, tuple) and key[0] == "z"]


def test_out_of_time_is_feasible_not_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    pr = on_rdma("deepseek_moe", small_cluster(nodes=4))
    best = allocate(pr)
    stingy = Stingy()
    monkeypatch.setattr(solvers.IntegerProgram, "minimise", lambda self, terms, how: stingy(self, terms, how))
    plan = allocate(pr, settings=Settings("cbc", time_limit_s=1.0))
    assert not plan.proven
    assert plan.status.startswith("feasible, not proven optimal (cbc): no division is faster than")
    assert plan.bound_s <= best.bottleneck_s <= plan.bottleneck_s


def test_a_poor_first_point_is_improved_to_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver whose tolerance stops it early does not change the plan."""
    pr = on_rdma("deepseek_moe", small_cluster(nodes=4))
    best = allocate(pr, settings=Settings("cbc"))
    stingy = Stingy()

    def minimise(self: solvers.IntegerProgram, terms: solvers.Terms, how: Settings) -> Answer:
        return stingy(self, terms, how) if stingy.asked == 0 else stingy.original(self, terms, how)

    monkeypatch.setattr(solvers.IntegerProgram, "minimise", minimise)
    assert allocate(pr, settings=Settings("cbc")) == best


def test_a_wrong_answer_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    pr = on_rdma("deepseek_moe", small_cluster(nodes=4))
    original = engines.cbc

    def two_options(problem, how, where, name):  # type: ignore[no-untyped-def]
        outcome = original(problem, how, where, name)
        return replace(outcome, values={**outcome.values, "x0": 1.0, "x1": 1.0, "x2": 1.0})

    monkeypatch.setattr(engines, "cbc", two_options)
    with pytest.raises(SolverError, match="after rounding"):
        allocate(pr, settings=Settings("cbc"))


SCRIPT = """
import sys
from tests.allocator.test_milp import on_rdma
from tests.problems import small_cluster
from disagmoe.allocator.milp import allocate
from disagmoe.allocator.solvers import Settings
pr = on_rdma("deepseek_moe", small_cluster(nodes=4))
print("ready", flush=True)
while True:
    print(allocate(pr, settings=Settings(sys.argv[1])).shape, flush=True)
"""


@pytest.mark.parametrize("solver", PROGRAMS)
def test_two_at_once_and_one_killed_leave_the_work_tree_clean(tmp_path: Path, solver: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::DeprecationWarning:disagmoe"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, solver], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        lines = []
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            lines.append(process.stdout.readline())
        time.sleep(0.02)  # somewhere inside a solve
        both[0].send_signal(signal.SIGKILL)
        both[0].wait()
        assert both[1].stdout is not None
        lines.append(both[1].stdout.readline())
        expected = allocate(on_rdma("deepseek_moe", small_cluster(nodes=4)), settings=Settings(solver)).shape
        assert lines == [f"{expected}\n"] * 3
        assert not list(tmp_path.iterdir())
    finally:
        for process in both:
            process.kill()
            process.wait()


def test_memory_can_be_handed_in() -> None:
    pr = on_rdma("deepseek_moe", small_cluster(nodes=4))
    limit = pr.cluster.limit_gib
    # Activations that grow with the micro-batch: only one sequence fits.
    plan = allocate(pr, memory=lambda shape: (limit if shape.micro_batch == 1 else limit + 1.0, 1.0))
    assert plan.shape.micro_batch == 1
    assert plan.attention.memory_gib == limit


def test_memory_that_takes_long_is_asked_only_where_it_matters() -> None:
    pr = on_rdma("deepseek_moe", small_cluster(nodes=4), ep=4)
    asked: list[Shape] = []

    def whole(shape: Shape) -> tuple[float, float]:
        asked.append(shape)
        return (10.0 * shape.micro_batch, 100.0 if shape.p == 1 else 10.0)

    lazy = allocate(pr, check=whole)
    few = len(asked)
    eager = allocate(pr, memory=whole)
    assert lazy == eager
    assert 1 <= few < len(allocation_model(pr).options)
    with pytest.raises(Infeasible, match=r"memory: the smallest plan needs 80\.0 GiB per GPU \(pool A\)"):
        allocate(pr, sizes=Sizes(n=(16,), p=(1,)), check=lambda shape: (80.0, 1.0))


def test_the_model_is_the_same_for_every_search() -> None:
    pr = on_rdma("deepseek_moe", small_cluster(nodes=4))
    assert allocation_model(pr) == allocation_model(pr)
    assert milp.solve(allocation_model(pr)) == milp.solve(allocation_model(pr))
