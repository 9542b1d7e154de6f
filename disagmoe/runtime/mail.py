"""Letters: the header to every peer of a hop, and behind it whatever is small enough to come along.

Decides what rides: metadata where they fit into a letter, rows where they fit behind
the metadata. Both ranks of a pair tell it from the header, so nothing is said twice.
A message costs far more than the bytes of a small one: most exchanges of small
micro-batches are over with their letters, and the rows of large ones are under way
while their metadata are being read. Nothing behind a header is touched before the
header has been checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from disagmoe.runtime.header import HEADER_BYTES, Header, header_bytes, header_of
from disagmoe.runtime.transport import Channel, Posted, Slab, Transport

WORD_BYTES = 4

Raw = np.ndarray[Any, np.dtype[np.uint8]]


class Mail:
    """The letters of one hop, on one rank: `headers` by position of the peer; `words` and `rows` are to be sent.

    `words_ride` and `rows_ride` are the peers whose metadata and whose rows are in their letters.
    """

    def __init__(
        self, headers: Mapping[int, Header], words: Slab, rows: Slab, row_bytes: int, transport: Transport
    ) -> None:
        self.headers = headers
        self._words, self._rows, self._row_bytes = words, rows, row_bytes
        self._transport = transport
        self._room = transport.letter_bytes
        self._inbox = torch.empty(len(headers) * self._room, dtype=torch.uint8)
        self.words_ride, self.rows_ride = self._riding(headers)

    def post(self) -> Posted:
        """Send the letters; those of the peers are awaited with what this returns."""
        transport = self._transport
        if not self.headers and not transport.collective:
            return Posted(transport.link)
        sizes, rooms = [0] * len(self._words.splits), [0] * len(self._words.splits)
        for position, header in self.headers.items():
            rooms[position] = self._room
            sizes[position] = HEADER_BYTES
            sizes[position] += WORD_BYTES * header.words if position in self.words_ride else 0
            sizes[position] += self._row_bytes * header.rows if position in self.rows_ride else 0
        letters = torch.empty(sum(sizes), dtype=torch.uint8)
        self._write(letters.numpy())
        return transport.start(Channel.LETTER, Slab(letters, tuple(sizes)), Slab(self._inbox, tuple(rooms)))

    def read(self) -> dict[int, Header]:
        """The headers of the peers, by position."""
        starts = range(0, self._inbox.shape[0], self._room)
        raw = self._inbox.numpy()
        return {i: header_of(raw[at : at + HEADER_BYTES].tobytes()) for i, at in zip(self.headers, starts, strict=True)}

    def unpack(self, theirs: Mapping[int, Header], words: Slab, rows: Slab) -> tuple[frozenset[int], frozenset[int]]:
        """Lay what rode with the peers' letters down in `words` and `rows`; whose words and whose rows those were.

        `theirs` are the headers of `read`, checked.
        """
        words_rode, rows_rode = self._riding(theirs)
        buffer = self._inbox.numpy()
        for i, position in enumerate(theirs):
            at = i * self._room + HEADER_BYTES
            for slab, rode in ((words, words_rode), (rows, rows_rode)):
                if position in rode and slab.splits[position]:
                    raw = _raw(slab.piece(position))
                    raw[:] = buffer[at : at + raw.size]
                    at += raw.size
        return words_rode, rows_rode

    def _write(self, buffer: Raw) -> None:
        at = 0
        for position, header in self.headers.items():
            buffer[at : at + HEADER_BYTES] = np.frombuffer(header_bytes(header), np.uint8)
            at += HEADER_BYTES
            for slab, ride in ((self._words, self.words_ride), (self._rows, self.rows_ride)):
                if position in ride and slab.splits[position]:
                    raw = _raw(slab.piece(position))
                    buffer[at : at + raw.size] = raw
                    at += raw.size

    def _riding(self, headers: Mapping[int, Header]) -> tuple[frozenset[int], frozenset[int]]:
        """The peers whose metadata, and those whose rows too, fit into a letter."""
        room = self._room - HEADER_BYTES
        words, rows = [], []
        for position, header in headers.items():
            size = WORD_BYTES * header.words
            if size <= room:
                words.append(position)
                if size + self._row_bytes * header.rows <= room:
                    rows.append(position)
        return frozenset(words), frozenset(rows)


def _raw(tensor: Tensor) -> Raw:
    """The bytes of a contiguous tensor of the host."""
    raw: Raw = tensor.view(torch.uint8).numpy().reshape(-1)
    return raw
