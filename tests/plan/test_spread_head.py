"""An output head spread over all F-groups: what waits for what, and the faults verify must name."""

from __future__ import annotations

import numpy as np
import pytest

from disagmoe.ops import Kind, Phase, Stream
from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.dependencies import build_graph, data_edges
from disagmoe.plan.program import COLUMNS, Program
from disagmoe.plan.text import row_token
from disagmoe.plan.verify import PlanError, verify


def spread(p: int, layers: int, m: int = 1) -> Program:
    return af_pipe_program(p=p, layers=layers, m=m, group=2 * p, order="megatron", head="spread")


def edges_of_head(program: Program) -> set[tuple[str, str]]:
    """Edges between the last combine, the P2Ps, the head and the combine's way back, by name."""
    graph = build_graph(program)
    row = graph.first_row
    last = (program.layer[row] == program.n_layers - 1) & np.isin(program.kind[row], (Kind.COMBINE, Kind.P2P))
    part = last | (program.kind[row] == Kind.HEAD)
    name = [row_token(program, int(r)) for r in row]
    return {(name[a], name[b]) for a, b in zip(*data_edges(graph), strict=True) if part[a] and part[b]}


def without(program: Program, drop: np.ndarray) -> Program:
    table = np.stack([getattr(program, name) for name in COLUMNS], axis=1)[~drop]
    sizes = ("n_workers", "n_layers", "n_microbatches", "n_chunks")
    return Program.from_table(table, **{name: getattr(program, name) for name in sizes})


def test_rows_are_passed_on_and_gradients_summed_up_on_the_way_back() -> None:
    """p = 3, L = 3: layer 2 is on F_2 (w5), from where the rows go to F_0 (w3) and on to F_1 (w4)."""
    forward = {
        ("C2F0@w5", "P2F0 w5>w3"),
        ("P2F0 w5>w3", "P2F0.1 w3>w4"),
        ("P2F0 w5>w3", "H-F0@w3"),
        ("P2F0.1 w3>w4", "H-F0.1@w4"),
        ("C2F0@w5", "H-F0.2@w5"),
    }
    heads = [("H-F0@w3", "H-B0@w3"), ("H-F0.1@w4", "H-B0.1@w4"), ("H-F0.2@w5", "H-B0.2@w5")]
    softmax = {(f, b) for f, _ in heads for _, b in heads}
    backward = {
        ("H-B0.1@w4", "P2B0.1 w4>w3"),
        ("H-B0@w3", "P2B0 w3>w5"),
        ("P2B0.1 w4>w3", "P2B0 w3>w5"),
        ("P2B0 w3>w5", "C2B0@w5"),
        ("H-B0.2@w5", "C2B0@w5"),
    }
    # The last layer's own passes are neighbours in the chain as well.
    assert edges_of_head(spread(3, 3)) == forward | softmax | backward | {("C2F0@w5", "C2B0@w5")}


def test_every_f_group_has_its_chunk() -> None:
    program = spread(2, 5, m=4)
    assert program.n_chunks == 2
    for worker in (2, 3):
        rows = program.stream_rows(worker, Stream.COMPUTE)
        head = rows[program.kind[rows] == Kind.HEAD]
        assert set(program.chunk[head].tolist()) == {worker - 2}
        assert sorted(program.phase[head].tolist()) == [Phase.F] * 4 + [Phase.B] * 4
    verify(program)


@pytest.mark.parametrize(
    ("kind", "phase", "chunk", "message"),
    [
        (Kind.HEAD, Phase.F, 0, r"missing operation: H-F0 is not in the Program"),
        (Kind.HEAD, Phase.B, 1, r"missing operation: H-B0.1 is not in the Program"),
        (Kind.P2P, Phase.F, 0, r"missing operation: P1F0 is not in the Program"),
        (Kind.P2P, None, 0, r"missing transfer: C1B0@w3 needs the result of H-B0@w2"),
    ],
)
def test_seeded_faults_are_named(kind: Kind, phase: Phase | None, chunk: int, message: str) -> None:
    """p = 2, L = 2, one micro-batch: the last layer is on F_1 (w3), the P2P leads to F_0 (w2) and back."""
    program = spread(2, 2)
    drop = (program.kind == kind) & (program.chunk == chunk)
    if phase is not None:
        drop &= program.phase == phase
    with pytest.raises(PlanError, match=message):
        verify(without(program, drop))
