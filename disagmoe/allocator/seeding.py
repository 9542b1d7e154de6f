"""Where the search for a ring's plan starts, and what lies beside a plan it has found.

Decides which allocations are worth trying first. A planner that has `ring_choices`
(what a Shape does not decide: keys of its candidates and their values) is a ring
planner: the program's division of the cluster, each half of the NICs or whole nodes
for each pool, becomes candidates in all those forms. On the way a candidate is
refined, the neighbours of the best one are tried (`ring_space`), as the DisagMoE
paper does around its seed (arXiv 2605.11005, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import product

from disagmoe.allocator.local_search import Value
from disagmoe.allocator.milp import allocate
from disagmoe.allocator.ring import RingMemory, ring_candidates, ring_space, sizes_of
from disagmoe.allocator.solvers import Infeasible, SolverError
from disagmoe.system import Candidate, Problem, System, without_recompute

RADIUS = 1
"""How far a neighbour is; a better one becomes the centre."""
SIZES = ("p", "dp", "m", "n", "nics", "group")
"""Options of a ring planner that its allocation must keep."""


def ring_choices(system: System) -> Mapping[str, tuple[Value, ...]]:
    """What an allocation leaves open of a candidate of this planner; nothing for planners of other kinds."""
    choices: Mapping[str, tuple[Value, ...]] = getattr(system, "ring_choices", {})
    return choices


def pinned(system: System) -> dict[str, Value]:
    """The planner's own options that its user has set."""
    wanted = {*SIZES, *ring_choices(system)}
    names: list[str] = [f.name for f in fields(system)] if is_dataclass(system) else []
    values = {name: getattr(system, name) for name in names if name in wanted}
    return {name: value for name, value in values.items() if value is not None}


def seeds(system: System, problem: Problem, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that mean the program's allocation, in every form the planner leaves open.

    Each belongs to the tier of `candidates` with its expert-parallel size. Nothing
    where nothing fits or no solver runs: the search then starts from `candidates`.
    """
    choices, fixed = ring_choices(system), pinned(system)
    tiers = {int(c["n"]): c["tier"] for c in reversed(candidates) if {"n", "tier"} <= set(c)}
    if not choices or not tiers or problem.cluster.gpus < 2:
        return []
    open_values = {key: (fixed[key],) if key in fixed else values for key, values in choices.items()}
    defaults = {key: values[0] for key, values in open_values.items()}
    weigh = RingMemory(system, problem, defaults)
    mode = {"halves": "equal_nics", "shared_nodes": "shared_nodes"}.get(str(fixed.get("nics")), "whole_nodes")
    try:
        plan = allocate(
            problem,
            mode=mode,
            sizes=sizes_of(fixed),
            memory=weigh.bound,
            check=weigh.whole,
            recompute=weigh.recompute,
        )
    except (Infeasible, SolverError):
        return []
    found: list[Candidate] = []
    for candidate in ring_candidates(plan, defaults):
        if candidate["n"] not in tiers or candidate["nics"] != fixed.get("nics", candidate["nics"]):
            continue
        for form in product(*open_values.values()):
            named = dict(zip(open_values, form, strict=True))
            group = fixed.get("group", candidate["group"])
            found.append({"tier": tiers[int(candidate["n"])], **candidate, **named, "group": group})
    return found


def neighbours(system: System, problem: Problem, candidate: Candidate) -> list[Candidate]:
    """Candidates within RADIUS of one, nearest first; none for planners that are no ring planners."""
    choices = ring_choices(system)
    if not choices:
        return []
    space = ring_space(problem, without_recompute(candidate), fixed=pinned(system), others=choices)
    points = (point for shell in space.ball(space.seed, RADIUS)[1:] for point in shell)
    found = (space.candidate(space.named(point)) for point in points)
    return [near for near in found if near is not None]
