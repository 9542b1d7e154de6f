"""Comet-style overlap (`comet`): the exchange fused with the experts' two GEMMs, tile by tile.

A re-implemented schedule, not ByteDance's kernels: token-sorted tiles that start as
their source ranks arrive, column blocks that leave while the next is computed, a
part of the SMs set aside to send (`cost/comet.py`, arXiv 2502.19811). It is shown in
two variants, each a row of its own:

- all-to-all: the tile-level schedule on top of the transport's all-to-all, any
  number of nodes, backward included. No such kernel is public.
- open: what https://github.com/bytedance/flux (19831ca) moves: an all-gather of every
  token and a reduce-scatter, through NVLink peer memory, hence one node; with its
  registered top-k and column splits. Its kernels run forward only; the backward is
  modelled as their mirror.

Hosted in the same interleaved 1F1B as the reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from baselines.colocated import colocated_candidates, colocated_layout, expert_parallel_nodes, stages_of
from disagmoe.cost.comet import TileSplit, column_blocks, tile_split
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Phase
from disagmoe.plan.comet import comet_program
from disagmoe.plan.plan import Layout
from disagmoe.plan.pricing import LayoutCosts
from disagmoe.plan.program import Program
from disagmoe.specs import device
from disagmoe.system import RECOMPUTE_LEVELS, Candidate, NotApplicable, Problem, System

VARIANTS = ("all-to-all", "open")
OPEN_TOP_K = (4, 5, 6, 8, 10)
"""top-k with registered kernels on Hopper in bf16 (flux, src/generator/gen_moe_gather_rs.cc)."""
OPEN_COLUMN_WIDTHS = (128, 256, 384, 512, 640, 768, 1024, 1280)
"""Widths of a column block with registered kernels (the same file)."""
OPEN_MOST_EXPERTS = 511
"""With 512 experts the open kernels compute wrong values (https://github.com/bytedance/flux/issues/186)."""
LABELS = {
    "all-to-all": "Comet-style: re-implemented schedule, all-to-all dispatch, tile-level",
    "open": "Comet-style: re-implemented schedule, all-gather dispatch and reduce-scatter as in open flux, tile-level",
}


@dataclass(frozen=True)
class Comet:
    """Options of the planner; None lets the tuner choose.

    `variant` is "all-to-all" or "open"; None shows both. `comm_sms` fixes the
    thread blocks that send in the second half (None: picked by profile).
    """

    variant: str | None = None
    comm_sms: int | None = None
    pp: int | None = None
    virtual: int | None = None
    group: int | None = None

    name: str = "comet"
    native_transport: str = "nccl"
    recompute_levels: ClassVar[tuple[Candidate, ...]] = RECOMPUTE_LEVELS

    def __post_init__(self) -> None:
        if self.variant is not None and self.variant not in VARIANTS:
            raise ValueError(f"comet variant={self.variant}: allowed are {', '.join(VARIANTS)}")
        if self.comm_sms is not None and self.comm_sms < 1:
            raise ValueError(f"comet comm_sms={self.comm_sms}: at least 1 thread block must send")

    def variants(self) -> tuple[tuple[str, System], ...]:
        """One row per dispatch type."""
        return tuple((v, replace(self, variant=v)) for v in VARIANTS if self.variant in (None, v))

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """Every pipeline, in coarse tiles: enough to tell which pipelines are good."""
        sms = device(problem.cluster.device).sms
        if self.comm_sms is not None and self.comm_sms >= sms:
            raise NotApplicable(f"{self.comm_sms} sending thread blocks leave none of the {sms} SMs for the GEMM")
        pipelines = colocated_candidates(problem, pp=self.pp, virtual=self.virtual, group=self.group)
        found = [{**candidate, "tiles": "coarse"} for candidate in pipelines]
        if self.variant == "open":
            _check_open(problem)
            least = min(int(c["ep"]) for c in found)
            found = [c for c in found if expert_parallel_nodes(problem, c) == 1]
            if not found:
                raise NotApplicable(
                    f"the open Comet kernels write through NVLink peer memory, one node only: EP {least} "
                    f"does not fit into a node of {problem.cluster.gpus_per_node} GPUs"
                )
        return found

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        """A good pipeline with all its tiles."""
        yield {**candidate, "tiles": "all"}

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        split = self._split(problem, candidate)
        layout = colocated_layout(problem, candidate, system=self.name, variant=self._variant, tiles=split)
        prices = LayoutCosts(layout, problem.costs)
        tokens, hidden = layout.batch.sequences * problem.workload.seq, problem.model.hidden
        # The symmetric buffer all layers share: every row a rank may receive at once, in bf16.
        rows = tokens * (layout.ep if split.gather else problem.model.top_k)
        return replace(
            layout,
            options={**layout.options, "static_buffer_bytes": 2 * rows * hidden},
            details={
                **layout.details,
                "schedule": LABELS[self._variant],
                "compute_contention": "in the GEMMs (comm_sms), not the transport's factor",
                "comm_sms_forward": prices.tiles(Phase.F).comm_sms,
                "comm_sms_backward": prices.tiles(Phase.I).comm_sms,
                "arrival_groups": split.groups,
                "column_blocks": split.columns,
            },
        )

    def program(self, problem: Problem, layout: Layout) -> Program:
        model, split = problem.model, layout.tiles
        if split is None:
            raise ValueError(f"a layout of {layout.system} is no layout of {self.name}: it has no tiles")
        return comet_program(
            p=int(layout.options["pp"]),
            v=int(layout.options["virtual"]),
            m=layout.batch.microbatches,
            group=int(layout.options["group"]),
            stage_layers=stages_of(layout),
            moe=[model.is_moe(layer) for layer in range(model.layers)],
            groups=split.groups,
            columns=split.columns,
            recompute=Recompute.of(layout.options).repeated(disaggregated=False),
        )

    @property
    def _variant(self) -> str:
        return self.variant or VARIANTS[0]

    def _split(self, problem: Problem, candidate: Candidate) -> TileSplit:
        split = tile_split(
            int(candidate["ep"]),
            expert_parallel_nodes(problem, candidate),
            problem.model.hidden,
            gather=self._variant == "open",
            comm_sms=self.comm_sms,
        )
        return split.coarse() if candidate.get("tiles") == "coarse" else split


def _check_open(problem: Problem) -> None:
    """Raise NotApplicable for what the open kernels are not built for."""
    model = problem.model
    if model.top_k not in OPEN_TOP_K:
        known = ", ".join(map(str, OPEN_TOP_K))
        raise NotApplicable(f"the open Comet kernels are registered for top-k {known}, not {model.top_k}")
    blocks = column_blocks(model.hidden)
    if model.hidden % blocks or model.hidden // blocks not in OPEN_COLUMN_WIDTHS:
        known = ", ".join(map(str, OPEN_COLUMN_WIDTHS))
        raise NotApplicable(
            f"the open Comet kernels are registered for column blocks of {known}, "
            f"not {model.hidden} / {blocks} = {model.hidden / blocks:g}"
        )
    if model.experts > OPEN_MOST_EXPERTS:
        raise NotApplicable(
            f"the open Comet kernels give wrong values from 512 experts on "
            f"(github.com/bytedance/flux/issues/186), this model has {model.experts}"
        )
