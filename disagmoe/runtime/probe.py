"""Kernels and links of one rank, timed one by one, while all ranks do the same.

Decides what is timed: matrix multiplies, plain and grouped by expert, in the three
passes F, I and W; the attention kernel forward and backward; ring collectives over
all ranks; and how much compute and an exchange slow each other down. All ranks work
at the same time, as they do in a step: on a CPU they may share cores. A sample is
the median of a few runs, the mean over ranks is taken by whoever asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from disagmoe.model.grouped import multiply, outer
from disagmoe.model.scores import attend
from disagmoe.runtime.child import Context
from disagmoe.runtime.collective import all_gather, finish, reduce_scatter
from disagmoe.runtime.lane import Lane
from disagmoe.runtime.measure import settle, together

GEMMS = {
    "cpu": tuple((r, i, o) for r in (16, 64, 256, 1024) for i, o in ((64, 128), (64, 512), (256, 256), (256, 1024))),
    "cuda": tuple((r, i, o) for r in (256, 1024, 4096, 16384) for i, o in ((2048, 4096), (4096, 4096), (4096, 14336))),
}
"""(rows, inner, outer)."""
GROUPED = {
    "cpu": tuple((r, e, i, o) for r in (8, 32, 128, 512) for e, i, o in ((4, 64, 192), (2, 256, 512), (8, 96, 64))),
    "cuda": tuple((r, e, i, o) for r in (64, 256, 1024, 4096) for e, i, o in ((8, 2048, 1536), (8, 4096, 3072))),
}
"""(rows of one expert, experts, inner, outer)."""
SCORES = {
    "cpu": tuple((s, h, d) for s in (128, 256, 1024) for h, d in ((4, 16), (4, 64))),
    "cuda": tuple((s, h, d) for s in (1024, 4096, 8192) for h, d in ((32, 64), (32, 128))),
}
"""(sequence, heads, head width)."""
RINGS = {"cpu": (1 << 12, 1 << 16, 1 << 20), "cuda": (1 << 16, 1 << 22, 1 << 26)}
"""Values of a whole ring collective."""
REPEATS = 5

Work = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """Seconds of one thing: `what` in pass `phase` ("F", "I", "W" or ""), with its sizes."""

    what: str
    phase: str
    sizes: tuple[int, ...]
    seconds: float


def probe(context: Context, dtype_name: str) -> list[Sample]:
    """Every sample of this rank. Collective over the world."""
    dtype = getattr(torch, dtype_name)
    kind = context.device.type
    found: list[Sample] = []
    for work in (
        _gemms(context, dtype, GEMMS[kind]),
        _grouped(context, dtype, GROUPED[kind]),
        _scores(context, dtype, SCORES[kind]),
        _rings(context, RINGS[kind]),
        _beside(context, dtype),
    ):
        for sample in work:
            found.append(sample)
            context.beat()
    return found


def timed(context: Context, work: Work, repeats: int = REPEATS) -> float:
    """Median seconds of `work`, after one run that does not count; all ranks begin together."""
    work()
    took = []
    for _ in range(repeats):
        begin = together(context)
        work()
        settle(context.device)
        took.append(time.perf_counter() - begin)
    return median(took)


def _gemms(context: Context, dtype: torch.dtype, shapes: Iterable[tuple[int, int, int]]) -> Iterable[Sample]:
    for sizes in shapes:
        rows, inner, width = sizes
        x, w, g = _random(context, dtype, (rows, inner), (width, inner), (rows, width))
        passes: dict[str, Work] = {
            "F": partial(torch.matmul, x, w.t()), "I": partial(torch.matmul, g, w), "W": partial(torch.matmul, g.t(), x)
        }  # fmt: skip
        for phase, work in passes.items():
            yield Sample("gemm", phase, sizes, timed(context, work))


def _grouped(context: Context, dtype: torch.dtype, shapes: Iterable[tuple[int, int, int, int]]) -> Iterable[Sample]:
    for sizes in shapes:
        rows, experts, inner, width = sizes
        counts, n = (rows,) * experts, rows * experts
        x, w, g = _random(context, dtype, (n, inner), (experts, width, inner), (n, width))
        passes: dict[str, Work] = {
            "F": partial(multiply, x, w.transpose(1, 2), counts),
            "I": partial(multiply, g, w, counts),
            "W": partial(outer, g, x, counts),
        }
        for phase, work in passes.items():
            yield Sample("grouped", phase, sizes, timed(context, work))


def _scores(context: Context, dtype: torch.dtype, shapes: Iterable[tuple[int, int, int]]) -> Iterable[Sample]:
    for seq, heads, width in shapes:
        q, k, v = (t.requires_grad_() for t in _random(context, dtype, *((1, heads, seq, width),) * 3))
        forward = partial(attend, q, k, v, scale=width**-0.5)
        out = forward()
        backward = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
        yield Sample("scores", "F", (seq, heads, width), timed(context, forward))
        yield Sample("scores", "I", (seq, heads, width), timed(context, backward))


def _rings(context: Context, sizes: Iterable[int]) -> Iterable[Sample]:
    if context.world_size == 1:
        return
    backend = "nccl" if context.device.type == "cuda" else "gloo"
    group = dist.new_group(backend=backend)
    for size in sizes:
        whole = torch.ones(size // context.world_size * context.world_size, device=context.device)
        part = whole[: whole.shape[0] // context.world_size].clone()
        for work in (partial(reduce_scatter, part, whole, group), partial(all_gather, whole, part, group)):
            yield Sample(
                "ring", "", (whole.numel(), context.world_size), timed(context, partial(_finished, work, group))
            )
    dist.destroy_process_group(group)


def _beside(context: Context, dtype: torch.dtype) -> Iterable[Sample]:
    """Compute and an exchange, each alone and both at once: enough of either to last a while."""
    if context.world_size == 1:
        return
    wide = 2048 if context.device.type == "cuda" else 192
    backend = "nccl" if context.device.type == "cuda" else "gloo"
    group = dist.new_group(backend=backend)
    x, w = _random(context, dtype, (1024, wide), (wide, wide))
    rows = torch.ones(context.world_size * (1 << 15), device=context.device)
    into = torch.empty_like(rows)
    lane = Lane("probe", context.device)

    def compute(turns: int = 20) -> None:
        for _ in range(turns):
            x @ w

    def exchange(turns: int = 8) -> None:
        for _ in range(turns):
            work = dist.all_to_all_single(into, rows, group=group, async_op=True)
            assert work is not None
            finish(work, group)
        settle(context.device)

    alone = torch.tensor([timed(context, compute), timed(context, exchange)])
    dist.all_reduce(alone, dist.ReduceOp.MAX)  # every rank must exchange as often as the others
    turns = 8 * max(1, round(4.0 * float(alone[0] / alone[1])))

    def computed() -> float:
        ticket = lane.post("probe", exchange, turns)
        begin = time.perf_counter()
        compute()
        settle(context.device)
        took = time.perf_counter() - begin
        ticket.wait(60.0)
        return took

    def exchanged() -> float:
        ticket = lane.post("probe", exchange)
        while not ticket.done:
            compute(2)
        ticket.wait(60.0)
        return ticket.finished_s - ticket.started_s

    yield Sample("alone", "compute", (), float(alone[0]))
    yield Sample("alone", "comm", (), float(alone[1]))
    yield Sample("beside", "compute", (), median([_once(context, computed) for _ in range(5)]))
    yield Sample("beside", "comm", (), median([_once(context, exchanged) for _ in range(5)]))
    lane.close()
    dist.destroy_process_group(group)


def _finished(start: Callable[[], dist.Work], group: dist.ProcessGroup) -> None:
    finish(start(), group)


def _once(context: Context, work: Callable[[], float]) -> float:
    together(context)
    return work()


def _random(context: Context, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(context.device, dtype) for shape in shapes]
