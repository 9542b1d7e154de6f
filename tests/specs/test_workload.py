"""Sizes as people write them, default batches, and valid workloads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagmoe.specs import Workload, context_warning, default_global_batch, load_model, parse_size


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("32k", 32768),
        ("32K", 32768),
        ("32768", 32768),
        (32_768, 32768),
        ("32_768", 32768),
        (32768.0, 32768),
        ("32768.0", 32768),
        (" 4k ", 4096),
        ("1e4", 10000),
        (1e4, 10000),
        ("1E+4", 10000),
        ("1.5k", 1536),
        ("1m", 1_048_576),
        ("3000", 3000),
        (3000, 3000),
        ("6000", 6000),
        ("1", 1),
    ],
)
def test_sizes(written: str | float, size: int) -> None:
    found = parse_size(written)
    assert found == size
    assert type(found) is int


BAD: list[object] = [0, "0", "-4k", -4096, "32kb", "32kk", "", " ", "k", "0x8000", 0.3, "0.3", "0.3k", 1.5, "1e-4"]
BAD += [True, False, None, [4096], "4 k", "1e4k", "٣٢", "1__0", "_1", "4,096", "4096;", "nan", "inf"]
BAD += [float("nan"), float("inf"), "1e99", 10**400, "9" * 30, "32k\n4k"]


@pytest.mark.parametrize("written", BAD, ids=repr)
def test_no_sizes(written: object) -> None:
    with pytest.raises(ValueError, match=r"^seq=.*allowed: a positive integer") as error:
        parse_size(written, "seq")  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@given(st.integers(1, 2**40))
def test_every_spelling_of_a_size_agrees(size: int) -> None:
    spellings: list[str | float] = [size, str(size), f"{size:_}", f"{size}.0", float(size), f"0{size}"]
    if size * 1024 <= 2**40:
        assert parse_size(f"{size}k") == parse_size(f"{size}K") == size * 1024
    assert {parse_size(value) for value in spellings} == {size}


@given(st.text(max_size=12) | st.floats() | st.integers(max_value=2**41))
def test_anything_is_a_size_or_a_one_line_error(written: str | float) -> None:
    try:
        size = parse_size(written)
    except ValueError as error:
        size, message = None, str(error)
    assert "\n" not in message if size is None else 1 <= size <= 2**40


@pytest.mark.parametrize(
    ("seq", "batch"),
    [(4096, 2048), (8192, 1024), (16384, 512), (32768, 256), (6000, 1408), (131072, 128), (1, 8388608)],
)
def test_default_global_batch(seq: int, batch: int) -> None:
    assert default_global_batch(seq) == batch


@given(st.integers(1, 2**21))
def test_default_global_batch_is_the_smallest_multiple_that_suffices(seq: int) -> None:
    batch = default_global_batch(seq)
    assert batch % 128 == 0
    assert batch * seq >= 8_388_608
    assert batch == 128 or (batch - 128) * seq < 8_388_608


def test_a_workload() -> None:
    work = Workload(seq=4096, global_batch=2048, micro_batch=2, skew=1.3, stragglers=((3, 1.5),))
    assert work.tokens == 8_388_608
    assert Workload(seq=4096, global_batch=2048).micro_batch is None


def test_a_straggler_slows_the_worker_that_has_it() -> None:
    """Two copies of workers with 2, 4 and 1 GPUs: GPUs 0 1 | 2 3 4 5 | 6 and 7 8 | 9 10 11 12 | 13."""
    gpus = [2, 4, 1]
    worker_of = [0, 0, 1, 1, 1, 1, 2] * 2
    for gpu in range(16):  # 14 and 15 are idle
        work = Workload(seq=4096, global_batch=8, stragglers=((gpu, 1.5),))
        slow = worker_of[gpu] if gpu < 14 else None
        assert work.slowdowns(gpus, 2) == tuple(1.5 if w == slow else 1.0 for w in range(3))
    several = Workload(seq=4096, global_batch=8, stragglers=((0, 1.2), (8, 1.5), (7, 1.1), (99, 9.0)))
    assert several.slowdowns(gpus, 2) == (1.5, 1.0, 1.0)
    assert several.slowdowns(gpus) == (1.2, 1.0, 1.0)
    assert Workload(seq=4096, global_batch=8).slowdowns(gpus) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seq": 0}, "seq must be positive, got 0"),
        ({"seq": None}, "seq must be an integer, got None"),
        ({"global_batch": -1}, "global_batch must be positive, got -1"),
        ({"global_batch": 2.0}, "global_batch must be an integer, got 2.0"),
        ({"micro_batch": 0}, "micro_batch must be positive, got 0"),
        ({"skew": 0.9}, "skew is max/mean load and at least 1, got 0.9"),
        ({"skew": float("inf")}, "skew must be a finite number"),
        ({"stragglers": ((0, 0.5),)}, "slowdown of GPU 0 must be at least 1, got 0.5"),
        ({"stragglers": ((-1, 2.0),)}, "not negative"),
        ({"stragglers": ((1, 2.0), (1, 3.0))}, "must be distinct"),
    ],
)
def test_refused_workloads(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Workload(**({"seq": 4096, "global_batch": 128} | change))  # type: ignore[arg-type]


def test_a_sequence_beyond_the_configured_context_warns() -> None:
    paper = load_model("deepseek_moe")
    assert context_warning(paper, 4096) is None
    warning = context_warning(paper, 32768)
    assert warning is not None
    assert "32768" in warning
    assert "4096" in warning
