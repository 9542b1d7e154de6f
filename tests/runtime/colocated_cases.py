"""Colocated cases: the schedule of every baseline on a few ranks, and a model that drops what a full expert drops."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from disagmoe.cost.comet import TileSplit, tile_split
from disagmoe.model import ReferenceModel, Routing
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.combined import combined_program
from disagmoe.plan.comet import comet_program
from disagmoe.plan.dualpipe import dualpipe_program, dualpipev_program
from disagmoe.plan.plan import Batch, Layout, Placement, Plan, Worker
from disagmoe.plan.program import Program
from disagmoe.runtime.step import PRECISIONS
from disagmoe.train.plan import RingShape
from tests.runtime.training_cases import Case


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

    def make_reference(self) -> ReferenceModel:
        if self.capacity is None or self.capacity <= 0.0:
            return super().make_reference()
        return DroppingReference(self)


class DroppingReference(ReferenceModel):
    """Drops the tokens that Tutel's capacity leaves no room for, rank by rank, in plain loops."""

    def __init__(self, case: Colocated) -> None:
        super().__init__(case.model, 0, PRECISIONS[case.precision].parameters, chunk_tokens=7)
        self.case = case
        self.dropped = 0

    def trunk(self, tokens: Tensor) -> tuple[Tensor, dict[int, Routing]]:
        x: Tensor = self.embedding(tokens.flatten())
        routings: dict[int, Routing] = {}
        for layer, (attention, expert) in enumerate(self.layer_parts()):
            output = attention.forward(x, tokens.shape[1])
            if output.routing is None:
                x = expert.forward(output.x)
            else:
                routings[layer] = output.routing
                ids = self._seated(output.routing.ids)
                x = expert.forward(output.x, ids, output.routing.weights)
        return x, routings

    def _seated(self, ids: Tensor) -> Tensor:
        """The ids with -1 for what is dropped."""
        case, model, kept = self.case, self.case.model, ids.clone()
        capacity_factor = case.capacity or 0.0
        at = 0
        for replica in range(case.dp):
            for microbatch in range(case.microbatches):
                shares = case.cut.shares(replica, microbatch, case.gpus)
                for first in range(0, case.gpus, case.ep):
                    most = max(1, *shares[first : first + case.ep])
                    rows = model.top_k * int(capacity_factor * -(-most // model.experts))
                    rows = -(-rows // case.chunks) * case.chunks
                    for share in shares[first : first + case.ep]:
                        used = [0] * model.experts
                        for choice in range(model.top_k):
                            for token in range(at, at + share):
                                expert = int(ids[token, choice])
                                used[expert] += 1
                                if used[expert] > rows:
                                    kept[token, choice] = -1
                                    self.dropped += 1
                        at += share
        assert at == ids.shape[0]
        return kept
