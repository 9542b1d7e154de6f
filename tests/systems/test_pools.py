"""Which GPUs, nodes and NICs the groups get, by hand and by counting what a node has."""

from __future__ import annotations

from itertools import product
from math import ceil

import pytest

from disagmoe.plan.plan import Worker
from disagmoe.specs import ClusterSpec, NodeGroup, load_cluster
from disagmoe.systems.pools import NIC_RULES, Shape, place, shapes
from tests.problems import small_cluster

H800 = load_cluster("h800_128")


def placed(cluster: ClusterSpec, rule: str, *shape: int) -> tuple[Worker, ...]:
    workers = place(cluster, rule, Shape(*shape))
    assert workers is not None
    return workers


def mixed(*nodes: tuple[int, int, int]) -> ClusterSpec:
    """A cluster of (count, GPUs, NICs) nodes with 400 Gbit/s NICs."""
    groups = tuple(NodeGroup(count, gpus, nics, 400.0) for count, gpus, nics in nodes)
    return ClusterSpec("mixed", "H800", groups, nvlink_gbs=200.0, memory_gib=79.6, calibration="h800")


@pytest.mark.parametrize(
    ("rule", "shape", "attention", "experts"),
    [
        # The paper's 16:16, and 16:10 on 16:16: ten GPUs of a group on two nodes, five sharing eight NICs.
        ("halves", (4, 1, 16, 16), (2, 50.0), (2, 50.0)),
        ("halves", (4, 1, 16, 10), (2, 50.0), (2, 80.0)),
        # Three groups have two of eight nodes each: two nodes are left over, and so are their NICs.
        ("halves", (3, 1, 20, 10), (3, 400 / 8), (2, 80.0)),
        # Sixteen groups of three: two to a node.
        ("halves", (4, 4, 3, 3), (1, 400 / 6), (1, 400 / 6)),
        # 80 expert GPUs fill ten nodes; five groups of nine on six nodes lie across their borders.
        ("own", (1, 5, 9, 16), (2, 50.0), (2, 50.0)),
        ("own", (1, 1, 112, 16), (14, 50.0), (2, 50.0)),
        # One GPU cannot use more than its node's NICs.
        ("halves", (1, 1, 1, 8), (1, 400.0), (8, 400.0)),
    ],
)
def test_pools_of_their_own_nodes(
    rule: str, shape: tuple[int, ...], attention: tuple[int, float], experts: tuple[int, float]
) -> None:
    workers = placed(H800, rule, *shape)
    p = shape[0]
    assert [w.pool for w in workers] == ["A"] * p + ["F"] * p
    for worker, (nodes, nic_gbs) in ((workers[0], attention), (workers[-1], experts)):
        assert worker.nodes == nodes
        assert worker.nic_gbs == pytest.approx(nic_gbs)
        assert worker.node_ids == ()


def test_a_stage_on_four_shared_nodes() -> None:
    """Four A- and four F-GPUs on each of four nodes; each four have four of the eight NICs."""
    workers = placed(H800, "shared_nodes", 4, 1, 16, 16, 4)
    assert [w.node_ids for w in workers] == 2 * [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert {(w.nodes, w.nic_gbs) for w in workers} == {(4, 50.0)}


def test_unequal_pools_on_shared_nodes_have_equal_nics() -> None:
    """Six A- and two F-GPUs on each of eight nodes: 200 GB/s for either."""
    attention, experts = placed(H800, "shared_nodes", 1, 2, 48, 16, 8)
    assert attention.nic_gbs == pytest.approx(200 / 6)
    assert experts.nic_gbs == 100.0


def test_stages_smaller_than_a_node() -> None:
    """Two rings of depth 2 with 1 + 1 GPUs a stage: one ring, or both, on a node; else each stage on one."""
    one_node = placed(small_cluster(nodes=1), "shared_nodes", 2, 2, 1, 1, 1)
    assert {(w.node_ids, w.nic_gbs) for w in one_node} == {((0,), 200 / 4)}
    ring_on_a_node = placed(small_cluster(nodes=2), "shared_nodes", 2, 2, 2, 2, 1)
    assert {(w.node_ids, w.nic_gbs) for w in ring_on_a_node} == {((0,), 200 / 4)}
    stage_on_a_node = placed(small_cluster(nodes=4), "shared_nodes", 2, 2, 4, 4, 1)
    assert [w.node_ids for w in stage_on_a_node] == [(0,), (1,)] * 2
    assert {w.nic_gbs for w in stage_on_a_node} == {50.0}


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("halves", (4, 1, 17, 16)),
        ("halves", (4, 1, 16, 17)),
        ("own", (4, 1, 17, 16)),
        ("shared_nodes", (4, 1, 16, 16, 3)),  # 16 GPUs do not lie evenly on three nodes
        ("shared_nodes", (4, 1, 20, 16, 4)),  # 5 + 4 GPUs on a node of 8
        ("shared_nodes", (5, 1, 16, 16, 4)),  # 20 nodes of 16
        ("shared_nodes", (4, 1, 16, 16, 0)),
        ("halves", (4, 1, 16, 16, 4)),
    ],
)
def test_what_does_not_fit_has_no_place(rule: str, shape: tuple[int, ...]) -> None:
    assert place(H800, rule, Shape(*shape)) is None


def test_shapes_on_shared_nodes() -> None:
    """EP 16: f = 8 leaves no attention, 16 is no multiple of 3; f = 4, 2, 1 leave 4, 6, 7."""
    found = [(s.stage_nodes, s.m) for s in shapes(H800, "shared_nodes", 1, 1, 16)]
    assert found == [(4, 16), (8, 48), (16, 112)]
    # EP 2 on one node of eight, two stages: a whole ring in it, the only way.
    assert [(s.stage_nodes, s.m) for s in shapes(small_cluster(nodes=1), "shared_nodes", 2, 1, 2)] == [(1, 2)]
    # On two nodes there are two: the ring on one node, or a stage on each.
    assert [(s.stage_nodes, s.m) for s in shapes(small_cluster(nodes=2), "shared_nodes", 2, 1, 2)] == [(1, 6), (1, 2)]


@pytest.mark.parametrize(
    ("cluster", "nic_gbs"), [(mixed((3, 8, 4)), 25.0), (mixed((3, 4, 4)), 50.0), (mixed((3, 4, 2)), 25.0)]
)
def test_nics_per_gpu_of_full_nodes(cluster: ClusterSpec, nic_gbs: float) -> None:
    """NIC per GPU ratios of 1:2, 1:1 and 1:2 (field reports of nodes with 4 GPUs or 4 NICs)."""
    size = cluster.gpus_per_node
    workers = placed(cluster, "own", 1, 1, size * 2, size)
    assert {w.nic_gbs for w in workers} == {nic_gbs}


def test_nodes_that_differ_count_as_the_smallest_with_the_slowest_nics() -> None:
    cluster = mixed((1, 8, 4), (1, 4, 4), (1, 4, 2))
    workers = placed(cluster, "own", 1, 1, 8, 4)
    assert {w.nic_gbs for w in workers} == {25.0}
    assert place(cluster, "own", Shape(1, 1, 9, 4)) is None  # the larger node's other four GPUs are not used


def test_groups_need_not_be_multiples_of_eight() -> None:
    """Twelve GPUs in nodes of four: six experts on two nodes, three a node, and up to four for attention."""
    cluster = mixed((3, 4, 2))
    assert [(s.m, s.n) for s in shapes(cluster, "own", 1, 1, 6)] == [(4, 6)]
    attention, experts = placed(cluster, "own", 1, 1, 4, 6)
    assert (attention.nic_gbs, experts.nodes) == (25.0, 2)
    assert experts.nic_gbs == pytest.approx(100 / 3)


CLUSTERS = [H800, small_cluster(1, 8, 1), small_cluster(3, 4, 2), small_cluster(5, 8, 4), mixed((2, 8, 8), (1, 4, 2))]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c.nodes}x{c.gpus_per_node}")
@pytest.mark.parametrize("rule", NIC_RULES)
def test_no_rule_hands_out_more_than_there_is(cluster: ClusterSpec, rule: str) -> None:
    """GPUs, and NIC bandwidth of every node: some node has at least the mean number of a pool's GPUs."""
    size = cluster.gpus_per_node
    node_gbs = min(nics * gbit / 8 for _, nics, gbit in cluster.node_list)
    count = 0
    for p, dp, n in product(range(1, 5), range(1, 5), (1, 2, 3, 4, 6, 8, 10, 16)):
        for shape in shapes(cluster, rule, p, dp, n):
            for m in {shape.m, max(1, shape.stage_nodes), max(1, shape.m // 2)}:
                workers = place(cluster, rule, Shape(p, dp, m, n, shape.stage_nodes))
                if workers is None:
                    assert m != shape.m and m % shape.stage_nodes
                    continue
                count += 1
                assert dp * sum(w.gpus for w in workers) <= cluster.nodes * size
                handed = 0.0
                for pool in ("A", "F"):
                    mine = [w for w in workers if w.pool == pool]
                    assert all(1 <= w.nodes <= min(w.gpus, cluster.nodes) for w in mine)
                    fullest = max(ceil(w.gpus / w.nodes) for w in mine)
                    assert fullest <= size
                    assert mine[0].nic_gbs * fullest <= node_gbs * (1 + 1e-9)
                    handed += dp * sum(w.gpus * w.nic_gbs for w in mine)
                assert handed <= cluster.nodes * node_gbs * (1 + 1e-9)
    assert count > 0 or (cluster.nodes == 1) == (rule != "shared_nodes")
