"""`disagmoe_plus`: the fastest plan that our improvements find, attention and experts apart or together.

Decides what each switch may do and which combinations are tried. A switch is "off"
(never), "on" (always, where it means anything) or "auto" (the search decides per
problem). With every switch off this is `disagmoe`. Plans apart are
`plus_ring.py`'s, plans together `plus_pipeline.py`'s; on either the look-ahead window
re-records the order and updated parameters may be gathered early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from disagmoe.cost.recompute import Recompute
from disagmoe.plan.early_gather import gather_early
from disagmoe.plan.lookahead import Window, look_ahead
from disagmoe.plan.plan import Layout
from disagmoe.plan.pricing import price
from disagmoe.plan.program import Program
from disagmoe.system import Candidate, NotApplicable, Problem
from disagmoe.systems.disagmoe import DisagMoE
from disagmoe.systems.plus_pipeline import chunk_counts, pipeline_candidates, pipeline_layout, pipeline_program
from disagmoe.systems.plus_ring import PAPER, other_depths, ring_layout, ring_program
from disagmoe.systems.shortlist import shortlist

STATES = ("auto", "on", "off")
FREE_SIZES = (8, 16, 32)
"""Experts' GPUs per group that are tried where the group size is free."""
RINGS, SMALL_RINGS = 10, 4
"""Splits looked at beside pipelines: the fastest by estimate, and the smallest."""
FIRST_WINDOW = (4, 0, 2)
WINDOWS = (FIRST_WINDOW, (3, 0, 2), (6, 0, 4), (16, 4, 8))
"""Rows looked at, layers in flight more than before, weight gradients put off."""
MANY_ROWS = 60_000
"""Programs above this size are refined less: building and playing one takes the better part of a second."""
_OPERATIONS = 16
"""Rows of one layer and micro-batch, roughly."""


@dataclass(frozen=True)
class DisagMoEPlus:
    """Switches of the planner, "auto", "on" or "off".

    `spread_head`: output head over all F-groups. `split_backward`: input gradients
    first, weight gradients later. `look_ahead`: a window over the order, re-recorded.
    `free_groups`: experts per group not bound to the EP size asked for (auto: only
    where none is asked for). `balanced_map`: layers of different cost dealt evenly to
    A-groups. `shared_nodes`: both pools of a stage on the same nodes (on: only so; else
    a rule for NICs among others, as for `disagmoe`). `other_depths`: more or fewer
    F-groups than A-groups. `early_gather`: updated parameters gathered during the next
    forward. `hybrid`: attention and experts together (on: only so). What loses in the
    median of the shipped models and lengths is off unless asked for.
    """

    spread_head: str = "auto"
    split_backward: str = "auto"
    look_ahead: str = "auto"
    free_groups: str = "auto"
    balanced_map: str = "off"
    shared_nodes: str = "off"
    other_depths: str = "off"
    early_gather: str = "auto"
    hybrid: str = "auto"

    name: str = "disagmoe_plus"
    native_transport: str = "m2n_rdma"
    recompute_levels: ClassVar[tuple[Candidate, ...]] = (
        {},
        {"recompute": "selective"},
        {"recompute": "selective", "recompute_attention": "full"},
        {"recompute": "selective", "recompute_ffn": "full", "recompute_tokens": "keep"},
        {"recompute": "selective", "recompute_ffn": "full", "recompute_combine": "never"},
        {"recompute": "full", "recompute_tokens": "keep"},
        {"recompute": "full", "recompute_combine": "never"},
    )
    """By what they cost; a backward needs nothing that a combine returned, so no replay repeats it."""

    def __post_init__(self) -> None:
        for switch in SWITCHES:
            if getattr(self, switch) not in STATES:
                raise ValueError(f"disagmoe_plus {switch}={getattr(self, switch)!r}: allowed are {', '.join(STATES)}")

    @classmethod
    def with_switches(cls, *on: str, others: str = "off") -> DisagMoEPlus:
        """These switches on and all others in the state `others`."""
        return cls(**{switch: "on" if switch in on else others for switch in SWITCHES})

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """The most promising pipelines and rings. Raises NotApplicable where there are neither."""
        reasons: list[NotApplicable] = []
        found: list[Candidate] = []
        for wanted, listed in ((self.hybrid != "off", self._pipelines), (self.hybrid != "on", self._rings)):
            if wanted:
                try:
                    found += listed(problem)
                except NotApplicable as reason:
                    reasons.append(reason)
        if not found and reasons:
            raise reasons[0]
        return found

    def _pipelines(self, problem: Problem) -> Iterator[Candidate]:
        for candidate in pipeline_candidates(problem):
            if self.look_ahead != "off":
                yield {**candidate, **self._gather(), **_windowed(FIRST_WINDOW)}
            # A window keeps gradients for longer; the leanest schedule is the one that fits where little does.
            if self.look_ahead == "off" or (self.look_ahead == "auto" and candidate["schedule"] == "plain"):
                yield {**candidate, **self._gather()}

    def _rings(self, problem: Problem) -> Iterator[Candidate]:
        """Rings of the splits that `disagmoe` looks at, fewer of them where pipelines compete."""
        listed = [dict(candidate) for candidate in self._plain.candidates(self._asked(problem))]
        if self.free_groups == "on" and problem.ep is not None:
            listed = [candidate for candidate in listed if candidate["n"] in FREE_SIZES]
        if self.hybrid == "auto":
            splits = {tuple((k, v) for k, v in c.items() if k not in _FORM_KEYS): c for c in listed}
            kept = shortlist(problem, list(splits.values()), RINGS, SMALL_RINGS)
            listed = [candidate for candidate in listed if any(_same_split(candidate, other) for other in kept)]
        for candidate in listed:
            yield from self._first_forms(problem, {**PAPER, **candidate, **self._gather()})

    def _first_forms(self, problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
        """A ring with every switch that usually helps."""
        form = {**candidate, "head": "last_f" if self.spread_head == "off" else "spread"}
        windowed = self.look_ahead != "off" and (form["compute_streams"] == 1 or self.look_ahead == "on")
        if windowed:
            form |= {"compute_streams": 1, **_windowed(FIRST_WINDOW)}
        if self.split_backward != "off":
            form["put_off"] = 0 if windowed or form["compute_streams"] == 2 else 1
        if self.balanced_map == "on":
            form |= {"map": "balanced", "compute_streams": 1}
        if self.other_depths == "on":
            yield from other_depths(problem, form)
        else:
            yield form

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        """Variations of a good plan: windows and parts of a pipeline; orders, groups and switches of a ring."""
        candidate = self._complete(problem, candidate)
        large = _rows(problem, candidate) > MANY_ROWS
        if self.early_gather == "auto" and "gather" in candidate:
            yield {key: value for key, value in candidate.items() if key != "gather"}
        if candidate["form"] == "pipeline":
            windows: list[tuple[int, int, int] | None] = (
                [None] if self.look_ahead == "off" else list(WINDOWS[:2] if large else WINDOWS)
            )
            if self.look_ahead == "auto" and not large:
                windows.append(None)
            for chunks in chunk_counts(problem, candidate)[: 2 if large else 3]:
                for window in windows:
                    yield {**_bare(candidate), "chunks": chunks, **({} if window is None else _windowed(window))}
            return
        yield from self._ring_refinements(problem, candidate, large)

    def _ring_refinements(self, problem: Problem, candidate: Candidate, large: bool) -> Iterator[Candidate]:
        plain = {k: v for k, v in candidate.items() if k not in PAPER and k not in _ORDER_KEYS}
        switches = {k: v for k, v in candidate.items() if k in PAPER or k in _ORDER_KEYS}
        for listed in self._plain.refinements(self._asked(problem), plain):
            one = listed["compute_streams"] == 1
            if one or not (switches.get("rows") or switches["map"] == "balanced" or switches["p_f"]):
                yield {**listed, **switches, **({} if one else {"put_off": min(int(switches["put_off"]), 0)})}
            elif self.look_ahead == "auto" and not switches["p_f"] and switches["map"] == "paper":
                yield {**listed, **_bare(switches), "put_off": min(int(switches["put_off"]), 0)}
        one_stream = {**candidate, "compute_streams": 1}
        if self.spread_head == "auto":
            yield {**candidate, "head": "last_f" if candidate["head"] == "spread" else "spread"}
        if self.look_ahead != "off":
            yield from ({**one_stream, **_windowed(window)} for window in (WINDOWS[:2] if large else WINDOWS))
        if self.split_backward == "auto":
            yield from ({**_bare(one_stream), "put_off": count} for count in (-1, 0, 2))
        if self.balanced_map == "auto":
            yield {**one_stream, "map": "balanced"}
        if self.other_depths == "auto":
            yield from other_depths(problem, one_stream)

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        """Place one candidate on the cluster. Raises NotApplicable where it cannot be placed."""
        candidate = self._complete(problem, candidate)
        make = pipeline_layout if candidate["form"] == "pipeline" else ring_layout
        layout = make(problem, candidate, self.name)
        options = {key: candidate[key] for key in _ORDER_KEYS if key in candidate}
        details: dict[str, str | int | float] = {}
        if candidate.get("rows"):
            rows, spare, pending = (candidate[key] for key in ("rows", "spare", "pending"))
            details["window"] = f"{rows} rows, {spare} layers more, {pending} put off"
        if candidate.get("gather") == "early":
            details["parameters"] = "gathered early"
        return replace(layout, options={**layout.options, **options}, details={**layout.details, **details})

    def program(self, problem: Problem, layout: Layout) -> Program:
        """The order of a layout: its form's, gathered early and looked ahead as it says."""
        options = layout.options
        program = (pipeline_program if options["form"] == "pipeline" else ring_program)(problem, layout)
        if options.get("gather") == "early":
            program = gather_early(program)
        if not options.get("rows"):
            return program
        window = Window(int(options["rows"]), int(options["spare"]), int(options["pending"]))
        try:
            return look_ahead(program, price(_as_ordered(layout), program, problem.costs), window)
        except ValueError as reason:
            raise NotApplicable(str(reason)) from reason

    def _complete(self, problem: Problem, candidate: Candidate) -> Candidate:
        """An allocation of a ring says its sizes only: with the switches that this planner starts from."""
        if "form" in candidate:
            return candidate
        return next(self._first_forms(problem, {**PAPER, **candidate, **self._gather()}))

    @property
    def ring_choices(self) -> Mapping[str, tuple[str | int | float, ...]]:
        """As of `disagmoe`, so that an allocation is a candidate; nothing with pipelines beside it or shared nodes."""
        return DisagMoE.ring_choices if self.hybrid == "off" and self.shared_nodes != "on" else {}

    @property
    def _plain(self) -> DisagMoE:
        """The planner of the paper's rings."""
        return DisagMoE(nics="shared_nodes" if self.shared_nodes == "on" else None)

    def _asked(self, problem: Problem) -> Problem:
        """The problem as the rings see it."""
        return replace(problem, ep=None) if self.free_groups == "on" else problem

    def _gather(self) -> Candidate:
        return {} if self.early_gather == "off" else {"gather": "early"}


SWITCHES = tuple(f.name for f in fields(DisagMoEPlus) if f.name not in ("name", "native_transport"))
"""Names of the switches, in the order of the documentation."""
_ORDER_KEYS = ("rows", "spare", "pending", "gather")
_FORM_KEYS = frozenset({"order", "group", "compute_streams"})


def _as_ordered(layout: Layout) -> Layout:
    """The layout whose times decide an order: what is redone inside a backward changes no order."""
    policy = Recompute.of(layout.options)
    kept = {key: value for key, value in layout.options.items() if not key.startswith("recompute")}
    modes = (("recompute_attention", policy.attention), ("recompute_ffn", policy.ffn))
    again = {key: "full" for key, mode in modes if mode == "full"}
    how = {"recompute_tokens": policy.tokens, "recompute_combine": policy.combine}
    return replace(layout, options={**kept, **again, **how})


def _windowed(window: tuple[int, int, int]) -> Candidate:
    return dict(zip(("rows", "spare", "pending"), window, strict=True))


def _bare(candidate: Candidate) -> dict[str, str | int | float]:
    """Without a window."""
    return {k: v for k, v in candidate.items() if k not in ("rows", "spare", "pending")}


def _same_split(one: Candidate, other: Candidate) -> bool:
    return all(one[key] == other.get(key) for key in one if key not in _FORM_KEYS)


def _rows(problem: Problem, candidate: Candidate) -> int:
    """Rows of a candidate's Program, roughly."""
    data_ranks = (
        problem.cluster.gpus // int(candidate["pp"])
        if candidate["form"] == "pipeline"
        else (int(candidate["dp"]) * int(candidate["m"]))
    )
    microbatches = -(-problem.workload.global_batch // (int(candidate["micro_batch"]) * data_ranks))
    return microbatches * problem.model.layers * _OPERATIONS * int(candidate.get("chunks", 1))
