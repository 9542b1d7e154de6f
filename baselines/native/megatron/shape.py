"""How a Megatron-Core run is cut over ranks, and what of that it cannot run.

Decides before Megatron-Core is imported: everything that it would refuse, or silently run
as something else, is refused here with one line.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baselines.native.coverage import require_covered
from baselines.native.peers import MEGATRON
from disagmoe.runtime.cut import Cut
from disagmoe.specs import ModelSpec

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types of the parameters; bf16 has fp32 gradients, and fp32 copies in the optimizer."""


@dataclass(frozen=True)
class Shape:
    """`pp` pipeline ranks, `ep` ranks that share the experts, `dp` ranks per stage that take different sequences.

    `stage_layers[s]` are the layers of virtual stage s = chunk * pp + rank, `group` the
    micro-batch group of the interleaved order (None: pp). `overlap` is combined 1F1B
    (`overlap_moe_expert_parallel_comm`).
    """

    pp: int
    ep: int
    dp: int
    stage_layers: tuple[tuple[int, ...], ...]
    group: int | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        if min(self.pp, self.ep, self.dp) < 1:
            raise ValueError(f"pp={self.pp}, ep={self.ep}, dp={self.dp}: each must be at least 1")
        if self.dp % self.ep:
            raise ValueError(f"ep={self.ep} does not divide the {self.dp} ranks of a stage")
        if not self.stage_layers or len(self.stage_layers) % self.pp:
            raise ValueError(f"{len(self.stage_layers)} virtual stages are no multiple of pp={self.pp}")
        if self.pp == 1 and self.virtual > 1:
            raise ValueError(f"{self.virtual} virtual stages need a pipeline: pp is 1, at least 2 is needed")
        if self.overlap and self.ep == 1:
            raise ValueError("EP overlap needs expert parallelism: ep is 1, at least 2 is needed")
        if self.overlap and self.pp > 1 and self.virtual == 1:
            raise ValueError(f"EP overlap with pp={self.pp} needs virtual stages: at least 2 per rank")

    @property
    def virtual(self) -> int:
        """Model chunks per rank."""
        return len(self.stage_layers) // self.pp

    @property
    def ranks(self) -> int:
        return self.pp * self.dp

    @property
    def interleaved(self) -> bool:
        """Whether Megatron runs its interleaved schedule."""
        return self.virtual > 1


def check_runnable(spec: ModelSpec, shape: Shape, cut: Cut, precision: str = "fp32") -> None:
    """Raise ValueError where Megatron-Core cannot run this."""
    require_covered(MEGATRON, spec)
    if precision not in TYPES:
        raise ValueError(f"precision {precision!r}: the Megatron-Core adapter runs {' and '.join(TYPES)}")
    if spec.experts % shape.ep:
        raise ValueError(f"Megatron-Core needs ep to divide the experts: ep={shape.ep}, {spec.experts} experts")
    pieces = shape.dp * cut.microbatches
    if cut.replicas != 1 or cut.sequences % pieces:
        raise ValueError(
            f"Megatron-Core needs equal micro-batches: {cut.sequences} sequences over {cut.microbatches} micro-batches "
            f"on {shape.dp} ranks; allowed: multiples of {pieces}"
        )
    group, m = shape.group or shape.pp, cut.microbatches
    if shape.interleaved and (not shape.pp <= group <= m or 0 < m % group < shape.pp):
        raise ValueError(
            f"Megatron-Core's interleaved schedule cannot run {m} micro-batches in groups of {group}: a group has "
            f"between pp={shape.pp} and {m}, the last one at least {shape.pp}"
        )
