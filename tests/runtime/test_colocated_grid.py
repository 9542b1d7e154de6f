"""Every colocated schedule over shapes, skewed routing and experts without tokens; fp64, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from tests.runtime.colocated_cases import Colocated
from tests.runtime.conftest import Pools
from tests.runtime.test_training_step import check, name
from tests.runtime.training_cases import one_step

SYSTEMS = {
    "megatron_1f1b": Colocated(),
    "megatron_1f1b_overlap": Colocated(system="combined"),
    "tutel": Colocated(chunks=2, capacity=0.0),
    "tutel_dropping": Colocated(chunks=4, capacity=1.0),
    "comet": Colocated(system="comet", columns=8),
    "comet_open": Colocated(system="comet", columns=8, gather=True),
    "dualpipe": Colocated(system="dualpipe"),
    "dualpipe_v": Colocated(system="dualpipev"),
}
RANKS = ((1, 1, 1), (1, 2, 2), (1, 3, 3), (1, 4, 2), (2, 1, 1), (2, 2, 2), (2, 2, 1), (4, 1, 1))
"""(stages, ranks of a stage, expert-parallel ranks)."""
SKEWED = {"spec": (("router_bias", True),), "skew": True}  # every token wants the first experts, the last get none
IDLE = {"spec": (("experts", 9), ("top_k", 1)), "sequences": 8, "seq": 2}  # fewer tokens than experts
FAMILY_OF_LAYER_COUNT = {2: "qwen3", 3: "deepseek", 4: "deepseek_v3"}


def _grid() -> Iterator[tuple[str, Colocated]]:
    for (system, base), (p, gpus, ep), layers in product(SYSTEMS.items(), RANKS, (2, 3, 4)):
        bidirectional = system.startswith("dualpipe")
        stages = 2 * p if system == "dualpipe_v" else p
        if layers < stages or (system == "dualpipe" and p % 2):
            continue
        count = 2 * p if bidirectional else p + layers % 2  # also partial rounds
        family = FAMILY_OF_LAYER_COUNT[layers]
        yield system, replace(
            base, p=p, gpus=gpus, ep=ep, layers=layers, microbatches=count, sequences=2 * count * gpus - 1, seq=3,
            family=family,
        )  # fmt: skip
    for (system, base), routing in product(SYSTEMS.items(), (SKEWED, IDLE)):
        p = 2 if system == "dualpipe" else 1
        yield system, replace(base, p=p, gpus=2, ep=2, microbatches=2 * p, layers=2, **{"sequences": 9, **routing})  # type: ignore[arg-type]
    for system in ("megatron_1f1b", "megatron_1f1b_overlap", "tutel", "comet"):
        yield system, replace(SYSTEMS[system], p=2, v=2, gpus=2, ep=2, layers=5, microbatches=4, sequences=11, seq=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "case"), list(_grid()), ids=lambda value: value if isinstance(value, str) else name(value)
)
def test_every_system_on_every_shape(pools: Pools, system: str, case: Colocated) -> None:
    outcomes = pools(case.ranks).run(one_step, case)
    check(outcomes, case)
    assert all(found.dropped == found.expected_dropped for found in outcomes)
