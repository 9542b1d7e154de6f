"""Seconds and bytes of one transfer, per GPU.

Decides which bytes of an exchange cross a NIC and which stay on NVLink, and what
they take: the two parts move at the same time, so time = max(NIC bytes / NIC
rate, NVLink bytes / NVLink rate) + latency. No rate exceeds the line's.

Copies of one token (top-k of them) travel as they are (`none`), once per
destination rank (`rank`), or once per destination node and fan out over NVLink
there (`node`). A combine moves what the dispatch moved, pre-reduced where copies
are merged. Volumes: Megatron-Core MoE (arXiv 2603.07685) for the all-to-all,
DeepEP (https://github.com/deepseek-ai/DeepEP) for merging per node; as DeepEP
does, the fan-out counts every row a rank receives, its own included.
Wire dtype is bf16; expert ids and gate weights (8 bytes a copy) are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from disagmoe.cost.calibration import MERGES, Rates


class GpuGroup(Protocol):
    """A symmetric group of GPUs: anything that says how many, on how many nodes, with what NICs."""

    @property
    def gpus(self) -> int: ...

    @property
    def nodes(self) -> int: ...

    @property
    def nic_gbs(self) -> float: ...


@dataclass(frozen=True)
class Transfer:
    """`seconds` of one transfer and the bytes one sending GPU puts on its NIC and on NVLink.

    `link` is 0 where bytes cross NICs, 1 where all of them stay on NVLink.
    """

    seconds: float
    nic_bytes: float
    nvlink_bytes: float
    link: int


NOTHING = Transfer(seconds=0.0, nic_bytes=0.0, nvlink_bytes=0.0, link=1)


FITTED_PEERS = 63
"""Peers of the exchanges that `nic_alpha_us` was fitted on (EP64). EP16 and EP32 take the same latency; beyond, every
further message is charged its share: an extrapolation."""


@dataclass(frozen=True)
class Copies:
    """What one token causes: `nic` rows for other nodes, `nvlink` rows inside nodes."""

    nic: float
    nvlink: float


class Network:
    """Times transfers of one cluster under one set of calibrated rates."""

    def __init__(self, rates: Rates, nvlink_line_gbs: float, oversubscription: float) -> None:
        self.rates = rates
        self.oversubscription = oversubscription
        self.nvlink = self._below_line(nvlink_line_gbs * rates.nvlink_efficiency, nvlink_line_gbs, "NVLink") * 1e9
        self.ring_nvlink = (
            self._below_line(nvlink_line_gbs * rates.ring_nvlink_efficiency, nvlink_line_gbs, "NVLink ring") * 1e9
        )

    def nic(self, nic_gbs: float, efficiency: float | None = None) -> float:
        """Effective bytes/s of one GPU's share of NICs towards other nodes."""
        if not nic_gbs > 0.0:
            raise ValueError(f"a transfer between nodes needs NIC bandwidth above 0 GB/s, got {nic_gbs!r}")
        share = self.rates.nic_efficiency if efficiency is None else efficiency
        return self._below_line(nic_gbs * share, nic_gbs, "NIC") * 1e9 / self.oversubscription

    @staticmethod
    def _below_line(effective_gbs: float, line_gbs: float, what: str) -> float:
        if effective_gbs > line_gbs:
            raise ValueError(f"{what}: effective {effective_gbs:.1f} GB/s exceeds the line rate {line_gbs:.1f} GB/s")
        return effective_gbs

    def alpha_s(self, nic_bytes: float, peers: int = 1) -> float:
        """Latency of one transfer to `peers` peers; larger where bytes cross NICs."""
        if nic_bytes <= 0.0:
            return self.rates.nvlink_alpha_us * 1e-6
        return self.rates.nic_alpha_us * 1e-6 * max(1.0, peers / FITTED_PEERS)

    def timed(self, nic_bytes: float, nvlink_bytes: float, nic_s: float, peers: int = 1) -> Transfer:
        """A transfer whose NIC part takes `nic_s` and whose NVLink part moves beside it."""
        if nic_bytes <= 0.0 and nvlink_bytes <= 0.0:
            return NOTHING
        seconds = max(nic_s, nvlink_bytes / self.nvlink) + self.alpha_s(nic_bytes, peers)
        return Transfer(seconds, nic_bytes, nvlink_bytes, link=0 if nic_bytes > 0.0 else 1)

    def exchange(self, copies: Copies, token_bytes: float, nic_gbs: float, peers: int = 1) -> Transfer:
        """All-to-all inside a symmetric group; `token_bytes` = bytes of one rank's tokens, `peers` its messages."""
        nic_bytes = copies.nic * token_bytes
        nic_s = nic_bytes / self.nic(nic_gbs) if nic_bytes > 0.0 else 0.0
        return self.timed(nic_bytes, copies.nvlink * token_bytes, nic_s, peers)

    def two_level(self, sent: float, ranks: int, nodes: int, nic_gbs: float, copy_s: float) -> Transfer:
        """All-to-all of `sent` bytes per rank inside every node, then among equal local ranks of all nodes (2DH).

        Both passes carry all that is not for the rank itself, one after the other,
        each after a strided copy (`copy_s`) that groups what travels together. The
        NIC carries what a direct all-to-all sends, in nodes - 1 messages of
        sent / nodes bytes instead of ranks - ranks / nodes of sent / ranks.
        Source: Tutel, arXiv 2206.03382, section 3.3.
        """
        local = ranks / nodes
        inside = self.timed(0.0, sent * (local - 1.0) / local, 0.0)
        nic_bytes = sent * (nodes - 1.0) / nodes
        across = self.timed(nic_bytes, 0.0, nic_bytes / self.nic(nic_gbs) if nodes > 1 else 0.0, nodes - 1)
        copies = copy_s * ((local > 1.0) + (nodes > 1))
        return Transfer(
            inside.seconds + across.seconds + copies, nic_bytes, inside.nvlink_bytes, link=0 if nodes > 1 else 1
        )

    def p2p(self, nbytes: float, nic_gbs: float, inter_node: bool) -> Transfer:
        """One message from one GPU to one other."""
        if inter_node:
            return self.timed(nbytes, 0.0, nbytes / self.nic(nic_gbs))
        return self.timed(0.0, nbytes, 0.0)

    def ring(self, nbytes: float, ranks: int, nodes: int, nic_gbs: float, passes: int) -> Transfer:
        """Ring collective over `ranks` ranks: each moves nbytes x (ranks - 1) / ranks per pass.

        Between nodes one ring per local rank runs through that rank's NIC, so a
        NIC carries 1/local of the bytes and NVLink the rest of the ring.
        """
        if ranks <= 1 or nbytes <= 0.0:
            return NOTHING
        if not 1 <= nodes <= ranks:
            raise ValueError(f"a collective over {ranks} ranks cannot span {nodes} nodes; allowed: 1 to {ranks}")
        moved = passes * nbytes * (ranks - 1) / ranks
        local = ranks / nodes
        nic_bytes = moved / local if nodes > 1 else 0.0
        nvlink_bytes = moved if local > 1.0 else 0.0
        nic_s = nic_bytes / self.nic(nic_gbs, self.rates.ring_nic_efficiency) if nodes > 1 else 0.0
        seconds = max(nic_s, nvlink_bytes / self.ring_nvlink) + passes * self.alpha_s(nic_bytes)
        return Transfer(seconds, nic_bytes, nvlink_bytes, link=0 if nodes > 1 else 1)


def colocated_copies(merge: str, ranks: int, nodes: int, top_k: int, on_ranks: float, on_nodes: float) -> Copies:
    """Rows per token of an exchange among `ranks` ranks on `nodes` nodes.

    `on_ranks` and `on_nodes` are the expected distinct ranks and nodes of a token.
    """
    check_merge(merge)
    remote = (nodes - 1) / nodes
    neighbours = (ranks / nodes - 1.0) / ranks
    if merge == "none":
        return Copies(nic=top_k * remote, nvlink=top_k * neighbours)
    if nodes == 1:
        return Copies(nic=0.0, nvlink=min(on_ranks, top_k * neighbours))
    if merge == "rank":
        return Copies(nic=on_ranks * remote, nvlink=on_ranks * neighbours)
    return Copies(nic=on_nodes * remote, nvlink=on_ranks)


def check_merge(merge: str) -> None:
    if merge not in MERGES:
        raise ValueError(f"unknown merge {merge!r}; known: {', '.join(MERGES)}")
