"""Disaggregated plans of `disagmoe_plus`: DisagMoE's ring with improvements, each a key of the candidate.

- `head`: the output head on every F-group ("spread"), or as in the paper;
- `put_off`: backwards in two parts, at most so many weight gradients put off (-1: whole);
- `map`: "balanced" deals layers of different cost evenly over the A-groups;
- `p_f`: another number of F-groups than the p A-groups (0: as many);
- `rows`, `spare`, `pending`: the look-ahead window (rows 0: none), see `plan/lookahead.py`.

Decides how these combine: a window and other maps need one compute stream, and with
two streams a weight gradient follows its own input gradient.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Kind, Phase
from disagmoe.plan.af_mapped import Clock, balanced_groups, mapped_program
from disagmoe.plan.af_pipe import af_pipe_program
from disagmoe.plan.plan import Layout
from disagmoe.plan.pricing import LayoutCosts
from disagmoe.plan.program import Program
from disagmoe.plan.split_backward import split_backward
from disagmoe.system import Candidate, NotApplicable, Problem
from disagmoe.systems.disagmoe import HEAD_NAMES, DisagMoE
from disagmoe.systems.pools import Shape, place

PAPER: Candidate = {"form": "ring", "head": "last_f", "put_off": -1, "map": "paper", "p_f": 0}
"""The switches of a ring as the paper has it."""
_OWN_KEYS = frozenset({*PAPER, "rows", "spare", "pending", "gather"})


def ring_layout(problem: Problem, candidate: Candidate, system: str) -> Layout:
    """Place one candidate on the cluster. Raises NotApplicable where switches do not go together."""
    head = str(candidate["head"])
    plain = DisagMoE(head=head, name=system)
    layout = plain.layout(problem, {k: v for k, v in candidate.items() if k not in _OWN_KEYS})
    put_off, p_f = int(candidate["put_off"]), int(candidate["p_f"])
    balanced = candidate["map"] == "balanced"
    if int(layout.options["compute_streams"]) == 2 and (put_off > 0 or balanced or p_f or candidate.get("rows")):
        raise NotApplicable("with two compute streams a ring has the paper's map, no window, and puts nothing off")
    options = {**layout.options, "form": "ring", "head": head, "put_off": put_off, "mapped": int(balanced or p_f > 0)}
    details = {"form": "apart", **layout.details, "head": HEAD_NAMES[head]}
    if put_off >= 0:
        details["weight_gradients"] = f"apart, {put_off} put off"
    layout = replace(layout, options=options, details=details)
    if p_f:
        layout = _with_f_groups(problem, layout, candidate, p_f)
    if balanced:
        layout = _balanced(problem, layout)
    # What the plain order holds says nothing about another one.
    own = bool(options["mapped"] or candidate.get("rows"))
    kept = {k: v for k, v in layout.options.items() if not (own and k.startswith("in_flight_"))}
    return replace(layout, options=kept)


def ring_program(problem: Problem, layout: Layout) -> Program:
    """The order of a ring before any look-ahead."""
    options, model = layout.options, problem.model
    p, m, head = int(options["p"]), layout.batch.microbatches, str(options["head"])
    recompute = Recompute.of(options).repeated(disaggregated=True)
    group, order, put_off = int(options["group"]), str(options["order"]), int(options["put_off"])
    try:
        if options["mapped"]:
            placement, clock = layout.placement, Clock(p, group, order)
            program = mapped_program(
                attn=placement.attn, ffn=placement.ffn, m=m, clock=clock, head=head, recompute=recompute
            )
        else:
            program = af_pipe_program(
                p=p,
                layers=model.layers,
                m=m,
                group=group,
                order=order,
                head=head,
                compute_streams=int(options["compute_streams"]),
                recompute=recompute,
            )
    except ValueError as reason:  # an (order, group) pair that would deadlock, or recompute the map cannot do
        raise NotApplicable(str(reason)) from reason
    return program if put_off < 0 else split_backward(program, put_off)


def other_depths(problem: Problem, candidate: Candidate) -> list[Candidate]:
    """The candidate with half and with twice as many F-groups of the same size, where pools are apart."""
    if candidate["nics"] == "shared_nodes":
        return []
    p = int(candidate["p"])
    found: list[Candidate] = []
    for p_f in (p // 2, 2 * p):
        if 1 <= p_f <= problem.model.layers and p_f != p:
            found.append({**candidate, "p_f": p_f, "compute_streams": 1})
    return found


def _with_f_groups(problem: Problem, layout: Layout, candidate: Candidate, p_f: int) -> Layout:
    """The layout with p_f F-groups; the A-groups stay as they are."""
    if candidate["nics"] == "shared_nodes":
        raise NotApplicable("pools that share nodes are equally deep")
    p, dp, m, n = (int(candidate[key]) for key in ("p", "dp", "m", "n"))
    workers = place(problem.cluster, str(candidate["nics"]), Shape(p, dp, m, n, p_f=p_f))
    layers = problem.model.layers
    if workers is None or p > layers or p_f > layers:
        raise NotApplicable(f"{p} A-groups of {m} and {p_f} F-groups of {n} GPUs do not fit this cluster")
    ffn = tuple(p + layer % p_f for layer in range(layers))
    heads = tuple(range(p, p + p_f)) if candidate["head"] == "spread" and p_f > 1 else (ffn[-1],)
    placement = replace(
        layout.placement, workers=workers, ffn=ffn, head=heads[0], head_shards=heads if len(heads) > 1 else ()
    )
    details = {
        **layout.details,
        "F_groups": p_f,
        "F_gpus": p_f * dp * n,
        "A_nic_gbs_per_gpu": workers[0].nic_gbs,
        "F_nic_gbs_per_gpu": workers[p].nic_gbs,
    }
    return replace(layout, placement=placement, details=details)


def _balanced(problem: Problem, layout: Layout) -> Layout:
    """The layout with layers dealt to A-groups by the time of their attention."""
    prices, p = LayoutCosts(layout, problem.costs), int(layout.options["p"])
    like = problem.costs.like
    times = {x: sum(prices.op(Kind.ATTN, phase, x).seconds for phase in (Phase.F, Phase.B)) for x in sorted(set(like))}
    attn = balanced_groups([times[first] for first in like], p)
    rounds = ceil(problem.model.layers / p)
    if attn == tuple(layer % p for layer in range(len(attn))) or rounds < 2:
        raise NotApplicable("every A-group has as much to do already")
    return replace(
        layout,
        placement=replace(layout.placement, attn=attn, embed=attn[0]),
        details={**layout.details, "map": "balanced"},
    )
