"""Moves the gathering of updated parameters from the end of a step to the beginning of the next.

Every rank updates its shard of the parameters, and the others need the result before
their next forward of that layer, not before the step ends. Gathered layer by layer in
the order of the forwards, all but the first layers' transfers hide behind compute
(Megatron-LM's `--overlap-param-gather` does this; https://github.com/NVIDIA/Megatron-LM).
A step of the Program then begins with the gathering that the step before left over, so
a step in the middle of training is timed, as before.

The embedding and the head come first and the layers in rising order on every worker:
parameters that several workers share are gathered in one order everywhere.
"""

from __future__ import annotations

import numpy as np

from disagmoe.ops import COMPUTE_KINDS, Kind, Phase, Stream
from disagmoe.plan.program import COLUMNS, Program, among

_USES = tuple(int(kind) for kind in sorted(COMPUTE_KINDS - {Kind.OPTIM}))


def gather_early(program: Program) -> Program:
    """The Program with a GRAD_SYNC in phase F per layer at the start of every worker's SYNC stream.

    What gathers nothing at its end is returned as it is.
    """
    at_end = (program.kind == int(Kind.GRAD_SYNC)) & (program.phase == int(Phase.F))
    if program.early_gather or not at_end.any():
        return program
    table = program.table()
    sample = program.sorts.sample
    used = among(sample.kind, _USES) & (sample.phase == int(Phase.F))
    places = np.unique(np.stack([sample.worker[used], sample.layer[used]], axis=1), axis=0)
    places = places[np.isin(places[:, 0], program.worker[at_end])]
    same = {"stream": Stream.SYNC, "kind": Kind.GRAD_SYNC, "phase": Phase.F, "chunk": 0, "replica": 0}
    rows = np.array([[int(same.get(name, -1)) for name in COLUMNS]] * places.shape[0], dtype=np.int32)
    rows[:, [COLUMNS.index("worker"), COLUMNS.index("layer")]] = places
    return Program.from_table(
        np.concatenate([rows, table[~at_end]]),
        n_workers=program.n_workers,
        n_layers=program.n_layers,
        n_microbatches=program.n_microbatches,
        n_chunks=program.n_chunks,
        in_flight=program.in_flight,
        early_gather=True,
    )
