"""`python -m bench.plus_pictures [out=docs/pictures]`: one picture per switch of `disagmoe_plus`, before and after.

Decides the example: the first layers of GPT-OSS-120B on 32 simulated H800, one ring of
two groups of either kind, few micro-batches, so that single operations can be seen.
The pictures show what a switch does to an order; what it is worth on a whole model
is `experiment=plus_ablation`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from bench.report.style import axes_at, canvas, drawing, footer, headline, legend_below_headline, save
from bench.simulated import Simulated
from disagmoe.cost.calibration import load_calibration
from disagmoe.cost.model import CostModel
from disagmoe.ops import COMPUTE_STREAMS, Kind, Phase
from disagmoe.plan.plan import Plan
from disagmoe.plan.program import IntArray
from disagmoe.plan.verify import verify
from disagmoe.specs import Workload, load_cluster, load_model
from disagmoe.specs.cluster import NodeGroup
from disagmoe.system import Candidate, Problem
from disagmoe.systems import DisagMoEPlus
from disagmoe.systems.disagmoe_plus import SWITCHES
from disagmoe.systems.plus_ring import PAPER
from disagmoe.timeline.timeline import Timeline

LAYERS, SEQ, BATCH = 12, 16384, 64
RING: Candidate = {
    **PAPER, "p": 2, "dp": 1, "m": 8, "n": 8, "nics": "halves", "stage_nodes": 0, "micro_batch": 1,
    "order": "comm_stage", "group": 6, "compute_streams": 1,
}  # fmt: skip
SPREAD: Candidate = {**RING, "head": "spread"}
PIPELINE: Candidate = {
    "form": "pipeline", "schedule": "combined", "ep": 8, "pp": 1, "virtual": 1, "micro_batch": 1, "group": 1,
    "chunks": 1,
}  # fmt: skip
EXAMPLES: Mapping[str, tuple[Candidate, Candidate]] = {
    "spread_head": (RING, {**RING, "head": "spread"}),
    "split_backward": (RING, {**RING, "put_off": 1}),
    "look_ahead": ({**RING, "put_off": 0}, {**RING, "put_off": 0, "rows": 4, "spare": 0, "pending": 2}),
    "free_groups": (SPREAD, {**SPREAD, "p": 1, "m": 16, "n": 16, "group": 4, "micro_batch": 1}),
    "balanced_map": (SPREAD, {**SPREAD, "map": "balanced"}),
    "shared_nodes": (SPREAD, {**SPREAD, "nics": "shared_nodes", "stage_nodes": 2, "m": 8, "n": 8}),
    "other_depths": (SPREAD, {**SPREAD, "p_f": 1}),
    "early_gather": (SPREAD, {**SPREAD, "gather": "early"}),
    "hybrid": (SPREAD, PIPELINE),
}
"""Before and after of every switch."""
COLOURS: Mapping[str, tuple[str, str]] = {
    "F": ("#4C78A8", "forward"),
    "I": ("#54A296", "backward (of the input, where split)"),
    "W": ("#88B04B", "weight gradient"),
    "H": ("#B07AA1", "output head"),
    "X": ("#F2A65A", "exchange of tokens"),
    "G": ("#9D9D9D", "gradients and parameters"),
}
LANE = 0.17


def main(arguments: Sequence[str]) -> int:
    """Write all pictures; the exit status is 2 where an argument is not understood."""
    out = Path("docs/pictures")
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key != "out" or not value:
            print(f"error: {argument}: allowed is out=<directory>", file=sys.stderr)
            return 2
        out = Path(value)
    out.mkdir(parents=True, exist_ok=True)
    there = example()
    for switch in SWITCHES:
        before, after = (timeline_of(there, candidate) for candidate in EXAMPLES[switch])
        with drawing():
            save(picture(switch, before, after), out / f"plus_{switch}.png")
        print(f"{out / f'plus_{switch}.png'}: {1e3 * before[1].step_s:.1f} ms, then {1e3 * after[1].step_s:.1f} ms")
    return 0


def example() -> Problem:
    """The problem that all pictures show."""
    model, cluster = load_model("gpt_oss").with_layers(LAYERS), load_cluster("h800_128")
    nodes = NodeGroup(4, 8, 8, cluster.groups[0].nic_gbit)
    small = cluster.__class__(
        "h800_32", cluster.device, (nodes,), cluster.nvlink_gbs, cluster.memory_gib, cluster.calibration
    )
    workload = Workload(seq=SEQ, global_batch=BATCH)
    costs = CostModel(model, small, load_calibration("h800"), workload)
    return Problem(model, small, workload, costs, "deepep", "node", 8)


def timeline_of(problem: Problem, candidate: Candidate) -> tuple[Plan, Timeline]:
    """The plan of a candidate and its simulated step."""
    system = DisagMoEPlus()
    layout = system.layout(problem, candidate)
    plan = Plan(layout, system.program(problem, layout))
    verify(plan)
    return plan, Simulated(problem).run(plan)[1]


def picture(switch: str, before: tuple[Plan, Timeline], after: tuple[Plan, Timeline]) -> Figure:
    """Both orders on one axis of time."""
    heights = [0.4 + 2 * LANE * len(plan.layout.placement.workers) for plan, _ in (before, after)]
    figure = canvas(11.0, 1.05 + sum(heights) + 0.75)
    longest = max(timeline.step_s for _, timeline in (before, after))
    bottom = figure.get_figheight() - 1.05
    for height, title, (plan, timeline) in zip(heights, ("before", "after"), (before, after), strict=True):
        bottom -= height
        axes = axes_at(figure, 0.75, bottom + 0.1, 10.0, height - 0.45)
        _draw(axes, plan, timeline)
        axes.set_xlim(0.0, 1e3 * longest)
        axes.set_title(f"{title}: {1e3 * timeline.step_s:.1f} ms", loc="left", fontsize=9)
    axes.set_xlabel("ms")
    headline(
        figure, f"{switch}", f"simulated: first {LAYERS} layers of GPT-OSS-120B on 32 H800, DeepEP, {SEQ // 1024}K"
    )
    legend_below_headline(figure, [Patch(color=colour, label=text) for colour, text in COLOURS.values()], 6)
    footer(figure, "upper lane of a worker: compute; lower lane: communication (simulated)")
    return figure


def _draw(axes: Axes, plan: Plan, timeline: Timeline) -> None:
    """Two lanes per worker."""
    program, workers = timeline.program, plan.layout.placement.workers
    computes = np.isin(program.stream, sorted(int(stream) for stream in COMPUTE_STREAMS))
    for key, (colour, _) in COLOURS.items():
        rows = np.flatnonzero(_class(program.kind, program.phase) == key)
        rows = rows[timeline.end_s[rows] > timeline.start_s[rows]]
        low = 2.0 * (len(workers) - 1 - program.worker[rows]) + computes[rows]
        x0, x1 = 1e3 * timeline.start_s[rows], 1e3 * timeline.end_s[rows]
        corners = np.stack([x0, low + 0.08, x0, low + 0.92, x1, low + 0.92, x1, low + 0.08], axis=1)
        axes.add_collection(
            PolyCollection(list(corners.reshape(-1, 4, 2)), facecolors=colour, edgecolors="white", linewidths=0.2)
        )
    axes.set_ylim(0, 2 * len(workers))
    axes.set_yticks([2 * i + 1 for i in range(len(workers))], [worker.name for worker in reversed(workers)], fontsize=8)


def _class(kind: IntArray, phase: IntArray) -> NDArray[np.str_]:
    """Key of COLOURS of every row."""
    of_phase = np.array([{Phase.F: "F", Phase.R: "F", Phase.W: "W"}.get(p, "I") for p in Phase])
    keys: NDArray[np.str_] = of_phase[phase]
    keys[kind == int(Kind.HEAD)] = "H"
    keys[np.isin(kind, (int(Kind.DISPATCH), int(Kind.COMBINE), int(Kind.P2P)))] = "X"
    keys[np.isin(kind, (int(Kind.GRAD_SYNC), int(Kind.OPTIM)))] = "G"
    return keys


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
