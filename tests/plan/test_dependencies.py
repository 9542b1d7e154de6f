"""Data dependencies: edges listed by hand, and a slow reference that follows the rules word by word."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baselines import get_system
from disagmoe.ops import RECV_STREAMS, SEND_STREAMS, Kind, Op, Phase, Stream
from disagmoe.plan import dependencies
from disagmoe.plan.dependencies import PlanError, build_graph
from disagmoe.plan.program import Program, Row
from disagmoe.plan.text import from_text, row_token
from disagmoe.system import NotApplicable, recompute_levels, variants_of
from tests.plan.handwritten import COLOCATED, DISAGGREGATED, SPLIT, STAGES, TUTEL, edited
from tests.problems import problem

Named = set[tuple[str, str]]


def named_edges(program: Program) -> Named:
    """Edges of the graph by the names of their operations; also checks the Graph's own consistency."""
    graph = build_graph(program)
    names = [row_token(program, int(r)) for r in graph.first_row]
    edges = [(i, int(j)) for i in range(graph.n_nodes) for j in graph.succ[graph.succ_ptr[i] : graph.succ_ptr[i + 1]]]
    assert len(set(edges)) == len(edges) == graph.succ.shape[0]
    np.testing.assert_array_equal(graph.indegree, np.bincount([j for _, j in edges], minlength=graph.n_nodes))
    for node in range(graph.n_nodes):
        rows = [int(r) for r in (graph.first_row[node], graph.second_row[node]) if r >= 0]
        assert sorted(rows) == np.flatnonzero(graph.node == node).tolist()
        if len(rows) == 2:
            assert program.stream[rows[0]] in SEND_STREAMS
            assert program.stream[rows[1]] in RECV_STREAMS
    for array in (graph.node, graph.succ_ptr, graph.succ, graph.indegree, graph.first_row, graph.second_row):
        assert array.dtype == np.int32
    return {(names[i], names[j]) for i, j in edges}


def chain(text: str, worker: int = 0) -> Named:
    """Edges between neighbours of a list; a name without its place runs on the worker."""
    names = [t if "@" in t or " " in t else f"{t}@w{worker}" for t in text.split(", ")]
    return set(itertools.pairwise(names))


def product(before: str, after: str, worker: int = 0) -> Named:
    return {(f"{a}@w{worker}", f"{b}@w{worker}") for a in before.split() for b in after.split()}


def test_colocated_layers_by_hand() -> None:
    expected: Named = set()
    for m in "01":
        forward = f"E-F{m}, A0F{m}, M0F{m}, A1F{m}, D1F{m}, M1F{m}, C1F{m}, H-F{m}, "
        expected |= chain(forward + f"H-B{m}, C1B{m}, M1B{m}, D1B{m}, A1B{m}, M0B{m}, A0B{m}, E-B{m}")
        expected |= product(f"A1B{m} M1B{m}", "G1B-") | product(f"A0B{m} M0B{m}", "G0B-")
        expected |= product(f"E-B{m} A0B{m} M0B{m} A1B{m} M1B{m} H-B{m}", "G-B-")
    expected |= product("G1B- G0B- G-B-", "O-F-") | product("O-F-", "G-F-")
    assert named_edges(from_text(COLOCATED)) == expected


def test_disaggregated_layers_by_hand() -> None:
    expected: Named = set()
    for m in "01":
        expected |= chain(
            f"E-F{m}@w0, A0F{m}@w0, D0F{m} w0>w1, M0F{m}@w1, C0F{m} w1>w0, "
            f"A1F{m}@w0, D1F{m} w0>w1, M1F{m}@w1, C1F{m}@w1, H-F{m}@w1, "
            f"H-B{m}@w1, C1B{m}@w1, M1B{m}@w1, D1B{m} w1>w0, A1B{m}@w0, "
            f"C0B{m} w0>w1, M0B{m}@w1, D0B{m} w1>w0, A0B{m}@w0, E-B{m}@w0"
        )
        expected |= product(f"A0B{m}", "G0B-") | product(f"A1B{m}", "G1B-")
        expected |= product(f"E-B{m} A0B{m} A1B{m}", "G-B-")
        expected |= product(f"M0B{m}", "G0B-", 1) | product(f"M1B{m}", "G1B-", 1)
        expected |= product(f"H-B{m} M0B{m} M1B{m}", "G-B-", 1)
    # The gradient norm is global: both optimizers wait for the reductions of both workers.
    expected |= {(f"G{x}B-@w{a}", f"O-F-@w{b}") for x in "01-" for a in (0, 1) for b in (0, 1)}
    expected |= product("O-F-", "G-F-", 0) | product("O-F-", "G-F-", 1)
    assert named_edges(from_text(DISAGGREGATED)) == expected


def test_chunks_wait_for_their_own_chunk_or_for_all() -> None:
    expected = chain("E-F0, A0F0") | chain("H-F0, H-B0") | chain("A0B0, E-B0")
    for c in ("", ".1"):
        expected |= chain(f"A0F0, D0F0{c}, M0F0{c}, C0F0{c}, H-F0")
        expected |= chain(f"H-B0, C0B0{c}, M0B0{c}, D0B0{c}, A0B0")
    expected |= product("E-B0 A0B0 M0B0 M0B0.1 H-B0", "G-B-") | product("G-B-", "O-F-")
    assert named_edges(from_text(TUTEL)) == expected


def test_split_backward_and_recompute_by_hand() -> None:
    expected: Named = set()
    for c in ("", ".1"):
        expected |= chain(f"A0F0, D0F0{c}, M0F0{c}, C0F0{c}, C0B0{c}, M0I0{c}, D0B0{c}, A0I0")
        expected |= chain(f"M0F0{c}, M0R0{c}, M0I0{c}, M0W0.-") | chain(f"D0F0{c}, D0R0{c}, D0B0{c}")
        expected |= chain(f"D0R0{c}, M0R0{c}")
    expected |= chain("A0I0, A0W0")
    expected |= product("M0W0.- A0W0", "O-F-")  # no reduction: the optimizer waits for the worker's own gradients
    assert named_edges(from_text(SPLIT)) == expected


def test_stages_stand_alone_and_need_no_transfers() -> None:
    """The pair of F1 and B0 on worker 1 is one unit: its first row waits for the inputs of both."""
    expected: Named = set()
    for m in "01":
        expected |= chain(f"S0F{m}@w0, S1F{m}@w1, S1B{m}@w1, S0B{m}@w0")
    expected -= chain("S1F0@w1, S1B0@w1")
    expected |= chain("S1F0@w1, S1F1@w1")
    assert named_edges(from_text(STAGES)) == expected


def test_p2p_follows_its_layer_in_forward_and_leads_it_in_backward() -> None:
    text = """
program workers=2 layers=2 microbatches=1 chunks=1
w0 COMPUTE: A0F0 M0F0 M0B0 A0B0
w0 SEND: P0F0>1
w0 RECV_B: P0B0<1
w1 COMPUTE: A1F0 M1F0 M1B0 A1B0
w1 RECV: P0F0<0
w1 SEND_B: P0B0>0
"""
    assert named_edges(from_text(text)) == chain(
        "A0F0@w0, M0F0@w0, P0F0 w0>w1, A1F0@w1, M1F0@w1, M1B0@w1, A1B0@w1, P0B0 w1>w0, M0B0@w0, A0B0@w0"
    )


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("RECV: D0F0<0 D0F1<0", "RECV: D0F1<0", "unmatched send: D0F0 w0>w1 has no receive on worker 1"),
        ("SEND: C0F0>0 C0F1>0", "SEND: C0F0>0", "unmatched receive: C0F1 w1>w0 has no send on worker 1"),
        ("RECV: D0F0<0 D0F1<0", "RECV: D0F0<0 D0F0<0 D0F1<0", "unmatched receive: D0F0 w0>w1 has no send on worker 0"),
    ],
)
def test_an_unmatched_transfer_is_named(old: str, new: str, complaint: str) -> None:
    with pytest.raises(PlanError) as error:
        build_graph(edited(DISAGGREGATED, (old, new)))
    assert str(error.value) == complaint


# --- An independent reading of the rules, in plain Python, on arbitrary sets of operations.

Node = tuple[Op, int, int]  # operation, worker, peer (-1 unless a transfer)
ORDER = [Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE, Kind.P2P, Kind.STAGE]
N_WORKERS, N_LAYERS, N_MICROBATCHES, N_CHUNKS = 3, 3, 2, 3


def place_in_chain(op: Op) -> tuple[int, int]:
    if op.kind == Kind.EMBED:
        return (-1, -1)
    return (N_LAYERS, 0) if op.kind == Kind.HEAD else (op.layer, ORDER.index(op.kind))


def chunkwise(before: Iterable[Node], after: Iterable[Node]) -> set[tuple[Node, Node]]:
    before, after = list(before), list(after)
    left, right = sorted({n[0].chunk for n in before}), sorted({n[0].chunk for n in after})
    if len(left) != len(right):
        return {(a, b) for a in before for b in after}
    partner = dict(zip(left, right, strict=True))
    return {(a, b) for a in before for b in after if partner[a[0].chunk] == b[0].chunk}


def reference_edges(nodes: list[Node]) -> set[tuple[Node, Node]]:
    work = [n for n in nodes if n[0].kind not in (Kind.GRAD_SYNC, Kind.OPTIM)]
    edges: set[tuple[Node, Node]] = set()
    for m in range(N_MICROBATCHES):
        positions: dict[tuple[bool, tuple[int, int]], list[Node]] = defaultdict(list)
        for n in work:
            if n[0].microbatch == m and n[0].phase in (Phase.F, Phase.B, Phase.I):
                positions[n[0].phase != Phase.F, place_in_chain(n[0])].append(n)
        forward = sorted(p for p in positions if not p[0])
        backward = sorted((p for p in positions if p[0]), reverse=True)
        steps = forward + backward
        for a, b in itertools.pairwise(steps):
            edges |= chunkwise(positions[a], positions[b])
    phases: dict[tuple[int, int, int], dict[Phase, list[Node]]] = defaultdict(lambda: defaultdict(list))
    for n in work:
        phases[n[0].kind, n[0].layer, n[0].microbatch][n[0].phase].append(n)
    for by_phase in phases.values():
        edges |= chunkwise(by_phase[Phase.I], by_phase[Phase.W])
        edges |= chunkwise(by_phase[Phase.F], by_phase[Phase.R])
        edges |= chunkwise(by_phase[Phase.R], by_phase[Phase.B] + by_phase[Phase.I])
    for (kind, layer, m), by_phase in list(phases.items()):
        if kind in (Kind.DISPATCH, Kind.COMBINE):
            for neighbour, sends in ((kind - 1, False), (kind + 1, True)):
                other = phases[neighbour, layer, m][Phase.R] if neighbour != Kind.P2P else []
                pair = (by_phase[Phase.R], other) if sends else (other, by_phase[Phase.R])
                edges |= chunkwise(*pair)
    return edges | reference_step_end(nodes)


def reference_step_end(nodes: list[Node]) -> set[tuple[Node, Node]]:
    compute = (Kind.EMBED, Kind.ATTN, Kind.FFN, Kind.HEAD, Kind.STAGE)
    gradients = [n for n in nodes if n[0].kind in compute and n[0].phase in (Phase.B, Phase.W)]
    optimizers = [n for n in nodes if n[0].kind == Kind.OPTIM]
    edges: set[tuple[Node, Node]] = set()
    reduced: set[Node] = set()
    for s in nodes:
        if s[0].kind == Kind.GRAD_SYNC and s[0].phase == Phase.B:
            mine = [g for g in gradients if g[1] == s[1] and s[0].layer in (-1, g[0].layer)]
            reduced |= set(mine)
            edges |= {(g, s) for g in mine} | {(s, o) for o in optimizers}
        if s[0].kind == Kind.GRAD_SYNC and s[0].phase == Phase.F:
            edges |= {(o, s) for o in optimizers if o[1] == s[1]}
    return edges | {(g, o) for g in gradients if g not in reduced for o in optimizers if o[1] == g[1]}


@st.composite
def node_sets(draw: st.DrawFn) -> list[Node]:
    worker = st.integers(0, N_WORKERS - 1)
    nodes: dict[tuple[Op, int, int], None] = {}
    layers = draw(st.integers(1, N_LAYERS))
    work = st.sampled_from([k for k in Kind if k not in (Kind.GRAD_SYNC, Kind.OPTIM)])
    for _ in range(draw(st.integers(0, 40))):
        kind, phase = draw(work), draw(st.sampled_from(Phase))
        layer = -1 if kind in (Kind.EMBED, Kind.HEAD) else draw(st.integers(0, layers - 1))
        chunk = draw(st.integers(-1, N_CHUNKS - 1))
        op = Op(kind, phase, layer, draw(st.integers(0, N_MICROBATCHES - 1)), chunk)
        here = 0 if kind == Kind.HEAD else draw(worker)  # a head on several workers has rules of its own
        transfer = kind in (Kind.DISPATCH, Kind.COMBINE, Kind.P2P) and draw(st.booleans())
        nodes[op, here, (here + draw(st.integers(1, N_WORKERS - 1))) % N_WORKERS if transfer else -1] = None
    for _ in range(draw(st.integers(0, 6))):
        end = draw(st.sampled_from([Kind.GRAD_SYNC, Kind.OPTIM]))
        layer = draw(st.integers(-1, layers - 1)) if end == Kind.GRAD_SYNC else -1
        nodes[Op(end, draw(st.sampled_from([Phase.F, Phase.B])), layer), draw(worker), -1] = None
    return draw(st.permutations(list(nodes)))


def rows_of(nodes: list[Node]) -> list[Row]:
    rows = []
    for op, worker, peer in nodes:
        if peer == -1:
            rows.append(Row(worker, Stream.COLL, op))
        else:
            rows += [Row(worker, Stream.SEND, op, peer), Row(peer, Stream.RECV, op, worker)]
    return rows


@settings(max_examples=300, deadline=None)
@given(node_sets())
def test_graph_equals_the_reference(nodes: list[Node]) -> None:
    sizes = {"n_layers": N_LAYERS, "n_microbatches": N_MICROBATCHES, "n_chunks": N_CHUNKS}
    program = Program.from_rows(rows_of(nodes), n_workers=N_WORKERS, **sizes)
    graph = build_graph(program)
    names = [(program.op(r), int(program.worker[r]), int(program.peer[r])) for r in map(int, graph.first_row)]
    source = np.repeat(np.arange(graph.n_nodes), np.diff(graph.succ_ptr))
    found = [(names[i], names[j]) for i, j in zip(source, graph.succ, strict=True)]
    assert len(set(found)) == len(found)
    assert set(found) == reference_edges(nodes)
    for node, (op, worker, peer) in enumerate(names):
        second = int(graph.second_row[node])
        assert (second >= 0) == (peer >= 0)
        if second >= 0:
            assert (program.op(second), int(program.worker[second]), int(program.peer[second])) == (op, peer, worker)


def test_equal_programs_give_equal_graphs() -> None:
    first, second = build_graph(from_text(DISAGGREGATED)), build_graph(from_text(DISAGGREGATED))
    for name in ("node", "succ_ptr", "succ", "indegree", "first_row", "second_row"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["megatron_1f1b", "megatron_1f1b_overlap", "tutel", "comet", "dualpipe", "disagmoe"]),
    pick=st.integers(0, 10_000),
    lost=st.one_of(st.none(), st.integers(0, 10_000)),
)
def test_edges_of_one_micro_batch_stand_for_all_where_all_are_alike(name: str, pick: int, lost: int | None) -> None:
    """And where one lacks a row, or has another's, every micro-batch is looked at."""
    pr = problem("tiny", ep=8, global_batch=128)
    system = variants_of(get_system(name), "uniform")[0].system
    listed = list(system.candidates(pr))
    levels = recompute_levels(system)
    try:
        layout = system.layout(pr, {**listed[pick % len(listed)], **levels[pick % len(levels)]})
        program = system.program(pr, layout)
    except NotApplicable:
        assume(False)
    if lost is not None:
        changed = program.microbatch.copy()
        row = int(np.flatnonzero(program.peer < 0)[lost % int((program.peer < 0).sum())])
        changed[row] = (changed[row] + 1) % program.n_microbatches
        program = replace(program, microbatch=changed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "disagmoe.plan.dependencies._microbatch_edges",
            lambda _, ops, __, members: dependencies._edges_inside(ops, members),
        )
        slow = graph_or_error(program)
    assert graph_or_error(program) == slow


def graph_or_error(program: Program) -> tuple[object, ...]:
    try:
        graph = build_graph(program)
    except PlanError as error:
        return ("error", str(error))
    return tuple(getattr(graph, name).tolist() for name in ("node", "succ_ptr", "succ", "indegree", "first_row"))
