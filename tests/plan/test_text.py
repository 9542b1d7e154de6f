"""Both text forms: the lossless one read back, the stage projection against what pipeline papers print."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.program import COLUMNS, Program, Row
from disagmoe.plan.text import from_text, op_token, row_token, stage_text, to_text
from tests.plan.handwritten import ALL, DISAGGREGATED, SPLIT, STAGES

NUMBER = st.integers(-1, 200)
ROWS = st.lists(
    st.builds(
        Row,
        worker=st.integers(0, 20),
        stream=st.sampled_from(Stream),
        op=st.builds(Op, st.sampled_from(Kind), st.sampled_from(Phase), NUMBER, NUMBER, NUMBER, NUMBER),
        peer=NUMBER,
        pair=NUMBER,
    ),
    max_size=30,
)


@given(ROWS, st.integers(1, 200), st.integers(1, 200), st.integers(1, 200))
def test_reading_what_was_written_gives_the_same_program(rows: list[Row], layers: int, m: int, chunks: int) -> None:
    program = Program.from_rows(rows, n_workers=21, n_layers=layers, n_microbatches=m, n_chunks=chunks)
    again = from_text(to_text(program))
    sizes = ("n_workers", "n_layers", "n_microbatches", "n_chunks")
    assert [getattr(program, s) for s in sizes] == [getattr(again, s) for s in sizes]
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(program, name), getattr(again, name), err_msg=name)


@pytest.mark.parametrize("text", ALL)
def test_the_written_form_is_the_canonical_text(text: str) -> None:
    assert to_text(from_text(text)) == text.lstrip("\n")


@pytest.mark.parametrize(
    ("op", "token"),
    [
        (Op(Kind.ATTN, Phase.F, 3, 0), "A3F0"),
        (Op(Kind.DISPATCH, Phase.F, 3, 0, 1), "D3F0.1"),
        (Op(Kind.EMBED, Phase.F, -1, 0), "E-F0"),
        (Op(Kind.FFN, Phase.W, 12, 40, -1), "M12W40.-"),
        (Op(Kind.STAGE, Phase.B, 1, 2, 0, 1), "S1B2~1"),
        (Op(Kind.GRAD_SYNC, Phase.B, -1, -1), "G-B-"),
    ],
)
def test_tokens_as_documented(op: Op, token: str) -> None:
    assert op_token(op) == token


def test_names_in_messages_say_where_a_row_runs() -> None:
    program = from_text(DISAGGREGATED)
    names = [row_token(program, i) for i in range(len(program))]
    assert names[0] == "E-F0@w0"
    assert names.count("D0F0 w0>w1") == 2  # both ends of a transfer have one name


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("w0 COMPUTE: A0X0", "'A0X0' is not an operation"),
        ("w0 COMPUTE: A0F0.", "'A0F0.' is not an operation"),
        ("w0 GPU: A0F0", "'w0 GPU: A0F0' is not 'w<worker> <stream>: <operations>'"),
        ("w0 RECV: D0F0>1", "'D0F0>1' on stream RECV must write its peer as <"),
    ],
)
def test_unreadable_lines_are_named(line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="line 3: ") as error:
        from_text(f"program workers=1 layers=1 microbatches=1 chunks=1\n# a comment\n{line}\n")
    assert complaint in str(error.value)


def test_a_text_without_header_is_refused() -> None:
    with pytest.raises(ValueError, match="must start with 'program workers="):
        from_text("w0 COMPUTE: A0F0\n")


def test_values_below_minus_one_are_refused() -> None:
    program = Program.from_rows(
        [Row(0, Stream.COMPUTE, Op(Kind.ATTN, Phase.F, -2, 0))], n_workers=1, n_layers=1, n_microbatches=1
    )
    with pytest.raises(ValueError, match="-2 has no text form"):
        to_text(program)


def test_stage_projection_of_a_stage_level_program() -> None:
    assert stage_text(from_text(STAGES)) == "w0: 0F0 0F1 0B0 0B1\nw1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1\n"


def test_stage_projection_of_a_layer_level_program() -> None:
    # Four layers in two stages; interleaved layer operations of one pair are one token, forward first.
    text = """
program workers=1 layers=4 microbatches=2 chunks=1
w0 COMPUTE: E-F0 A0F0 M0F0 A1F0 M1F0 A2B0&5 A3F1&5 M2B0&5 M3F1&5 M1B0 A1B0 M0B0 A0B0
w0 COMPUTE_B: M3I1 A3I1 M3W1 A3W1 O-F-
"""
    assert stage_text(from_text(text), [0, 0, 1, 1]) == ("w0: 0F0 (1F1;1B0)OVERLAP_F_B 0B0\nw0 COMPUTE_B: 1I1 1W1\n")


def test_stage_projection_lists_attention_and_expert_workers_apart() -> None:
    assert stage_text(from_text(DISAGGREGATED), [0, 1]) == (
        "w0: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1\nw1: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1\n"
    )


def test_stage_projection_prints_a_chunked_stage_once() -> None:
    assert stage_text(from_text(SPLIT), [0]) == "w0: 0F0 0R0 0I0 0W0\n"


def test_stage_map_must_cover_the_layers() -> None:
    with pytest.raises(ValueError, match="3 entries for 2 layers"):
        stage_text(from_text(DISAGGREGATED), [0, 0, 1])
