"""The division of GPUs and NICs as a mixed-integer linear program, solved in lexicographic steps.

Decides by linear rows alone. Variables: one of the options (one-hot, z), one NIC
rate per pool (one-hot, u), and how many nodes are used in which way (k). Rows:

    each pool's GPUs            sum of k x GPUs of the use = sum of z x GPUs of the option
    nodes, and so NICs          sum of k over the uses of a kind <= its nodes
    slowest member              k > 0 only where the use gives its GPUs at least the rate chosen
    T >= compute                of either pool
    T >= network                of either pool at the rate chosen (big-M over rates)

What memory forbids has no z. The steps are those of `allocation`: the shortest T,
then the fewest GPUs at that T, then the first shape. A solver's tolerance must not
decide between near equals, so the first step ends with a proof in whole numbers:
every option knows the rates it needs to beat the T found, and the program that
asks for one of them must have no solution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from disagmoe.allocator.allocation import (
    TOLERANCE,
    Allocation,
    AllocationModel,
    Choice,
    allocation,
    allocation_model,
    needed_levels,
    undominated,
    why_infeasible,
)
from disagmoe.allocator.exhaustive import search
from disagmoe.allocator.options import Option, RecomputeOf
from disagmoe.allocator.shapes import MemoryOf, Shape, Sizes
from disagmoe.allocator.solvers import (
    EXHAUSTIVE,
    Answer,
    Infeasible,
    IntegerProgram,
    NoAnswer,
    Settings,
    SolverError,
    SolverMissing,
)
from disagmoe.system import Problem


def allocate(
    problem: Problem,
    *,
    mode: str = "whole_nodes",
    sizes: Sizes | None = None,
    memory: MemoryOf | None = None,
    check: MemoryOf | None = None,
    recompute: RecomputeOf | None = None,
    settings: Settings | None = None,
) -> Allocation:
    """The best division of a problem's cluster.

    With an expert-parallel size asked for, expert groups have that size; where
    nothing fits in memory with it, double and so on, then half. `memory` gives
    GiB per Shape (default: weights, gradients and optimizer state); `check` gives
    the whole of it and is asked only about Shapes that were chosen: what it
    refuses is out. `recompute` says what a Shape must recompute to fit, which costs
    time; it is asked again after `check`. Raises Infeasible naming the limit that binds, SolverError where
    the solver fails.
    """
    settings = settings or Settings()
    tiers = [sizes] if sizes is not None or problem.ep is None else _expert_tiers(problem)
    reasons: list[Infeasible] = []
    for tier in tiers:
        try:
            return solve(allocation_model(problem, mode, tier, memory, recompute), settings, check)
        except Infeasible as reason:
            reasons.append(reason)
    # A size that could be placed comes closest: what it lacks is memory.
    raise min(reasons, key=lambda reason: inf if reason.needed_gib is None else reason.needed_gib)


def _expert_tiers(problem: Problem) -> list[Sizes]:
    asked = min(problem.ep or 1, problem.model.experts, max(1, problem.cluster.gpus - 1))
    larger = [asked << i for i in range(12) if asked << i <= min(problem.model.experts, problem.cluster.gpus - 1)]
    smaller = [asked >> i for i in range(1, asked.bit_length())]
    return [Sizes(n=(n,)) for n in (*(larger or [asked]), *smaller)]


def solve(model: AllocationModel, settings: Settings | None = None, check: MemoryOf | None = None) -> Allocation:
    """Solve a model; without any solver that runs, `auto` searches exhaustively and says so.

    What `check` refuses is weeded out with the exhaustive search, which prefers the
    same option and is quicker at asking often; the solver then decides on the rest.
    """
    settings = settings or Settings()
    if check is None:
        return allocation(model, _choice(model, settings))
    _, model = _weed(model, check, search)
    choice, model = _weed(model, check, lambda rest: _choice(rest, settings))
    plan = allocation(model, choice)
    needed = next(option.memory_gib for option in model.options if option.shape == plan.shape)
    attention, expert = (
        replace(share, memory_gib=gib) for share, gib in zip((plan.attention, plan.expert), needed, strict=True)
    )
    return replace(plan, attention=attention, expert=expert)


def _weed(
    model: AllocationModel, check: MemoryOf, choose: Callable[[AllocationModel], Choice]
) -> tuple[Choice, AllocationModel]:
    """The first choice that `check` lets pass, and the model with the memory and times that were found on the way."""
    while True:
        choice = choose(model)
        shape = choice.option.shape
        needed = check(shape)
        priced = choice.option if model.price is None else model.price(shape)
        known = replace(priced, memory_gib=choice.option.memory_gib) == choice.option
        priced = replace(priced, memory_gib=needed)
        model = replace(model, options=tuple(priced if o.shape == shape else o for o in model.options))
        if known and max(needed) <= model.limit_gib:
            return choice, model


def _choice(model: AllocationModel, settings: Settings) -> Choice:
    if settings.solver == EXHAUSTIVE:
        return search(model)
    try:
        return _Search(model, settings).choose()
    except SolverMissing as reason:
        if settings.solver != "auto":
            raise
        return search(model, (f"exhaustive search instead of a solver: {reason}",))


@dataclass
class _Search:
    """The steps of one solve and what they have shown so far."""

    model: AllocationModel
    settings: Settings
    proven: bool = True
    notes: list[str] = field(default_factory=list)
    solver: str = ""

    def choose(self) -> Choice:
        fitting: Sequence[Option] = self.model.fitting
        if not fitting:
            raise why_infeasible(self.model)
        fitting = undominated(fitting)
        option, best_s, bound_s = self._shortest(fitting)
        option, best_s = self._improved(fitting, option, best_s)
        limit_s = best_s * (1.0 + TOLERANCE)
        equal = [o for o in fitting if needed_levels(o, limit_s) is not None]
        gpus = {o.shape: float(sum(o.shape.gpus)) for o in equal}
        option = self._least(equal, limit_s, gpus, option)
        first = sorted((o for o in equal if gpus[o.shape] == gpus[option.shape]), key=lambda o: o.shape)
        option = self._least(first, limit_s, {o.shape: float(rank) for rank, o in enumerate(first)}, option)
        return Choice(option, best_s, best_s if self.proven else bound_s, self.proven, self.solver, tuple(self.notes))

    def _shortest(self, fitting: Sequence[Option]) -> tuple[Option, float, float]:
        """Minimise T. Returns an option, its exact time at the rates chosen, and a bound on all."""
        unit = min(option.floor_s for option in fitting)  # T in units of its lower bound: tolerances become relative
        program = _program(self.model, fitting)
        program.real("T")
        for pool in (0, 1):
            terms = [(("z", o.shape), o.compute_s[pool] / unit) for o in fitting]
            program.row([*terms, ("T", -1.0)], "<=", 0.0)
            _network_rows(program, self.model, fitting, pool, unit)
        program.row([*((("z", o.shape), o.floor_s / unit) for o in fitting), ("T", -1.0)], "<=", 0.0)
        try:
            answer = self._ask(program, [("T", 1.0)])
        except Infeasible:
            raise why_infeasible(self.model) from None
        option = _chosen(answer, fitting)
        return option, option.step_s(_levels(self.model, answer)), max(unit, answer.bound * unit)

    def _improved(self, fitting: Sequence[Option], option: Option, best_s: float) -> tuple[Option, float]:
        """Beat the time found for as long as that is possible; the last failure is the proof."""
        while True:
            better = [o for o in fitting if needed_levels(o, best_s, strict=True) is not None]
            if not better:
                return option, best_s
            costs = {o.shape: o.floor_s for o in better}
            answer = self._try(self._at_most(better, best_s, strict=True), costs)
            if answer is None:
                return option, best_s
            option = _chosen(answer, better)
            best_s = option.step_s(_levels(self.model, answer))

    def _least(self, among: Sequence[Option], limit_s: float, costs: Mapping[Shape, float], known: Option) -> Option:
        """The option of the least cost that can be placed within `limit_s`; `known` is one that can."""
        cheaper = [o for o in among if costs[o.shape] < costs[known.shape]]
        if not cheaper:
            return known
        answer = self._try(self._at_most(cheaper, limit_s), {o.shape: costs[o.shape] for o in cheaper})
        if answer is None:
            return known
        self.proven = self.proven and answer.proven
        return _chosen(answer, cheaper)

    def _try(self, program: IntegerProgram, costs: Mapping[Shape, float]) -> Answer | None:
        """An answer, or None where there is none: proven unless time ran out."""
        try:
            return self._ask(program, [(("z", shape), cost) for shape, cost in costs.items()])
        except Infeasible:
            return None
        except NoAnswer:
            self.proven = False
            return None

    def _at_most(self, among: Sequence[Option], limit_s: float, *, strict: bool = False) -> IntegerProgram:
        """One of the options at rates that keep the limit: whole numbers only."""
        program = _program(self.model, among)
        for pool in (0, 1):
            rows: list[tuple[object, float]] = [
                (("u", pool, i), float(-i)) for i in range(1, len(self.model.levels[pool]))
            ]
            for option in among:
                need = needed_levels(option, limit_s, strict=strict)
                if need is None:
                    raise ValueError(f"{option.shape} cannot keep {limit_s} s")
                rows.append((("z", option.shape), float(need[pool])))
            program.row(rows, "<=", 0.0)
        return program

    def _ask(self, program: IntegerProgram, objective: list[tuple[object, float]]) -> Answer:
        answer = program.minimise(objective, self.settings)
        self.solver = answer.solver
        for note in answer.skipped:
            if note not in self.notes:
                self.notes.append(note)
        return answer


def _program(model: AllocationModel, among: Sequence[Option]) -> IntegerProgram:
    """Options, rates and nodes with the rows that tie them together."""
    program = IntegerProgram()
    for option in among:
        program.whole(("z", option.shape), 0, 1)
    program.row([(("z", option.shape), 1.0) for option in among], "==", 1.0)
    for index, use in enumerate(model.uses):
        program.whole(("k", index), 0, model.kinds[use.kind].count)
    for kind, nodes in enumerate(model.kinds):
        mine = [(("k", index), 1.0) for index, use in enumerate(model.uses) if use.kind == kind]
        program.row(mine, "<=", nodes.count)
    for pool in (0, 1):
        _pool_rows(program, model, among, pool)
    return program


def _pool_rows(program: IntegerProgram, model: AllocationModel, among: Sequence[Option], pool: int) -> None:
    """One rate for the pool, its GPUs on nodes, and no GPU below the rate."""
    levels = model.levels[pool]
    for i in range(len(levels)):
        program.whole(("u", pool, i), 0, 1)
    program.row([(("u", pool, i), 1.0) for i in range(len(levels))], "==", 1.0)
    members = [(index, use) for index, use in enumerate(model.uses) if use.gpus[pool]]
    placed: list[tuple[object, float]] = [(("k", index), float(use.gpus[pool])) for index, use in members]
    asked = [(("z", option.shape), -float(option.shape.gpus[pool])) for option in among]
    program.row([*placed, *asked], "==", 0.0)
    for index, use in members:
        count = float(model.kinds[use.kind].count)
        allowed = [(("u", pool, i), -count) for i, level in enumerate(levels) if level <= use.rates[pool]]
        program.row([(("k", index), 1.0), *allowed], "<=", 0.0)


def _network_rows(
    program: IntegerProgram, model: AllocationModel, among: Sequence[Option], pool: int, unit: float
) -> None:
    """T >= network at level i, unless a faster rate is chosen."""
    for i in range(len(model.levels[pool])):
        seconds = [o.network_s[pool][i] / unit for o in among]
        big = max(seconds)
        terms: list[tuple[object, float]] = [(("z", o.shape), s) for o, s in zip(among, seconds, strict=True)]
        slower = [(("u", pool, j), big) for j in range(i + 1)]
        program.row([*terms, *slower, ("T", -1.0)], "<=", big)


def _chosen(answer: Answer, among: Sequence[Option]) -> Option:
    chosen = [option for option in among if answer.counts["z", option.shape] == 1]
    if len(chosen) != 1:
        raise SolverError(f"{answer.solver} chose {len(chosen)} options instead of one")
    return chosen[0]


def _levels(model: AllocationModel, answer: Answer) -> tuple[int, int]:
    first, second = (
        next(i for i in range(len(model.levels[pool])) if answer.counts["u", pool, i] == 1) for pool in (0, 1)
    )
    return first, second
