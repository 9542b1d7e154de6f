"""The common ground of all colocated baselines: how a problem is cut into pp x data ranks.

It is `disagmoe/systems/pipelines.py`, which our own colocated plans stand on too.
"""

from __future__ import annotations

from disagmoe.systems.pipelines import (
    AUTO_EP,
    MICRO_BATCHES,
    REPLAYS,
    VIRTUAL_STAGES,
    colocated_candidates,
    colocated_layout,
    expert_parallel_nodes,
    expert_parallel_sizes,
    loads_s,
    micro_batches,
    pipeline_program,
    pipeline_workers,
    replay_levels,
    stages_of,
)

__all__ = [
    "AUTO_EP",
    "MICRO_BATCHES",
    "REPLAYS",
    "VIRTUAL_STAGES",
    "colocated_candidates",
    "colocated_layout",
    "expert_parallel_nodes",
    "expert_parallel_sizes",
    "loads_s",
    "micro_batches",
    "pipeline_program",
    "pipeline_workers",
    "replay_levels",
    "stages_of",
]
