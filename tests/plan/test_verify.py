"""verify: sound Programs pass, every seeded fault is refused by name, deadlocks agree with a slow executor."""

from __future__ import annotations

import numpy as np
import pytest

from disagmoe.ops import Kind, Stream
from disagmoe.plan.dependencies import PlanError, build_graph
from disagmoe.plan.plan import Batch, Layout, Placement, Plan, Worker
from disagmoe.plan.program import COLUMNS, Program
from disagmoe.plan.text import from_text, op_token, to_text
from disagmoe.plan.verify import verify
from tests.plan.handwritten import ALL, COLOCATED, DISAGGREGATED, SPLIT, STAGES, TUTEL, edited, repacked


@pytest.mark.parametrize("text", ALL)
def test_sound_programs_pass(text: str) -> None:
    verify(from_text(text))


def test_a_plan_is_verified_by_its_program() -> None:
    worker = Worker("w", "AF", gpus=2, nodes=1, nic_gbs=50.0)
    placement = Placement((worker,), attn=(0, 0), ffn=(0, 0), embed=0, head=0)
    layout = Layout("toy", "", placement, Batch(2, 1, 2), ep=2, transport="nccl", merge="none")
    verify(Plan(layout, from_text(COLOCATED)))
    with pytest.raises(PlanError, match="A0F0 is not in the Program"):
        verify(Plan(layout, edited(COLOCATED, ("A0F0 ", ""))))


SEEDED = {
    "dropped operation": (
        DISAGGREGATED,
        [("M0F1 ", "")],
        "missing operation: M0F1 is not in the Program",
    ),
    "dropped transfer, both ends": (
        DISAGGREGATED,
        [("D1F0>1 ", ""), ("D1F0<0 ", "")],
        "missing operation: D1F0 is not in the Program",
    ),
    "dropped chunk": (
        TUTEL,
        [("M0B0.1 ", "")],
        "missing operation: M0B0.1 is not in the Program",
    ),
    "dropped layer": (
        COLOCATED,
        [(f" M0{phase}{m}", "") for phase in "FB" for m in "01"],
        "missing operations: FFN of layer 0 (M0F0, ...) appears nowhere",
    ),
    "duplicated operation": (
        DISAGGREGATED,
        [("M0F1 ", "M0F1 M0F1 ")],
        "duplicated operation: M0F1@w1 and M0F1@w1",
    ),
    "the same operation on two workers": (
        DISAGGREGATED,
        [("O-F-\nw1 COLL", "A0F0 O-F-\nw1 COLL")],
        "duplicated operation: A0F0@w0 and A0F0@w1",
    ),
    "all chunks beside one of them": (
        TUTEL,
        [("M0F0.1 ", "M0F0.1 M0F0.- ")],
        "repeated operation: M0F0 is covered 2 times, 1 time is right",
    ),
    "swapped receive": (
        DISAGGREGATED,
        [("D0F0<0 D0F1<0", "D0F1<0 D0F0<0")],
        "swapped receive: D0F0 w0>w1 is sent before D0F1 w0>w1 but received after it",
    ),
    "unmatched send": (
        DISAGGREGATED,
        [("D0F0<0 ", "")],
        "unmatched send: D0F0 w0>w1 has no receive on worker 1",
    ),
    "unmatched receive": (
        DISAGGREGATED,
        [("C0F1>0 ", "")],
        "unmatched receive: C0F1 w1>w0 has no send on worker 1",
    ),
    "cycle on one worker": (
        COLOCATED,
        [("A0F0 M0F0", "M0F0 A0F0")],
        "deadlock: M0F0@w0 -> A0F0@w0 -> M0F0@w0",
    ),
    "W before I": (
        SPLIT,
        [("A0I0 M0W0.- A0W0", "A0W0 A0I0 M0W0.-")],
        "deadlock: A0W0@w0 -> A0I0@w0 -> A0W0@w0",
    ),
    "recompute after the backward": (
        SPLIT,
        [("M0R0.1 M0I0 M0I0.1", "M0I0 M0I0.1 M0R0.1")],
        "deadlock: M0I0.1@w0 -> M0R0.1@w0 -> M0I0.1@w0",
    ),
    "compute on a communication stream": (
        COLOCATED,
        [("w0 COLL: ", "w0 COLL: A0F0 "), ("E-F0 A0F0", "E-F0")],
        "wrong stream: A0F0@w0 (ATTN) is on COLL, allowed: COMPUTE, COMPUTE_B",
    ),
    "communication on a compute stream": (
        COLOCATED,
        [("w0 COLL: D1F0 ", "w0 COLL: "), ("A1F0 ", "A1F0 D1F0 ")],
        "unmatched wait: D1F0@w0 waits for a transfer that its worker has no part in",
    ),
    "sent and received in different directions": (
        DISAGGREGATED,
        [("D0F0<0 ", ""), ("w1 SYNC", "w1 RECV_B: D0F0<0\nw1 SYNC")],
        "wrong stream: D0F0 w0>w1 leaves on SEND and arrives on RECV_B",
    ),
    "a peer out of range": (
        DISAGGREGATED,
        [("D0F0>1", "D0F0>2")],
        "row 13: peer 2 is not allowed, -1..1 is",
    ),
    "a send to itself": (
        DISAGGREGATED,
        [("D0F0>1", "D0F0>0")],
        "peer: D0F0 w0>w0 needs another worker as its peer, not 0",
    ),
    "a peer without a transfer": (
        DISAGGREGATED,
        [("C1F0 ", "C1F0>0 ")],
        "peer: C1F0@w1 names peer 0 but is no transfer",
    ),
    "pair of one micro-batch": (
        STAGES,
        [("S1F0 S1F1&0 S1B0&0", "S1F0&0 S1B0&0 S1F1")],
        "pair 0 (S1F0@w1 S1B0@w1) has its forward and its backward on the same micro-batch",
    ),
    "pair of two forwards": (
        STAGES,
        [("S1F0 S1F1&0 S1B0&0", "S1F0&0 S1F1&0 S1B0")],
        "pair 0 (S1F0@w1 S1F1@w1) is not one forward and one backward",
    ),
    "pair of three": (
        STAGES,
        [("S1F0 S1F1&0 S1B0&0", "S1F0&0 S1F1&0 S1B0&0")],
        "pair 0 (S1F0@w1 S1F1@w1 S1B0@w1) is not one forward and one backward",
    ),
    "pair of one": (
        STAGES,
        [("S1F1&0", "S1F1")],
        "pair 0 (S1B0@w1) is not one forward and one backward",
    ),
    "pair across workers": (
        STAGES,
        [("S0F1", "S0F1&0"), ("S1F1&0", "S1F1")],
        "pair 0 (S0F1@w0 S1B0@w1) lies on several workers",
    ),
    "pair with a stage in between": (
        STAGES,
        [("S1F1&0 S1B0&0 S1B1", "S1F1&0 S1B1 S1B0&0")],
        "pair 0 (S1F1@w1 S1B0@w1) is not two stages next to each other on one stream",
    ),
    "pair that waits for itself": (
        # S1B0 must precede S0B0, which on worker 0 precedes S0F1, which S1F1 needs: as one unit S1F1;S1B0 cannot start.
        STAGES,
        [("S0F0 S0F1 S0B0", "S0F0 S0B0 S0F1")],
        "deadlock: S0B0@w0 -> S0F1@w0 -> (S1F1@w1;S1B0@w1) -> S0B0@w0",
    ),
    "both B and I": (
        SPLIT,
        [("A0I0 ", "A0I0 A0B0 ")],
        "repeated operation: A0B0 is covered 1 time, its backward is split into I and W",
    ),
    "B and W": (
        COLOCATED,
        [("A0B0 ", "A0B0 A0W0 ")],
        "repeated operation: A0W0 is covered 1 time, its backward is whole (B), not I and W",
    ),
    "I without W": (
        SPLIT,
        [(" A0W0", "")],
        "missing operation: A0W0 is not in the Program",
    ),
    "recomputed twice": (
        SPLIT,
        [("M0R0.1 ", "M0R0.1 M0R0.- ")],
        "repeated operation: M0R0 is covered 2 times, 1 time is right",
    ),
    "forward only": (
        STAGES,
        [(f"S{s}B{m}{pair}", "") for s, m, pair in ((0, 0, ""), (0, 1, ""), (1, 0, "&0"), (1, 1, ""))]
        + [("S1F1&0", "S1F1")],
        "forward-only Program: it has no backward operation (B, or I and W)",
    ),
    "micro-batch in two replicas": (
        COLOCATED,
        [("D1F0 ", "D1F0~1 ")],
        "two replicas: A1B0@w0 and D1F0~1@w0 are the same layer and micro-batch",
    ),
    "a layer on two workers": (
        # The whole of stage 0 of micro-batch 1 moves to worker 1.
        STAGES,
        [("S0F0 S0F1 S0B0 S0B1", "S0F0 S0B0"), ("S1F0 S1F1&0 S1B0&0 S1B1", "S1F0 S0F1 S1F1&0 S1B0&0 S1B1 S0B1")],
        "two places: S0B0@w0 and S0F1@w1 are the same layer on different workers",
    ),
    "data on another worker": (
        # Both micro-batches skip the combine of layer 0, forward and backward.
        DISAGGREGATED,
        [
            ("RECV: C0F0<1 C0F1<1 ", "RECV: "),
            ("SEND: C0F0>0 C0F1>0 ", "SEND: "),
            (" C0B0>1 C0B1>1", ""),
            (" C0B0<0 C0B1<0", ""),
        ],
        "missing transfer: M0B0@w1 needs the result of A1B0@w0, which is not on its worker",
    ),
    "dropped reduction": (
        DISAGGREGATED,
        [("w1 SYNC: G1B- ", "w1 SYNC: ")],
        "missing operation: G1B-@w1 is not in the Program, other gradients are reduced",
    ),
    "dropped gathering": (
        DISAGGREGATED,
        [("G-F-\nw1 COMPUTE", "\nw1 COMPUTE")],
        "missing operation: G-F-@w0 is not in the Program, other gradients are gathered",
    ),
    "dropped optimizer": (
        DISAGGREGATED,
        [(" O-F-\nw1 COLL", "\nw1 COLL")],
        "missing operation: O-F-@w1 is not in the Program, other gradients are applied",
    ),
    "reduction of a layer that lives elsewhere": (
        STAGES,
        [("w1 COMPUTE", "w0 SYNC: G0B- G1B-\nw1 SYNC: G1B-\nw1 COMPUTE")],
        "nothing to do: G1B-@w0, this worker has no gradient of layer 1",
    ),
    "stages beside layers": (
        STAGES,
        [("S0B1", "S0B1 A0F0")],
        "a Program is made of whole stages or of layers' operations, not of both",
    ),
    "a communication split into I": (
        SPLIT,
        [("C0B0.1", "C0I0.1")],
        "C0I0.1@w0: COMBINE has no phase I, only F, B, R",
    ),
    "a micro-batch out of range": (
        STAGES,
        [("S0F1", "S0F2")],
        "row 1: microbatch 2 is not allowed, -1..1 is",
    ),
    "compute without micro-batch": (
        STAGES,
        [("S0F1", "S0F-")],
        "S0F-@w0: STAGE needs a micro-batch",
    ),
    "compute without layer": (
        STAGES,
        [("S0F1", "S-F1")],
        "S-F1@w0: STAGE needs a layer",
    ),
}


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_faults_are_refused_by_name(name: str) -> None:
    text, changes, complaint = SEEDED[name]
    with pytest.raises(PlanError) as error:
        verify(edited(text, *changes))
    assert str(error.value) == complaint


@pytest.mark.parametrize("text", [DISAGGREGATED, TUTEL])
def test_any_dropped_row_is_refused(text: str) -> None:
    program = from_text(text)
    rows = list(program.rows())
    alone = {Kind.OPTIM, Kind.GRAD_SYNC} if program.n_workers == 1 else set()  # nothing there to compare with
    for i, row in enumerate(rows):
        if row.op.kind not in alone:
            with pytest.raises(PlanError) as error:
                verify(repacked(program, rows[:i] + rows[i + 1 :]))
            assert op_token(row.op) in str(error.value)


@pytest.mark.parametrize("text", ALL)
def test_any_duplicated_row_is_refused(text: str) -> None:
    program = from_text(text)
    rows = list(program.rows())
    for i, row in enumerate(rows):
        with pytest.raises(PlanError, match=f"duplicated operation: {op_token(row.op)}"):
            verify(repacked(program, [*rows[: i + 1], *rows[i:]]))


@pytest.mark.parametrize("text", [COLOCATED, DISAGGREGATED])
def test_any_operation_on_a_stream_of_the_other_sort_is_refused(text: str) -> None:
    program = from_text(text)
    rows = list(program.rows())
    for i, row in enumerate(rows):
        other = Stream.SYNC if row.stream == Stream.COMPUTE else Stream.COMPUTE
        # A communication on a compute stream is a wait, but it has no peer and the transfer itself is still needed.
        with pytest.raises(PlanError, match=f"(wrong stream|unmatched wait|peer): {op_token(row.op)}"):
            verify(repacked(program, [*rows[:i], row._replace(stream=other), *rows[i + 1 :]]))


def test_recompute_policy() -> None:
    program = from_text(SPLIT)
    verify(program, recompute=[Kind.FFN, Kind.DISPATCH])
    with pytest.raises(PlanError, match="missing operation: A0R0 is not in the Program"):
        verify(program, recompute=[Kind.ATTN, Kind.FFN, Kind.DISPATCH])
    with pytest.raises(PlanError, match="repeated operation: D0R0 is covered 1 time, 0 times is right"):
        verify(program, recompute=[Kind.FFN])


def test_memory_limit_names_the_worker() -> None:
    program = from_text(DISAGGREGATED)
    verify(program, memory_gib=[70.0, 75.6], limit_gib=75.6)
    with pytest.raises(PlanError, match=r"memory: worker 1 needs 80\.25 GiB, the limit is 75\.60 GiB"):
        verify(program, memory_gib=lambda p: [70.0] * (p.n_workers - 1) + [80.25], limit_gib=75.6)
    with pytest.raises(PlanError, match=r"one value per worker \(2\)"):
        verify(program, memory_gib=[1.0], limit_gib=75.6)
    with pytest.raises(PlanError, match="worker 0 needs nan GiB"):
        verify(program, memory_gib=[float("nan"), 1.0], limit_gib=75.6)


def test_an_empty_program_and_ungrouped_rows_are_refused() -> None:
    with pytest.raises(PlanError, match="no operations"):
        verify(Program.from_rows([], n_workers=1, n_layers=1, n_microbatches=1))
    program = from_text(DISAGGREGATED)
    columns = {name: getattr(program, name)[::-1].copy() for name in COLUMNS}
    with pytest.raises(PlanError, match="not grouped by worker and stream"):
        verify(Program(program.n_workers, program.n_layers, program.n_microbatches, program.n_chunks, **columns))


def test_a_graph_given_is_the_graph_used() -> None:
    """Saving the graph must not change the verdict."""
    program = from_text(DISAGGREGATED)
    graph = build_graph(program)
    verify(program, graph=graph)
    broken = edited(DISAGGREGATED, ("A0F0 E-F1 A0F1", "A0F1 E-F1 A0F0"))
    with pytest.raises(PlanError, match="deadlock"):
        verify(broken, graph=build_graph(broken))
    assert to_text(program) == to_text(from_text(DISAGGREGATED))
    np.testing.assert_array_equal(graph.node, build_graph(program).node)
