"""What rides with a header, written and read back byte by byte. No processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.ops import Kind, Op, Phase
from disagmoe.runtime.header import HEADER_BYTES, MAGIC, UNKNOWN, Header, dtype_code, header_bytes, header_of, pack_op
from disagmoe.runtime.mail import Mail
from disagmoe.runtime.transport import Channel, Link, Posted, Slab

ROOM = HEADER_BYTES + 200
OP = Op(Kind.DISPATCH, Phase.F, 0, 0)


@dataclass
class Loop:
    """Member 0's own letters come back to it, as if the peers said the same."""

    letter_bytes: int = ROOM
    collective: bool = False
    link: Link = field(default_factory=lambda: Link((0, 1, 2), 0, None, None, 1.0))
    sent: list[int] = field(default_factory=list)

    def pack(self, slab, ridden) -> None:
        raise AssertionError("letters are packed by whoever writes them")

    def start(self, channel, sent, received, ridden=(), rode=()) -> Posted:
        assert channel is Channel.LETTER
        for i in (1, 2):
            self.sent.append(sent.splits[i])
            received.piece(i)[: sent.splits[i]] = sent.piece(i)
        return Posted(self.link)


def header(rows: int, words: int, dtype: torch.dtype, width: int) -> Header:
    code = pack_op(OP)
    return Header(MAGIC, 0, code, 0, 9, dtype_code(dtype), width, 4, rows, words, UNKNOWN, UNKNOWN, 5)


def test_a_header_survives() -> None:
    told = header(3, 4, torch.float32, 5)
    assert len(header_bytes(told)) == HEADER_BYTES
    assert header_of(header_bytes(told)) == told


@given(
    st.tuples(st.integers(0, 8), st.integers(0, 8)),
    st.tuples(st.integers(0, 60), st.integers(0, 60)),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(1, 5),
    st.booleans(),
)
def test_small_pieces_ride_and_large_ones_do_not(rows, words, dtype, width, shuffled) -> None:
    """Two peers; what fits behind the header comes back bit by bit, what does not is left for a message of its own."""
    n, m = sum(rows), sum(words)
    order = torch.arange(n).flip(0) if shuffled else None
    out_rows = Slab(torch.randn(n, width, dtype=torch.float64).to(dtype), (0, *rows), order)
    out_words = Slab(torch.arange(m, dtype=torch.int32), (0, *words))
    headers = {i + 1: header(rows[i], words[i], dtype, width) for i in range(2)}
    loop, row_bytes = Loop(), width * dtype.itemsize
    mail = Mail(headers, out_words, out_rows, row_bytes, loop)
    mail.post().through()
    theirs = mail.read()
    assert theirs == headers
    got_rows = Slab(torch.full((n, width), -1.0, dtype=dtype), (0, *rows))
    got_words = Slab(torch.full((m,), -1, dtype=torch.int32), (0, *words))
    words_rode, rows_rode = mail.unpack(theirs, got_words, got_rows)
    assert (words_rode, rows_rode) == (mail.words_ride, mail.rows_ride)
    for i in (1, 2):
        size, whole = 4 * words[i - 1], 4 * words[i - 1] + row_bytes * rows[i - 1]
        assert (i in words_rode, i in rows_rode) == (size <= 200, size <= 200 and whole <= 200)
        assert loop.sent[i - 1] == HEADER_BYTES + (whole if i in rows_rode else size if i in words_rode else 0)
        expected = out_words.piece(i) if i in words_rode else torch.full((words[i - 1],), -1, dtype=torch.int32)
        assert torch.equal(got_words.piece(i), expected)
        untouched = torch.full((rows[i - 1], width), -1.0, dtype=dtype)
        assert torch.equal(got_rows.piece(i), out_rows.piece(i) if i in rows_rode else untouched)


def test_nothing_rides_where_letters_hold_headers_only() -> None:
    words, rows = Slab(torch.zeros(1, dtype=torch.int32), (0, 1, 0)), Slab(torch.zeros(1, 3), (0, 1, 0))
    headers = {1: header(1, 1, torch.float32, 3), 2: header(0, 0, torch.float32, 3)}
    mail = Mail(headers, words, rows, 12, Loop(HEADER_BYTES))
    assert 1 not in mail.words_ride | mail.rows_ride
    mail.post().through()
    assert mail.read()[1].rows == 1


@pytest.mark.parametrize(("order", "copied"), [(None, False), ([4, 2, 3, 1], False), ([4, 2, 1, 3], True)])
def test_rows_that_lie_side_by_side_are_sent_where_they_are(order, copied) -> None:
    data = torch.arange(10.0).view(5, 2)
    slab = Slab(data[1:], (1, 2, 1)) if order is None else Slab(data, (1, 2, 1), torch.tensor(order))
    expected = data[1:] if order is None else data[torch.tensor(order)]
    assert torch.equal(torch.cat([slab.piece(i) for i in range(3)]), expected)
    assert torch.equal(slab.packed, expected)
    inside = data.data_ptr() <= slab.piece(1).data_ptr() < data.data_ptr() + data.numel() * data.element_size()
    assert inside != copied
