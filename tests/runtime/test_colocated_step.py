"""The same executor runs colocated Programs: interleaved 1F1B, Tutel's chunks, combined 1F1B, DualPipe, DualPipeV."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from disagmoe.cost.comet import TileSplit, tile_split
from disagmoe.ops import Kind
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.combined import combined_program
from disagmoe.plan.comet import comet_program
from disagmoe.plan.dualpipe import dualpipe_program, dualpipev_program
from disagmoe.plan.plan import Batch, Layout, Placement, Plan, Worker
from disagmoe.plan.program import Program
from disagmoe.train.plan import RingShape
from tests.runtime.conftest import Pools
from tests.runtime.test_training_step import check, name
from tests.runtime.training_cases import Case, one_step


@dataclass(frozen=True)
class Colocated(Case):
    """`p` stages of `gpus` ranks, `ep` of which share the experts; `v` virtual stages per rank."""

    system: str = "1f1b"
    v: int = 1
    gpus: int = 1
    ep: int = 1
    chunks: int = 1
    exposed: bool = False
    nodes: int = 1
    columns: int = 3
    gather: bool = False
    capacity: float | None = None

    @property
    def shape(self) -> RingShape:
        raise AssertionError("a colocated plan is no ring")

    @property
    def ranks(self) -> int:
        return self.p * self.gpus * self.dp

    @property
    def stages(self) -> list[list[int]]:
        """Layers of every virtual stage, near-equal."""
        count = 2 * self.p if self.system == "dualpipev" else self.p * self.v
        return [[i for i in range(self.layers) if i * count // self.layers == s] for s in range(count)]

    @property
    def program(self) -> Program:
        moe = [self.model.is_moe(layer) for layer in range(self.layers)]
        if self.system in ("dualpipe", "dualpipev"):
            make = dualpipe_program if self.system == "dualpipe" else dualpipev_program
            return make(
                ranks=self.p,
                microbatches=self.microbatches,
                stage_layers=self.stages,
                moe=moe,
                p2p_exposed=self.exposed,
            )
        shape = {"p": self.p, "v": self.v, "m": self.microbatches, "group": None}
        if self.system == "comet":
            return comet_program(
                **shape,  # type: ignore[arg-type]
                stage_layers=self.stages,
                moe=moe,
                groups=self.tiles.groups,
                columns=self.tiles.columns,
                recompute=self.recompute,
            )
        if self.system == "combined":
            return combined_program(**shape, stage_layers=self.stages, moe=moe)  # type: ignore[arg-type]
        return colocated_program(
            **shape, stage_layers=self.stages, moe=moe, chunks=self.chunks, recompute=self.recompute
        )  # type: ignore[arg-type]

    @property
    def tiles(self) -> TileSplit:
        split = tile_split(self.ep, self.nodes, self.model.hidden, gather=self.gather)
        return replace(split, columns=self.columns)

    @property
    def plan(self) -> Plan:
        down = self.system == "dualpipev"
        rank_of = [2 * self.p - 1 - s if down and s >= self.p else s % self.p for s in range(len(self.stages))]
        homes = tuple(rank_of[s] for s, layers in enumerate(self.stages) for _ in layers)
        placement = Placement(
            workers=tuple(Worker(f"S{i}", "AF", self.gpus, self.nodes, 1.0) for i in range(self.p)),
            attn=homes,
            ffn=homes,
            embed=homes[0],
            head=homes[-1],
            replicas=self.dp,
            mirror=self.system == "dualpipe",
        )
        batch = Batch(self.microbatches, 1, self.gpus * self.dp)
        tiles = self.tiles if self.system == "comet" else None
        layout = Layout(self.system, "", placement, batch, self.ep, "nccl", self.merge, tiles=tiles)
        if self.capacity is not None:
            layout = replace(layout, capacity_padded=True, options={"capacity_factor": self.capacity})
        return Plan(layout, self.program)


CASES = [
    Colocated(),
    Colocated(gpus=2, ep=1, sequences=5),
    Colocated(gpus=2, ep=2, chunks=2, sequences=5, family="deepseek"),
    Colocated(gpus=2, ep=2, chunks=3, layers=3, merge="none"),
    Colocated(p=2, v=2, layers=4, microbatches=4, family="deepseek", chunks=2),
    Colocated(p=2, gpus=2, ep=2, layers=3, family="tied_all_experts", sequences=6),
    Colocated(system="combined", p=2, v=2, layers=5, microbatches=4),
    Colocated(system="combined", gpus=2, ep=2, microbatches=3, family="deepseek"),
    Colocated(system="dualpipev", p=2, layers=4, microbatches=4, family="gpt_oss"),
    Colocated(system="dualpipe", p=2, layers=3, microbatches=8, sequences=8, family="deepseek_v3"),
    Colocated(system="dualpipe", p=2, gpus=2, ep=2, microbatches=4, exposed=True),
]
COMET_CASES = [
    Colocated(system="comet"),
    Colocated(system="comet", gpus=2, ep=2),
    Colocated(system="comet", gpus=3, ep=3, family="gpt_oss", layers=3, sequences=7, merge="none"),
    Colocated(system="comet", gpus=2, ep=2, family="deepseek", layers=3, columns=5),
    Colocated(system="comet", gpus=4, ep=4, nodes=2, family="deepseek_v2", merge="node", sequences=9),
    Colocated(system="comet", gpus=4, ep=4, nodes=2, merge="none", sequences=9),
    Colocated(system="comet", gpus=2, ep=2, gather=True, family="gpt_oss"),
    Colocated(system="comet", p=2, v=2, gpus=2, ep=2, layers=4, microbatches=4, transport="union", columns=13),
    Colocated(system="comet", gpus=2, ep=2, recompute=(Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE)),
    Colocated(system="comet", gpus=2, ep=2, recompute=(Kind.FFN,), family="deepseek_v3"),
]
DROPLESS_CASES = [
    Colocated(capacity=0.0),
    Colocated(capacity=0.0, gpus=2, ep=2, chunks=2, sequences=5, family="deepseek"),
    Colocated(capacity=0.0, gpus=3, ep=3, chunks=4, sequences=2, family="gpt_oss", microbatches=1),
    Colocated(capacity=-100.0, gpus=2, ep=1, chunks=2, family="deepseek_v2"),
    Colocated(capacity=100.0, gpus=2, ep=2, chunks=2, family="tied_all_experts", merge="none"),
    Colocated(capacity=0.0, p=2, v=2, gpus=2, ep=2, layers=4, microbatches=4, transport="union", chunks=2),
    Colocated(capacity=0.0, gpus=2, ep=2, recompute=(Kind.ATTN, Kind.DISPATCH, Kind.FFN, Kind.COMBINE), chunks=2),
    Colocated(capacity=0.0, gpus=2, ep=2, recompute=(Kind.FFN,), family="deepseek_v3"),
]
MICRO_BATCHES = [
    *(Case(microbatches=m, sequences=8) for m in (1, 2, 4, 8)),
    *(Colocated(p=2, microbatches=m, sequences=8) for m in (1, 2, 4, 8)),
    *(Colocated(p=2, v=2, layers=4, microbatches=m, sequences=8) for m in (2, 8)),
    *(Colocated(system="dualpipe", p=2, microbatches=m, sequences=8) for m in (4, 8)),
]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_colocated_schedule(pools: Pools, case: Colocated) -> None:
    check(pools(case.ranks).run(one_step, case), case)


@pytest.mark.parametrize("case", COMET_CASES, ids=name)
def test_tile_by_tile(pools: Pools, case: Colocated) -> None:
    check(pools(case.ranks).run(one_step, case), case)


@pytest.mark.parametrize("case", DROPLESS_CASES, ids=name)
def test_padded_to_a_capacity_that_drops_nothing(pools: Pools, case: Colocated) -> None:
    check(pools(case.ranks).run(one_step, case), case)


@pytest.mark.parametrize("case", MICRO_BATCHES, ids=lambda case: f"{type(case).__name__}-{name(case)}")
def test_gradients_are_means_over_the_batch_however_it_is_cut(pools: Pools, case: Case) -> None:
    ranks = case.ranks if isinstance(case, Colocated) else case.shape.ranks
    check(pools(ranks).run(one_step, case), case)
