"""Small Programs written by hand in the text form, shared by the tests of the plan."""

from __future__ import annotations

from disagmoe.plan.program import Program, Row
from disagmoe.plan.text import from_text

# One worker, a dense layer and a layer with experts, two micro-batches.
COLOCATED = """
program workers=1 layers=2 microbatches=2 chunks=1
w0 COMPUTE: E-F0 A0F0 M0F0 A1F0 M1F0 H-F0 H-B0 M1B0 A1B0 M0B0 A0B0 E-B0 \
E-F1 A0F1 M0F1 A1F1 M1F1 H-F1 H-B1 M1B1 A1B1 M0B1 A0B1 E-B1 O-F-
w0 COLL: D1F0 C1F0 C1B0 D1B0 D1F1 C1F1 C1B1 D1B1
w0 SYNC: G1B- G0B- G-B- G-F-
"""

# Attention on worker 0, experts and head on worker 1.
DISAGGREGATED = """
program workers=2 layers=2 microbatches=2 chunks=1
w0 COMPUTE: E-F0 A0F0 E-F1 A0F1 A1F0 A1F1 A1B0 A1B1 A0B0 E-B0 A0B1 E-B1 O-F-
w0 SEND: D0F0>1 D0F1>1 D1F0>1 D1F1>1 C0B0>1 C0B1>1
w0 RECV: C0F0<1 C0F1<1 D1B0<1 D1B1<1 D0B0<1 D0B1<1
w0 SYNC: G1B- G0B- G-B- G-F-
w1 COMPUTE: M0F0 M0F1 M1F0 H-F0 M1F1 H-F1 H-B0 M1B0 H-B1 M1B1 M0B0 M0B1 O-F-
w1 COLL: C1F0 C1F1 C1B0 C1B1
w1 SEND: C0F0>0 C0F1>0 D1B0>0 D1B1>0 D0B0>0 D0B1>0
w1 RECV: D0F0<0 D0F1<0 D1F0<0 D1F1<0 C0B0<0 C0B1<0
w1 SYNC: G1B- G0B- G-B- G-F-
"""

# Dispatch, experts and combine in two chunks; the backward runs the last chunk first.
TUTEL = """
program workers=1 layers=1 microbatches=1 chunks=2
w0 COMPUTE: E-F0 A0F0 M0F0 M0F0.1 H-F0 H-B0 M0B0.1 M0B0 A0B0 E-B0 O-F-
w0 COLL: D0F0 D0F0.1 C0F0 C0F0.1 C0B0.1 C0B0 D0B0.1 D0B0
w0 SYNC: G-B-
"""

# Experts in two chunks, backward split into I and W, one W for all chunks; experts recomputed from a re-sent dispatch.
SPLIT = """
program workers=1 layers=1 microbatches=1 chunks=2
w0 COMPUTE: A0F0 M0F0 M0F0.1 M0R0 M0R0.1 M0I0 M0I0.1 A0I0 M0W0.- A0W0 O-F-
w0 COLL: D0F0 D0F0.1 C0F0 C0F0.1 D0R0 D0R0.1 C0B0 C0B0.1 D0B0 D0B0.1
"""

# Stage-level: two stages, the steady part of the second worker as one overlapped pair.
STAGES = """
program workers=2 layers=2 microbatches=2 chunks=1
w0 COMPUTE: S0F0 S0F1 S0B0 S0B1
w1 COMPUTE: S1F0 S1F1&0 S1B0&0 S1B1
"""

ALL = (COLOCATED, DISAGGREGATED, TUTEL, SPLIT, STAGES)


def edited(text: str, *changes: tuple[str, str]) -> Program:
    """The Program of a text after replacing each old by its new; every old must be there."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return from_text(text)


def repacked(program: Program, rows: list[Row]) -> Program:
    """Other rows for the same workers, layers and micro-batches."""
    return Program.from_rows(
        rows,
        n_workers=program.n_workers,
        n_layers=program.n_layers,
        n_microbatches=program.n_microbatches,
        n_chunks=program.n_chunks,
    )
