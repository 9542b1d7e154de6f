"""What two ranks tell each other before rows move, and how they find out that they disagree.

gloo accepts a message that is shorter than the buffer without a word, kills the
process on a longer one, and never looks at types. So every pair of ranks first
swaps a header of 104 bytes with what it will send, what it expects and what both
must have in common. Both check the same two headers with the same rules: either
both go on or both raise, before any row has moved.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import torch

from disagmoe.ops import Kind, Op, Phase
from disagmoe.runtime.errors import ExchangeError, PeerLostError

MAGIC = 0x4D324E31  # "M2N1"
UNKNOWN = -1
"""Expected count of a rank that learns it from the sender."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_BITS = ((4, 0), (3, 0), (20, 1), (20, 1), (8, 1), (4, 0))  # per field of Op: width, offset of its lowest value


class Header(NamedTuple):
    """One rank's view of one hop of one exchange with one peer.

    `refused` 1: the sender cannot take part. `tokens` of the whole micro-batch.
    `rows` and `words` (4 bytes of metadata each) will be sent; `want_rows` and
    `want_words` are expected, UNKNOWN where the peer decides. `dtype`, `width` of
    rows; `copy_bytes` of one gate weight. `posted_ns` is the logical time at which a
    paced sender was ready (else 0).
    """

    magic: int
    refused: int
    op: int
    stage: int
    tokens: int
    dtype: int
    width: int
    copy_bytes: int
    rows: int
    words: int
    want_rows: int
    want_words: int
    posted_ns: int = 0


_LAYOUT = Struct(f"={len(Header._fields)}q")
HEADER_BYTES = _LAYOUT.size


def header_bytes(header: Header) -> bytes:
    """A header as it travels."""
    return _LAYOUT.pack(*header)


def header_of(raw: bytes) -> Header:
    """The header that `header_bytes` made `raw` of."""
    return Header(*_LAYOUT.unpack(raw))


def dtype_code(dtype: torch.dtype) -> int:
    """Number of a row type in a header."""
    if dtype not in _DTYPES:
        raise ValueError(f"rows of {dtype} cannot be exchanged; allowed: {', '.join(str(d) for d in _DTYPES)}")
    return _DTYPES.index(dtype)


@lru_cache(maxsize=4096)
def pack_op(op: Op) -> int:
    """An operation as one number (59 bits)."""
    packed = 0
    for value, (bits, offset) in zip(op, _BITS, strict=True):
        if not 0 <= value + offset < 1 << bits:
            raise ValueError(f"{op} cannot be put into a header: {value} needs more than {bits} bits")
        packed = packed << bits | (value + offset)
    return packed


def unpack_op(packed: int) -> Op:
    """The operation of a number made by `pack_op`."""
    values = []
    for bits, offset in reversed(_BITS):
        values.append((packed & ((1 << bits) - 1)) - offset)
        packed >>= bits
    replica, chunk, microbatch, layer, phase, kind = values
    return Op(Kind(kind), Phase(phase), layer, microbatch, chunk, replica)


def name_op(op: Op) -> str:
    """An operation in words, as in "DISPATCH F of layer 3, micro-batch 0"."""
    parts = [f"{op.kind.name} {op.phase.name} of layer {op.layer}, micro-batch {op.microbatch}"]
    parts += [f"chunk {op.chunk}"] if op.chunk > 0 else []
    parts += [f"replica {op.replica}"] if op.replica > 0 else []
    return ", ".join(parts)


def check_headers(me: int, mine: Header, peer: int, theirs: Header) -> None:
    """Raise unless the headers that ranks `me` and `peer` gave each other agree."""
    what = name_op(unpack_op(mine.op))
    if theirs.magic != MAGIC:
        raise ExchangeError(f"{what}: rank {peer} sent no header to rank {me} but {theirs.magic:#x}")
    if theirs.refused or mine.refused:
        refused, waits = (peer, me) if theirs.refused else (me, peer)
        raise PeerLostError(f"{what}: rank {refused} refused to exchange with rank {waits}, see its own error")
    if theirs.op != mine.op or theirs.stage != mine.stage:
        raise ExchangeError(
            f"ranks {me} and {peer} are at different operations: rank {me} at {what} (hop {mine.stage}), "
            f"rank {peer} at {_their_op(theirs)} (hop {theirs.stage})"
        )
    for field, label in (
        ("tokens", "the tokens of the micro-batch"),
        ("dtype", "the type of the rows"),
        ("width", "the width of the rows"),
        ("copy_bytes", "the bytes of a gate weight"),
    ):
        own, other = getattr(mine, field), getattr(theirs, field)
        if own != other:
            own, other = (_dtype_name(own), _dtype_name(other)) if field == "dtype" else (own, other)
            raise ExchangeError(
                f"{what}: ranks {me} and {peer} disagree on {label}: rank {me} has {own}, rank {peer} has {other}"
            )
    _check_counts(what, me, mine, peer, theirs)
    _check_counts(what, peer, theirs, me, mine)


def _check_counts(what: str, sender: int, sent: Header, receiver: int, expected: Header) -> None:
    for label, count, want in (
        ("rows", sent.rows, expected.want_rows),
        ("words of metadata", sent.words, expected.want_words),
    ):
        if count < 0 or want not in (UNKNOWN, count):
            raise ExchangeError(
                f"{what}: rank {sender} sends {count} {label}, rank {receiver} expects "
                f"{'any number from 0' if want == UNKNOWN else want}"
            )


def _their_op(header: Header) -> str:
    try:
        return name_op(unpack_op(header.op))
    except ValueError:
        return f"unknown operation {header.op:#x}"


def _dtype_name(code: int) -> str:
    return str(_DTYPES[code]).removeprefix("torch.") if 0 <= code < len(_DTYPES) else f"unknown type {code}"
