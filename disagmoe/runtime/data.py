"""Training data: which tokens a sample has.

Decides that data have no state. Sample number i of a run (step x global batch +
place in the batch) is a function of the source, its seed and i alone, so every
rank fetches just what it needs, placement changes nothing, and a resumed run goes
on exactly where it stopped.

A file is cut into windows of `seq` + 1 tokens (neighbours share one token, so every
token but the first is predicted once) that come in a new order in every epoch.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SOURCES = ("synthetic", "text", "tokens")
TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
BYTES = 256
_FOLLOWS = 0.9  # share of synthetic tokens that follow from the one before


class DataError(ValueError):
    """Data that cannot be trained on; the message names the file and the rule."""


class Source(Protocol):
    """An endless, numbered supply of samples."""

    @property
    def title(self) -> str:
        """What it is, for logs and checkpoints: equal titles give equal samples."""
        ...

    def samples(self, numbers: range) -> Tensor:
        """Token ids [n, seq + 1] of these samples, int64."""
        ...


class Synthetic:
    """Sequences in which nine of ten tokens follow from the one before by a fixed random map: learnable, endless."""

    def __init__(self, vocab: int, seq: int, seed: int) -> None:
        self._vocab, self._seq, self._seed = vocab, seq, seed
        self._next = _generator(seed, 0, 1).permutation(vocab)

    @property
    def title(self) -> str:
        return f"synthetic, vocabulary {self._vocab}, seed {self._seed}"

    def samples(self, numbers: range) -> Tensor:
        return torch.from_numpy(np.stack([self._sample(number) for number in numbers]).astype(np.int64))

    def _sample(self, number: int) -> NDArray[np.int64]:
        generator = _generator(self._seed, number, 0)
        tokens = generator.integers(0, self._vocab, self._seq + 1)
        follows = generator.random(self._seq + 1) < _FOLLOWS
        for i in np.flatnonzero(follows[1:]) + 1:
            tokens[i] = self._next[tokens[i - 1]]
        return tokens


class Windows:
    """Windows of a long array of token ids; see the module's docstring."""

    def __init__(self, tokens: NDArray[np.integer], vocab: int, seq: int, seed: int, title: str) -> None:
        self._tokens, self._vocab, self._seq, self._seed = tokens, vocab, seq, seed
        self._title = title
        self.windows = (len(tokens) - 1) // seq
        if self.windows < 1:
            raise DataError(f"{title}: {len(tokens)} tokens are too few for seq={seq}; at least {seq + 1} are needed")

    @property
    def title(self) -> str:
        return f"{self._title}, {len(self._tokens)} tokens, seed {self._seed}"

    def samples(self, numbers: range) -> Tensor:
        found = np.empty((len(numbers), self._seq + 1), dtype=np.int64)
        for row, number in enumerate(numbers):
            epoch, place = divmod(number, self.windows)
            start = int(_order(self.windows, self._seed, epoch)[place]) * self._seq
            found[row] = self._tokens[start : start + self._seq + 1]
        if found.size and not 0 <= int(found.min()) <= int(found.max()) < self._vocab:
            raise DataError(
                f"{self._title}: token ids {int(found.min())} to {int(found.max())}, the model's vocabulary has "
                f"0 to {self._vocab - 1}"
            )
        return torch.from_numpy(found)


def make_source(
    kind: str, *, vocab: int, seq: int, seed: int, path: str | None = None, token_type: str = "uint16"
) -> Source:
    """The source called `kind`: "synthetic", "text" (a UTF-8 file, byte by byte) or "tokens" (.npy, or raw ids).

    `token_type` is the type of ids in a raw file. Raises DataError.
    """
    if kind not in SOURCES:
        raise DataError(f"data={kind!r} is unknown; allowed: {', '.join(SOURCES)}")
    if kind == "synthetic":
        if path:
            raise DataError(f"data=synthetic reads no file, but path={path} is given; use data=text or data=tokens")
        return Synthetic(vocab, seq, seed)
    if not path:
        raise DataError(f"data={kind} needs path=<file>")
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{path}: no such file")
    tokens = _text(file, vocab) if kind == "text" else _tokens(file, token_type)
    return Windows(tokens, vocab, seq, seed, f"{kind} {file.name}")


def _text(file: Path, vocab: int) -> NDArray[np.integer]:
    if vocab < BYTES:
        raise DataError(f"{file}: text is read byte by byte and needs a vocabulary of {BYTES}, the model has {vocab}")
    content = file.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: not UTF-8 text, byte {error.start} does not fit; token files need data=tokens"
        ) from None
    return np.frombuffer(content, dtype=np.uint8)


def _tokens(file: Path, token_type: str) -> NDArray[np.integer]:
    if file.suffix == ".npy":
        try:
            loaded: NDArray[np.integer] = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise DataError(f"{file}: cannot be read as an array ({error})") from None
        if loaded.ndim != 1 or not np.issubdtype(loaded.dtype, np.integer):
            raise DataError(f"{file}: a one-dimensional array of integers is needed, not {loaded.dtype} {loaded.shape}")
        return loaded
    if token_type not in TOKEN_TYPES:
        raise DataError(f"token_type={token_type!r} is unknown; allowed: {', '.join(TOKEN_TYPES)}")
    width = np.dtype(token_type).itemsize
    size = file.stat().st_size
    if not size or size % width:
        raise DataError(f"{file}: {size} bytes are no whole number of {token_type} ids ({width} bytes each)")
    return np.memmap(file, dtype=token_type, mode="r")


@lru_cache(maxsize=2)
def _order(windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of all windows in one epoch."""
    return _generator(seed, epoch, 2).permutation(windows)


def _generator(seed: int, number: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, number, purpose))))
