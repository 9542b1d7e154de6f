"""How large the cut of a full-size plan is: its stages or groups, and the ranks of each.

Decides what of a plan its cut keeps. A pipeline becomes one of two stages, the paper's
ring one of a group of two ranks on either side for every four processes. Rings whose
point lies in their sizes keep it: a head that several F-groups share and a map that
deals layers to several A-groups have two groups on either side; unequal depths have
twice as many groups on the side that has more; where a planner's groups are free, larger
or smaller ones than usual have more or fewer ranks than two; pools that share nodes
share the two nodes of the cut. Each pool has half of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagmoe.plan.af_pipe import group_sizes
from disagmoe.plan.plan import Layout
from disagmoe.specs import ModelSpec
from disagmoe.system import Candidate, NotApplicable

LAYERS, MICROBATCHES = 8, 8
GROUP = 2
"""Ranks of a group of the paper's ring."""


def cut_layers(model: ModelSpec) -> int:
    """How many layers of a model its cuts have."""
    return min(LAYERS, model.layers)


@dataclass(frozen=True)
class RingSizes:
    """Groups of either pool and, where pools share nodes, nodes per stage (0: they do not)."""

    a_groups: int
    f_groups: int
    stage_nodes: int = 0

    def applied(self, candidate: Candidate, layers: int, processes: int) -> Candidate:
        """The candidate with these sizes, each pool on half of the processes. Raises NotApplicable."""
        half, most = processes // 2, max(self.a_groups, self.f_groups)
        if most > half:
            raise NotApplicable(f"needs {2 * most} processes: {self.a_groups} A-groups and {self.f_groups} F-groups")
        nics = "shared_nodes" if self.stage_nodes else "halves"
        sizes = {"p": self.a_groups, "dp": 1, "m": half // self.a_groups, "n": half // self.f_groups}
        wanted = self.a_groups * int(candidate["group"]) / int(candidate["p"])
        allowed = group_sizes(self.a_groups, layers, MICROBATCHES)
        group = min(allowed, key=lambda size: (abs(size - wanted), size))
        p_f = 0 if self.f_groups == self.a_groups else self.f_groups
        depth = {"p_f": p_f} if "p_f" in candidate else {}
        return {**candidate, **sizes, **depth, "nics": nics, "stage_nodes": self.stage_nodes, "group": group}


def paper_sizes(processes: int) -> RingSizes:
    """The paper's ring: groups of two ranks."""
    groups = processes // (2 * GROUP)
    return RingSizes(groups, groups)


def ring_sizes(full: Layout, usual: int | None, processes: int) -> RingSizes:
    """The sizes of the cut of a ring. Raises NotApplicable.

    `usual` is the number of experts' GPUs that two ranks stand for where groups are free; None: of any.
    """
    placement = full.placement
    pools = [worker.pool for worker in placement.workers]
    a_groups, f_groups = pools.count("A"), pools.count("F")
    spread = len(placement.heads) > 1
    mapped = placement.attn != tuple(layer % a_groups for layer in range(len(placement.attn)))
    if a_groups != f_groups:
        sizes = RingSizes(2, 1) if a_groups > f_groups else RingSizes(1, 2)
        both = (spread and sizes.f_groups == 1) or (mapped and sizes.a_groups == 1)
        return RingSizes(2 * sizes.a_groups, 2 * sizes.f_groups) if both else sizes
    if full.options.get("form") == "ring" and placement.workers[0].shares_nodes(placement.workers[a_groups]):
        nodes = placement.workers[0].nodes
        return RingSizes(2, 2, 1) if spread or mapped or nodes == 1 else RingSizes(1, 1, 2)
    if spread or mapped:
        return RingSizes(2, 2)
    if usual is not None and full.ep != usual:
        ranks = max(1, GROUP * full.ep // usual)
        if ranks > processes // 2:
            raise NotApplicable(
                f"needs {2 * ranks} processes: groups of {full.ep} experts' GPUs are {ranks} ranks "
                f"where {usual} are {GROUP}"
            )
        return RingSizes(processes // 2 // ranks, processes // 2 // ranks)
    return paper_sizes(processes)


def smaller(candidate: Candidate, full: Layout, usual: int | None, layers: int, processes: int) -> Candidate:
    """The candidate behind `full` with the sizes of its cut, its other choices kept. Raises NotApplicable."""
    if full.placement.disaggregated:
        return ring_sizes(full, usual, processes).applied(candidate, layers, processes)
    stages, stages_full = 2, int(candidate["pp"])
    sizes: dict[str, int] = {"pp": stages, "ep": processes // stages}
    if "virtual" in candidate:
        sizes["virtual"] = min(int(candidate["virtual"]), layers // stages)
    if "group" in candidate:
        sizes["group"] = min(MICROBATCHES, max(stages, round(stages * int(candidate["group"]) / stages_full)))
    return {**candidate, **sizes}
