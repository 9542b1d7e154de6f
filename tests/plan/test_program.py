"""Program: packing rows into columns and looking at them again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.program import COLUMNS, Program, Row, among

NUMBER = st.integers(-1, 5)
ROWS = st.lists(
    st.builds(
        Row,
        worker=st.integers(0, 3),
        stream=st.sampled_from(Stream),
        op=st.builds(Op, st.sampled_from(Kind), st.sampled_from(Phase), NUMBER, NUMBER, NUMBER, NUMBER),
        peer=st.integers(-1, 3),
        pair=st.integers(-1, 3),
    )
)


def pack(rows: list[Row]) -> Program:
    return Program.from_rows(rows, n_workers=4, n_layers=6, n_microbatches=6)


@given(ROWS)
def test_streams_keep_their_order_and_nothing_is_lost(rows: list[Row]) -> None:
    program = pack(rows)
    assert len(program) == len(rows)
    for worker in range(4):
        for stream in Stream:
            expected = [r for r in rows if (r.worker, r.stream) == (worker, stream)]
            everything = list(program.rows())
            assert [everything[i] for i in program.stream_rows(worker, stream)] == expected


@given(ROWS)
def test_rows_are_grouped_by_worker_then_stream(rows: list[Row]) -> None:
    program = pack(rows)
    places = list(zip(program.worker.tolist(), program.stream.tolist(), strict=True))
    assert places == sorted(places)


def test_columns_are_int32_and_an_op_is_a_view_of_a_row() -> None:
    row = Row(2, Stream.SEND, Op(Kind.DISPATCH, Phase.B, 3, 1, 2, 1), peer=0, pair=7)
    program = pack([row])
    assert all(getattr(program, name).dtype == np.int32 and getattr(program, name).shape == (1,) for name in COLUMNS)
    assert program.op(0) == row.op
    assert list(program.rows()) == [row]


def test_an_empty_program_has_no_rows() -> None:
    assert len(pack([])) == 0


@given(ROWS)
def test_rows_of_a_sort_differ_in_micro_batch_and_pair_only(rows: list[Row]) -> None:
    program = pack(rows)
    of, sample = program.sorts
    names = [name for name in COLUMNS if name not in ("microbatch", "pair")]
    for name in names:
        assert getattr(sample, name)[of].tolist() == getattr(program, name).tolist()
    assert len(sample) == len(set(zip(*(getattr(program, name).tolist() for name in names), strict=True)))
    assert len(sample) == 0 or sorted(set(of.tolist())) == list(range(len(sample)))


@given(ROWS)
def test_a_table_packs_into_the_same_program(rows: list[Row]) -> None:
    program = pack(rows)
    again = Program.from_table(program.table(), n_workers=4, n_layers=6, n_microbatches=6)
    assert all((getattr(again, name) == getattr(program, name)).all() for name in COLUMNS)


@given(st.lists(NUMBER), st.lists(NUMBER, max_size=4))
def test_among_is_isin(column: list[int], members: list[int]) -> None:
    assert among(np.array(column, dtype=np.int32), members).tolist() == [value in members for value in column]
