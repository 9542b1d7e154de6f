"""The grid of whole steps: every kind of model, ring, exchange and routing; printed as a table.

`python -m tests.runtime.grid` runs it and prints the largest differences to the single-process model by group of
cases, as docs/training.md shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from disagmoe.ops import Kind
from disagmoe.runtime.launch import Pool
from tests.model.shapes import FAMILIES
from tests.runtime.training_cases import Case, Outcome, one_step

RATIOS = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (3, 2))


def _rings() -> Iterator[Case]:
    """Depths, ratios, layers that p does not divide, numbers of micro-batches."""
    for (m, n), (p, layers), order in product(RATIOS, ((1, 2), (1, 3), (2, 3), (2, 5)), ("megatron", "comm_stage")):
        if p * (m + n) <= 6:
            batches = (1, 2, 3, 5, 8)[(layers + m + n) % 5]
            yield Case(p=p, m=m, n=n, layers=layers, microbatches=batches, sequences=batches + 2, seq=4, order=order)
    yield Case(p=3, layers=4, microbatches=8, sequences=8, seq=3)
    yield Case(p=3, layers=7, microbatches=5, sequences=5, seq=3, order="megatron")
    yield Case(p=3, layers=2, microbatches=3, sequences=3, seq=3)
    for (m, n), (p, layers) in product(((3, 1), (3, 2)), ((2, 3), (3, 4))):
        yield Case(p=p, m=m, n=n, layers=layers, microbatches=3, sequences=7, seq=3)
    yield Case(p=3, m=1, n=2, layers=4, microbatches=3, sequences=4, seq=3, head="next_a")
    yield Case(p=3, m=2, n=1, layers=4, microbatches=3, sequences=7, seq=3)
    yield Case(dp=3, layers=3, microbatches=2, sequences=7, seq=3)
    yield Case(dp=2, p=2, layers=3, microbatches=3, sequences=7, seq=3)


def _heads() -> Iterator[Case]:
    for head, streams, p in product(("last_f", "next_a", "spread"), (1, 2), (1, 2, 3)):
        yield Case(head=head, streams=streams, p=p, layers=p + 1, microbatches=p + 2, sequences=6, seq=3)


def _models() -> Iterator[Case]:
    for family, (m, n) in product(FAMILIES, ((1, 1), (2, 2))):
        yield Case(family=family, m=m, n=n, layers=3, microbatches=3, sequences=5)
    for top_k in (1, 6):
        yield Case(n=2, layers=3, spec=(("top_k", top_k),))


def _exchanges() -> Iterator[Case]:
    for merge, transport, size in product(("none", "rank", "node"), ("pairs", "union"), (None, 1, 2, 3)):
        if merge == "node" or size is None:
            yield Case(
                m=2, n=3, layers=2, merge=merge, transport=transport, node_size=size, sequences=5, family="deepseek_v2"
            )


def _edges() -> Iterator[Case]:
    yield Case(m=3, sequences=2, microbatches=1)
    yield Case(m=3, sequences=4, microbatches=4, seq=3)
    yield Case(n=3, spec=(("experts", 8), ("top_k", 1)), sequences=1, microbatches=1, seq=1)
    yield Case(n=4, spec=(("experts", 6), ("top_k", 3)))  # 2 + 2 + 1 + 1 experts
    yield Case(n=3, spec=(("experts", 3), ("top_k", 2)))
    yield Case(n=2, m=2, spec=(("router_bias", True),), skew=True)
    yield Case(n=3, spec=(("router_bias", True), ("experts", 9), ("top_k", 3)), skew=True)


def _recompute() -> Iterator[Case]:
    for kinds, family in product(((Kind.ATTN,), (Kind.FFN,), (Kind.ATTN, Kind.FFN)), ("gpt_oss", "deepseek_v3")):
        yield Case(m=2, n=2, layers=3, recompute=kinds, family=family)


GROUPS = {
    "rings": tuple(_rings()),
    "heads and compute streams": tuple(_heads()),
    "models": tuple(_models()),
    "merge and transport": tuple(_exchanges()),
    "no tokens, uneven and skewed experts": tuple(_edges()),
    "recompute": tuple(_recompute()),
}


def largest(outcomes: list[Outcome]) -> tuple[float, float]:
    """Largest difference of the loss and of any gradient."""
    return max(o.loss for o in outcomes), max(o.gradient for o in outcomes)


def main() -> None:
    """Run everything and print the table."""
    print("| cases | number | ranks | loss | gradients |\n|---|---|---|---|---|")
    for title, cases in GROUPS.items():
        worst = (0.0, 0.0)
        for ranks in sorted({case.shape.ranks for case in cases}):
            with Pool(ranks) as pool:
                for case in cases:
                    if case.shape.ranks == ranks:
                        found = largest(pool.run(one_step, case))
                        worst = (max(worst[0], found[0]), max(worst[1], found[1]))
        sizes = [case.shape.ranks for case in cases]
        print(f"| {title} | {len(cases)} | {min(sizes)} to {max(sizes)} | {worst[0]:.1e} | {worst[1]:.1e} |")


if __name__ == "__main__":
    main()
