"""Headers: what goes in comes out, and every difference is found from both sides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.ops import Kind, Op, Phase
from disagmoe.runtime.errors import ExchangeError, PeerLostError
from disagmoe.runtime.header import (
    HEADER_BYTES,
    MAGIC,
    UNKNOWN,
    Header,
    check_headers,
    dtype_code,
    name_op,
    pack_op,
    unpack_op,
)

OP = Op(Kind.DISPATCH, Phase.F, layer=2, microbatch=5)
GOOD = Header(MAGIC, 0, pack_op(OP), 0, 100, dtype_code(torch.bfloat16), 64, 4, 7, 30, UNKNOWN, UNKNOWN)

ops = st.builds(
    Op,
    st.sampled_from(list(Kind)),
    st.sampled_from(list(Phase)),
    st.integers(-1, 2**20 - 2),
    st.integers(-1, 2**20 - 2),
    st.integers(-1, 254),
    st.integers(0, 15),
)


@given(ops)
def test_operations_survive_a_header(op):
    packed = pack_op(op)
    assert unpack_op(packed) == op
    assert 0 <= packed < 2**63


@pytest.mark.parametrize("op", [OP._replace(layer=2**20), OP._replace(chunk=-2), OP._replace(replica=16)])
def test_what_does_not_fit_is_refused(op):
    with pytest.raises(ValueError, match="cannot be put into a header"):
        pack_op(op)


def test_names_and_size():
    assert HEADER_BYTES == 104
    assert name_op(OP) == "DISPATCH F of layer 2, micro-batch 5"
    assert name_op(OP._replace(chunk=1, replica=1)).endswith("micro-batch 5, chunk 1, replica 1")
    with pytest.raises(ValueError, match="int64 cannot be exchanged"):
        dtype_code(torch.int64)


def test_equal_headers_pass():
    check_headers(0, GOOD, 3, GOOD)
    check_headers(0, GOOD._replace(rows=9), 3, GOOD._replace(want_rows=9, want_words=30))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"op": pack_op(OP._replace(microbatch=6))}, ("micro-batch 5", "micro-batch 6")),
        ({"stage": 1}, ("hop 0", "hop 1")),
        ({"tokens": 99}, ("100", "99", "tokens")),
        ({"dtype": dtype_code(torch.float64)}, ("bfloat16", "float64")),
        ({"width": 32}, ("64", "32", "width")),
        ({"copy_bytes": 8}, ("4", "8", "gate weight")),
        ({"want_rows": 8}, ("7", "8", "rows")),
        ({"want_words": 29}, ("30", "29", "words")),
        ({"rows": -3}, ("-3",)),
        ({"dtype": 77}, ("unknown type 77",)),
        ({"op": 15 << 55}, ("unknown operation",)),
    ],
)
def test_a_difference_is_found_from_both_sides(change, says):
    other = GOOD._replace(**change)
    for me, mine, peer, theirs in ((4, GOOD, 9, other), (9, other, 4, GOOD)):
        if change == {"op": 15 << 55} and mine is other:
            continue  # nobody starts with an operation that does not exist
        with pytest.raises(ExchangeError) as caught:
            check_headers(me, mine, peer, theirs)
        for word in (*says, "4", "9"):
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)


def test_something_else_than_a_header_and_a_refusal():
    with pytest.raises(ExchangeError, match="sent no header"):
        check_headers(0, GOOD, 1, GOOD._replace(magic=5))
    with pytest.raises(PeerLostError, match="rank 1 refused to exchange with rank 0"):
        check_headers(0, GOOD, 1, GOOD._replace(refused=1))
