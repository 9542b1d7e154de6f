"""Whether a plan trains the whole model on the whole batch: numbers of one that does not would look too good.

Verification proves a Program complete in itself; only here it is held against what
was asked for. Throughput and MFU count every layer and every sequence, so a plan
that leaves some out is a fault of its planner and never becomes a row.
"""

from __future__ import annotations

from disagmoe.plan.plan import Plan
from disagmoe.specs import ModelSpec, Workload


def check_covered(plan: Plan, model: ModelSpec, workload: Workload) -> None:
    """Raises ValueError naming what was asked for and what the plan has."""
    placement, batch, system = plan.layout.placement, plan.layout.batch, plan.layout.system
    counts = {"Program": plan.program.n_layers, "attention": len(placement.attn), "FFN": len(placement.ffn)}
    for part, layers in counts.items():
        if layers != model.layers:
            raise ValueError(f"{system}: {model.name} has {model.layers} layers, the plan's {part} covers {layers}")
    if plan.program.n_microbatches != batch.microbatches:
        raise ValueError(
            f"{system}: {batch.microbatches} micro-batches are planned, the Program has {plan.program.n_microbatches}"
        )
    trained = batch.microbatches * batch.sequences * batch.data_ranks
    if trained < workload.global_batch:
        raise ValueError(
            f"{system}: {workload.global_batch} sequences are asked for, {batch.microbatches} micro-batches of"
            f" {batch.sequences} on {batch.data_ranks} ranks are {trained}"
        )
