"""Who runs the plans of `backend=measure`: this suite's own executor, or the real system.

Decides which rows there are. With impl=both a system that a peer implements has two rows,
ours first, and a note says how far their losses are apart; with impl=native the others'
rows say that nothing native runs them. No peer here at all is an error that says what to
install; one of several is a row that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baselines.native import measure as native
from baselines.native.peers import peer_of, require_some
from disagmoe.runtime.crew import device_kind
from disagmoe.runtime.measure import RankReport, Trial, measure

Account = Mapping[str, Any]
"""What the record of a run holds of one row: system, variant, view, implementation, losses of every step."""


@dataclass(frozen=True)
class Implementation:
    """Who runs a plan. `run` is called on every rank; `refuse` says why it cannot run a plan (None: it can).

    `takes` says of which systems it has rows beside another implementation's.
    """

    name: str
    run: Callable[..., RankReport]
    refuse: Callable[[Trial], str | None]
    takes: Callable[[str], bool]


EQUIVALENT = Implementation("equivalent", measure, lambda trial: None, lambda system: True)
NATIVE = Implementation(
    "native",
    native.measure,
    lambda trial: native.refusal(trial, device_kind()),
    lambda system: peer_of(system) is not None,
)
CHOICES = {"equivalent": (EQUIVALENT,), "native": (NATIVE,), "both": (EQUIVALENT, NATIVE)}


def implementations(impl: str, systems: Sequence[str]) -> tuple[Implementation, ...]:
    """Those that a run asks for, in the order of their rows. Raises ValueError where no peer is installed."""
    if impl != "equivalent":
        for peer in require_some(systems):
            native.load(peer)
    return CHOICES[impl]


def of_row(chosen: Sequence[Implementation], row: Mapping[str, Any]) -> list[Implementation]:
    """The implementations that have a row for this planned one; where there is no plan one row says so."""
    if row["status"] != "ok":
        return list(chosen[:1])
    return [each for each in chosen if len(chosen) == 1 or each.takes(row["system"])]


def notes(accounts: Sequence[Account]) -> list[str]:
    """Versions of the peers that ran, and how far their losses are from ours."""
    ran = [account for account in accounts if account["implementation"] == NATIVE.name]
    ours = {_key(account): account["losses"] for account in accounts if account["implementation"] == EQUIVALENT.name}
    told = []
    for account in ran:
        peer = peer_of(account["system"])
        assert peer is not None
        text = f"{_label(account)} native is {peer.name} {peer.installed}"
        if (losses := ours.get(_key(account))) is not None:
            pairs = zip(account["losses"], losses, strict=True)
            apart = max(abs(theirs / mine - 1.0) for theirs, mine in pairs)
            text += f": its {len(losses)} losses are ours within {apart:.1e} relative, on the same weights and data"
        told.append(text)
    if ran and device_kind() == "cpu":
        told.append(
            "native on CPU: Megatron-Core runs through answers to what it asks of CUDA, which intercept its torch "
            "calls; it is not made for CPUs and the times say nothing about GPUs"
        )
    return told


def _key(account: Account) -> tuple[Any, ...]:
    return account["view"], account["system"], account["variant"]


def _label(account: Account) -> str:
    return str(account["system"]) + (f" ({account['variant']})" if account["variant"] else "")
