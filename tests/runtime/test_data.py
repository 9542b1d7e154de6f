"""Data: samples are a function of their number; files are read as they are; mistakes are named."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from disagmoe.runtime.data import DataError, Source, Synthetic, make_source


def text(path: Path, content: str = "", *, seq: int = 4, seed: int = 0) -> Source:
    if content:
        path.write_text(content, encoding="utf-8")
    return make_source("text", vocab=256, seq=seq, seed=seed, path=str(path))


def test_a_sample_depends_on_its_number_only(tmp_path: Path) -> None:
    for source in (Synthetic(50, 6, 3), text(tmp_path / "t", "the quick brown fox jumps", seed=3)):
        whole = source.samples(range(5, 12))
        assert torch.equal(torch.cat([source.samples(range(i, i + 1)) for i in range(5, 12)]), whole)
        assert whole.dtype == torch.int64 and whole.shape[0] == 7


def test_synthetic_tokens_mostly_follow_from_the_one_before() -> None:
    source = Synthetic(20, 400, 1)
    tokens = source.samples(range(2))
    pairs = [set() for _ in range(20)]
    for row in tokens.tolist():
        for a, b in pairwise(row):
            pairs[a].add(b)
    common = [max(pairs[a], key=lambda b, a=a: sum(tokens[:, 1:][tokens[:, :-1] == a] == b)) for a in range(20)]
    follows = torch.tensor(common)[tokens[:, :-1]] == tokens[:, 1:]
    assert 0.85 < follows.double().mean() < 0.97
    assert sorted(common) == list(range(20))  # a permutation
    assert not torch.equal(tokens, Synthetic(20, 400, 2).samples(range(2)))


def test_every_epoch_uses_every_window_once_in_its_own_order(tmp_path: Path) -> None:
    source = text(tmp_path / "t", "".join(chr(97 + i) for i in range(21)))  # a..u: 5 windows of 4 + 1
    first, second = source.samples(range(5)), source.samples(range(5, 10))
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == [97 + 4 * i for i in range(5)]
    assert first[:, 0].tolist() != second[:, 0].tolist()
    assert torch.equal(first[:, 1:], first[:, :-1] + 1)


def test_text_is_bytes_of_utf8(tmp_path: Path) -> None:
    source = text(tmp_path / "t", "aé€b")  # 1 + 2 + 3 + 1 bytes
    assert source.samples(range(1)).tolist() == [list("aé€".encode())[:5]]


def test_token_files_are_mapped(tmp_path: Path) -> None:
    ids = np.arange(9, dtype=np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    ids.tofile(tmp_path / "ids.bin")
    for name in ("ids.npy", "ids.bin"):
        source = make_source("tokens", vocab=9, seq=8, seed=0, path=str(tmp_path / name))
        assert source.samples(range(3)).tolist() == [list(range(9))] * 3


def test_mistakes_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "odd").write_bytes(b"abc")
    np.save(tmp_path / "float.npy", np.zeros(9))
    np.save(tmp_path / "ids.npy", np.arange(90))
    (tmp_path / "short").write_text("ab")
    cases = (
        ("text", "latin", {}, "not UTF-8 text, byte 3 does not fit"),
        ("text", "short", {}, "2 tokens are too few for seq=4; at least 5 are needed"),
        ("text", "short", {"vocab": 100}, "needs a vocabulary of 256, the model has 100"),
        ("tokens", "odd", {}, "3 bytes are no whole number of uint16 ids"),
        ("tokens", "odd", {"token_type": "text"}, "token_type='text' is unknown"),
        ("tokens", "float.npy", {}, "a one-dimensional array of integers is needed, not float64"),
        ("synthetic", "odd", {}, "data=synthetic reads no file"),
    )
    for kind, name, options, message in cases:
        with pytest.raises(DataError, match=message):
            make_source(kind, **{"vocab": 256, "seq": 4, "seed": 0, "path": str(tmp_path / name), **options})  # type: ignore[arg-type]
    source = make_source("tokens", vocab=50, seq=4, seed=0, path=str(tmp_path / "ids.npy"))
    with pytest.raises(DataError, match=r"the model's vocabulary has 0 to 49"):
        source.samples(range(22))
