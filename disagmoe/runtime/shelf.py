"""What the operations of one step leave for each other on one rank.

Decides the names of the values that travel between operations. Every value is put
once and taken as often as it was put for; what is left at the end of a step was computed for nothing.
With i the layer and b the micro-batch:

- `rows` (i, b, chunk): input of attention i; i = number of layers: input of the head;
- `rows_grad` (i, b, chunk): its gradient; `far_grad`: another worker's part of it;
- `sent` (i, b, chunk): what attention i gives the experts, as `AttentionOutput`;
- `sent_grad` (i, b, chunk): gradients of its rows and gate weights;
- `arrived` (i, b, chunk): what the holder of experts got, as `Arrived`;
- `arrived_grad` (i, b, chunk): gradients of its rows and gate weights;
- `made` (i, b, chunk): partial sums of the experts; `made_grad`: their gradient;
- `dispatch`, `combine` (i, b, chunk): routes of the two exchanges;
- `saved_...` (i, b, chunk): the handle of a forward pass;
- `kept_...`, `again_...`: what a recomputation starts from, what it leaves.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from disagmoe.runtime.lane import keep_for
from disagmoe.runtime.merge import near_equal

Label = tuple[str, int, int, int]


class Shelf:
    """Values by label. Used by all threads of a rank; on a GPU memory is kept for the stream that takes a value.

    `chunks`: into how many near-equal runs of rows a layer's exchange is split.
    """

    def __init__(self, device: torch.device, chunks: int = 1) -> None:
        self.chunks = chunks
        self._values: dict[Label, Any] = {}
        self._uses: dict[Label, int] = {}
        self._lock = threading.Lock()
        self._cuda = device.type == "cuda"

    def put(self, name: str, layer: int, microbatch: int, value: Any, chunk: int = 0, *, uses: int = 1) -> None:
        """Leave a value that is taken `uses` times; there must be none of that label."""
        label = (name, layer, microbatch, chunk)
        if label in self._values:
            raise RuntimeError(f"{_words(label)} was put twice")
        self._uses[label] = uses
        self._values[label] = value

    def take(self, name: str, layer: int, microbatch: int, chunk: int = 0) -> Any:
        """The value; it is gone after its last use."""
        value = self.look(name, layer, microbatch, chunk)
        label = (name, layer, microbatch, chunk)
        with self._lock:
            self._uses[label] -= 1
            if not self._uses[label]:
                del self._uses[label], self._values[label]
        return value

    def look(self, name: str, layer: int, microbatch: int, chunk: int = 0) -> Any:
        """The value, which stays."""
        label = (name, layer, microbatch, chunk)
        if label not in self._values:
            raise RuntimeError(f"{_words(label)} is not there: the Program lacks the operation that makes it")
        value = self._values[label]
        if self._cuda:
            keep_for(value, torch.cuda.current_stream())
        return value

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows chunk by chunk."""
        return torch.split(rows, list(near_equal(rows.shape[0], self.chunks)))

    def put_rows(self, name: str, layer: int, microbatch: int, rows: Tensor, *, uses: int = 1) -> None:
        """Leave rows, chunk by chunk."""
        for chunk, part in enumerate(self.split(rows)):
            self.put(name, layer, microbatch, part, chunk, uses=uses)

    def take_rows(self, name: str, layer: int, microbatch: int) -> Tensor:
        """The rows of all chunks."""
        return joined([self.take(name, layer, microbatch, chunk) for chunk in range(self.chunks)])

    def left(self) -> list[str]:
        """What nobody took, in words."""
        return [_words(label) for label in self._values]


def joined(parts: list[Tensor]) -> Tensor:
    """Rows one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _words(label: Label) -> str:
    name, layer, microbatch, chunk = label
    return f"'{name}' of layer {layer}, micro-batch {microbatch}, chunk {chunk}"
