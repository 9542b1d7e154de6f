"""Tile-level costs of one MoE layer whose exchange is fused with the experts' two GEMMs (Comet).

Decides how long each tile group takes and when its data is there, after the
kernels of Comet (arXiv 2502.19811, https://github.com/bytedance/flux,
src/moe_ag_scatter and src/moe_gather_rs):

- First half, cut along tokens: rows are sorted by source rank, this rank's own
  first, then its node's, then the other nodes'. A group of tiles starts when its
  sources have arrived. Copies run on copy engines (no SMs), inside and between
  nodes at the same time, so the GEMM keeps all SMs.
- The activation is a kernel of its own between the two halves.
- Second half, cut along hidden: the top-k sum of a column block needs all experts,
  so the GEMM makes one block across all experts after the other, and each leaves
  while the next is computed. `comm_sms` thread blocks are set aside to send, for
  the whole kernel: the GEMM slows by S / (S - comm_sms), the sending is no faster
  than they can drive it. As in Comet their number is picked by profile.

The backward mirrors this: the gradient of the combine arrives like a dispatch
before the gradient GEMM of the second layer, that of the dispatch leaves like a
combine after the one of the first; weight gradients follow.

Latency is paid once per exchange, not per tile: by the first arrival and by the
last block to leave. Summing copies at home is a memory-bound kernel like for every
other system and is part of `home_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from disagmoe.cost.network import NOTHING, Network, Transfer

COLUMN_BLOCKS = 8
"""Column blocks of the second half; two hidden sizes differ (`column_blocks`)."""
SM_BYTES_PER_S = 160.46e9 / 24
"""Bytes/s one sending thread block drives: an assumption. DeepEP's kernels fill an H800's NVLink with 24 SMs
(160.46 GB/s, https://github.com/perplexityai/pplx-kernels/issues/10; about 140 GB/s beside 21.5 GB/s of NIC,
https://github.com/deepseek-ai/DeepEP/issues/285). flux registers 28 blocks for the same link."""
PROFILED_SMS = tuple(range(2, 66, 2))
"""Numbers of sending thread blocks tried; the paper reports optima of 18, 26 and 46."""
NEAR_GROUPS, FAR_GROUPS = 3, 4
"""Arrival groups inside and beyond the node where a layer spans nodes; up to one node, every source counts."""


@dataclass(frozen=True)
class TileSplit:
    """How a layer is cut. Source ranks per arrival group: itself, then `near` (own node), then `far`.

    `columns` blocks leave the second half. With `gather` every token goes to
    every rank (all-gather) and comes back once per rank that holds one of its
    experts; otherwise the transport's all-to-all is moved. `comm_sms` fixes the
    sending thread blocks, None profiles them.
    """

    near: tuple[int, ...]
    far: tuple[int, ...]
    columns: int
    gather: bool = False
    comm_sms: int | None = None

    @property
    def groups(self) -> int:
        """Tile groups of the first half."""
        return 1 + len(self.near) + len(self.far)

    @property
    def ranks(self) -> int:
        return 1 + sum(self.near) + sum(self.far)

    def coarse(self) -> TileSplit:
        """The same layer in as few tiles as still overlap: at most three arrival groups and two column blocks.

        It is never faster, and orders whole pipelines alike, at a third of the operations.
        """
        return replace(self, near=near_equal(sum(self.near), 1), far=near_equal(sum(self.far), 1), columns=2)


@dataclass(frozen=True)
class Exchange:
    """One whole exchange of a rank, by link. `fan_out`: what comes over NICs travels on over NVLink."""

    transfer: Transfer
    nic_s: float
    nvlink_s: float
    alpha_s: float
    near_alpha_s: float
    fan_out: bool

    @property
    def moving_s(self) -> float:
        """Seconds without latency; both links work at the same time."""
        return max(self.nic_s, self.nvlink_s)


@dataclass(frozen=True)
class TileCosts:
    """Costs of one layer in one direction, in order of execution.

    `first` [groups] are the arrivals, each the time since the one before; `gemms`
    [groups + columns] the tile groups, then the column blocks (the activation is
    in the first of them); `second` [columns] what leaves.
    """

    first: tuple[Transfer, ...]
    gemms: tuple[float, ...]
    second: tuple[Transfer, ...]
    comm_sms: int

    @cached_property
    def first_half_s(self) -> float:
        """From the start of the exchange to the last tile of the first half."""
        at, arrive = 0.0, []
        for transfer in self.first:
            at += transfer.seconds
            arrive.append(at)
        return first_half_s(arrive, self.gemms[: len(self.first)])

    @cached_property
    def second_half_s(self) -> float:
        """From there to the last block to leave."""
        return second_half_s(self.gemms[len(self.first) :], [transfer.seconds for transfer in self.second])

    @property
    def seconds(self) -> float:
        return self.first_half_s + self.second_half_s

    @property
    def compute_s(self) -> float:
        return sum(self.gemms)


def first_half_s(arrive: Sequence[float], tiles: Sequence[float]) -> float:
    """End of the last tile: groups run in order and group j not before arrive_j.

    It is max over j of (arrive_j + the time of group j and of all groups after it).
    """
    left, total = 0.0, 0.0
    for at, tile in zip(reversed(arrive), reversed(tiles), strict=True):
        left += tile
        total = max(total, at + left)
    return total


def second_half_s(blocks: Sequence[float], sends: Sequence[float]) -> float:
    """End of the last send: block i is computed after block i-1 and sent after it and after send i-1.

    For equal blocks g and sends x of b blocks this is max(b g + x, g + b x).
    """
    ready, sent = 0.0, 0.0
    for block, send in zip(blocks, sends, strict=True):
        ready += block
        sent = max(ready, sent) + send
    return sent


def tile_split(ranks: int, nodes: int, hidden: int, *, gather: bool = False, comm_sms: int | None = None) -> TileSplit:
    """The cut for `ranks` expert-parallel ranks on `nodes` nodes.

    Inside one node every source rank is a group of its own up to seven groups.
    Across nodes they are aggregated (3 near, 4 far), which keeps a plan small;
    each aggregation starts its tiles when its last source is there.
    """
    local = -(-ranks // nodes)
    near = near_equal(local - 1, NEAR_GROUPS + FAR_GROUPS if nodes == 1 else NEAR_GROUPS)
    return TileSplit(near, near_equal(ranks - local, FAR_GROUPS), column_blocks(hidden), gather, comm_sms)


def near_equal(total: int, parts: int) -> tuple[int, ...]:
    """`total` dealt to at most `parts` parts, none of them empty."""
    parts = min(total, parts)
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def column_blocks(hidden: int) -> int:
    """Column blocks of the second half (flux, gemm_grouped_v3_gather_rs.cc, dispatch_split)."""
    return {7168: 7, 1152: 9}.get(hidden, COLUMN_BLOCKS)


def exchange_of(transfer: Transfer, network: Network, nic_gbs: float, *, fan_out: bool) -> Exchange:
    """The parts of a transfer that was priced as a whole."""
    nic_s = transfer.nic_bytes / network.nic(nic_gbs) if transfer.nic_bytes > 0.0 else 0.0
    nvlink_s = transfer.nvlink_bytes / network.nvlink
    near_alpha_s = network.alpha_s(0.0) if transfer.seconds > 0.0 else 0.0
    return Exchange(transfer, nic_s, nvlink_s, transfer.seconds - max(nic_s, nvlink_s), near_alpha_s, fan_out)


def tile_costs(
    split: TileSplit,
    experts: tuple[float, float, float],
    home_s: float,
    arriving: Exchange,
    leaving: Exchange,
    *,
    sms: int,
    stretch: float = 1.0,
) -> TileCosts:
    """Cost of every tile group.

    `experts` = (first GEMM, activation, second GEMM) in seconds on all `sms` SMs
    of the device; `home_s` (shared expert, sum of copies, residual) is spread
    over the tiles in proportion to their time, as chunked systems do. `stretch`
    is how much slower a transfer is beside compute; only the profile of
    `comm_sms` looks at it.
    """
    first, activation, second = experts
    home = home_s / (first + second) if home_s else 0.0
    shares = [sources / split.ranks for sources in (1, *split.near, *split.far)]
    tiles = [share * first * (1.0 + home) for share in shares]

    def half(comm_sms: int) -> tuple[list[float], list[Transfer]]:
        slower = sms / (sms - comm_sms)
        blocks = [(second * slower + second * home) / split.columns] * split.columns
        blocks[0] += activation
        return blocks, _departures(leaving, split.columns, comm_sms)

    def profile(comm_sms: int) -> float:
        blocks, sends = half(comm_sms)
        return second_half_s(blocks, [send.seconds * stretch for send in sends])

    comm_sms = split.comm_sms
    if comm_sms is None:
        comm_sms = min((n for n in PROFILED_SMS if n < sms), key=profile, default=0)
    blocks, sends = half(comm_sms)
    return TileCosts(_arrivals(split, arriving), tuple(tiles + blocks), tuple(sends), comm_sms)


def _arrivals(split: TileSplit, exchange: Exchange) -> tuple[Transfer, ...]:
    """One transfer per group, nothing for the rank's own; they add up to the whole exchange."""
    near, far = sum(split.near), sum(split.far)
    carried = near + far if exchange.fan_out else near  # sources whose rows pass over NVLink
    out, before = [NOTHING], 0.0
    nvlink_done, nic_done = 0, 0
    for index, sources in enumerate((*split.near, *split.far)):
        beyond = index >= len(split.near)
        nic_done += sources if beyond else 0
        nvlink_done += 0 if beyond and not exchange.fan_out else sources
        nvlink_s = exchange.nvlink_s * nvlink_done / carried if carried else 0.0
        if beyond:
            at = exchange.alpha_s + max(exchange.nic_s * nic_done / far, nvlink_s)
        else:
            at = exchange.near_alpha_s + nvlink_s
        nvlink = 0.0 if (beyond and not exchange.fan_out) or not carried else sources / carried
        out.append(
            Transfer(
                seconds=max(0.0, at - before),
                nic_bytes=exchange.transfer.nic_bytes * sources / far if beyond else 0.0,
                nvlink_bytes=exchange.transfer.nvlink_bytes * nvlink,
                link=0 if beyond else 1,
            )
        )
        before = max(before, at)
    return tuple(out)


def _departures(exchange: Exchange, columns: int, comm_sms: int) -> list[Transfer]:
    """Equal column blocks; the last one also pays the latency."""
    whole = exchange.transfer
    driven_s = (whole.nic_bytes + whole.nvlink_bytes) / (comm_sms * SM_BYTES_PER_S) if comm_sms else 0.0
    seconds = max(exchange.moving_s, driven_s) / columns
    block = Transfer(seconds, whole.nic_bytes / columns, whole.nvlink_bytes / columns, whole.link)
    last = Transfer(seconds + exchange.alpha_s, block.nic_bytes, block.nvlink_bytes, block.link)
    return [block] * (columns - 1) + [last]
