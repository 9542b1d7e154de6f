"""Which implementations a measured run has, which rows they get, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baselines.native import peers
from bench.implementations import EQUIVALENT, NATIVE, implementations, notes, of_row

SYSTEMS = ("megatron_1f1b", "tutel", "disagmoe")


def account(implementation: str, losses: list[float], system: str = "megatron_1f1b") -> dict[str, Any]:
    return {"system": system, "variant": "", "view": "native", "implementation": implementation, "losses": losses}


def without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tuple(replace(peer, module="no_such_package") for peer in peers.PEERS)
    monkeypatch.setattr(peers, "PEERS", absent)


def test_ours_needs_nothing() -> None:
    assert implementations("equivalent", SYSTEMS) == (EQUIVALENT,)


@pytest.mark.parametrize("impl", ["native", "both"])
def test_without_any_peer_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, impl: str) -> None:
    without_peers(monkeypatch)
    with pytest.raises(ValueError) as refused:
        implementations(impl, SYSTEMS)
    line = str(refused.value)
    assert line.count("\n") == 0
    assert "pip install -e '.[megatron]'" in line and "git+https://github.com/microsoft/tutel@main" in line
    with pytest.raises(ValueError, match=r"^Tutel is not installed: "):
        implementations(impl, ("tutel", "disagmoe"))


def test_systems_that_nobody_else_implements_are_named() -> None:
    with pytest.raises(
        ValueError, match="none of disagmoe, comet has a native implementation; those that do: megatron"
    ):
        implementations("native", ("disagmoe", "comet"))


def test_rows_of_both() -> None:
    both = (EQUIVALENT, NATIVE)
    assert of_row(both, {"status": "ok", "system": "megatron_1f1b"}) == [EQUIVALENT, NATIVE]
    assert of_row(both, {"status": "ok", "system": "disagmoe"}) == [EQUIVALENT]
    assert of_row(both, {"status": "oom", "system": "megatron_1f1b"}) == [EQUIVALENT]
    assert of_row((NATIVE,), {"status": "ok", "system": "disagmoe"}) == [NATIVE]


def test_losses_are_compared_with_those_of_the_same_row() -> None:
    ours, theirs = account("equivalent", [6.0, 5.0]), account("native", [6.0, 5.00001])
    told = notes([ours, account("equivalent", [1.0, 1.0], "tutel"), theirs])
    assert told[0].startswith("megatron_1f1b native is Megatron-Core ")
    assert "its 2 losses are ours within 2.0e-06 relative" in told[0]
    assert notes([ours]) == []
    assert "losses" not in notes([theirs])[0]
