"""`python -m bench.system_curves [steps=50] [ranks=4] [out=results/systems]`: every system trains the same model.

Decides what is compared: the tiny model in fp64 from equal weights on equal data,
optimizer and clipping included, by one process and by every system's own plan on a
few forked ranks. All losses must lie within 1e-8 of each other; Tutel with a
capacity that drops tokens trains something else and is drawn, labelled and left out
of the comparison. Writes the curves (.png), the losses (.csv) and prints the
largest difference of each system to any other. The exit status says whether they agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from baselines.registry import get_system, system_names
from baselines.tutel import Tutel
from bench.curves import Curve, curves_figure, write_table
from bench.report.style import drawing, save
from disagmoe.cost.calibration import load_calibration
from disagmoe.cost.model import CostModel
from disagmoe.model import LossWeights
from disagmoe.plan.plan import Plan
from disagmoe.plan.verify import verify
from disagmoe.runtime.crew import Crew, Forked
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.data import Synthetic
from disagmoe.runtime.errors import RankError
from disagmoe.runtime.optimizer import Recipe
from disagmoe.runtime.single import train_single
from disagmoe.runtime.step import RunOptions
from disagmoe.runtime.trainer import Course, train
from disagmoe.specs import ClusterSpec, ModelSpec, Workload, load_cluster, load_model
from disagmoe.specs.cluster import NodeGroup
from disagmoe.system import NotApplicable, Problem, System, variants_of

BOUND = 1e-8
SEQ, BATCH = 16, 8
DROPS = "drops tokens"
SINGLE = "one process"


@dataclass(frozen=True)
class Asked:
    """How long, on how many ranks, and where the files go."""

    steps: int = 50
    ranks: int = 4
    out: Path = Path("results/systems")


@dataclass(frozen=True)
class Setting:
    """What all systems train."""

    model: ModelSpec
    options: RunOptions
    course: Course
    source: Synthetic


def setting(steps: int) -> Setting:
    """The tiny model in fp64, losses of the router included."""
    model = load_model("tiny")
    recipe = Recipe(lr=3e-3, warmup=min(5, steps - 1), steps=steps, clip=1.0, weight_decay=0.1)
    options = RunOptions(precision="fp64", weights=LossWeights(0.01, 0.001), recipe=recipe)
    return Setting(model, options, Course(steps, show_every=steps, screen=False), Synthetic(model.vocab, SEQ, seed=0))


def plans(model: ModelSpec, ranks: int) -> Iterator[tuple[str, Plan]]:
    """(label, plan) of every row of every system that can be placed on `ranks` ranks, on two stages where possible."""
    node = load_cluster("laptop")
    cluster = ClusterSpec(
        name="ranks", device=node.device, groups=(NodeGroup(1, ranks, ranks, 64.0),), nvlink_gbs=node.nvlink_gbs,
        memory_gib=node.memory_gib, calibration=node.calibration, reserve_gib=node.reserve_gib,
    )  # fmt: skip
    forms: dict[str, System] = {}
    for name in system_names():
        system: System = Tutel(degree=2) if name == "tutel" else get_system(name)
        for form in variants_of(system, "native"):
            forms[f"{name} ({form.label})" if form.label else name] = form.system
    forms[f"tutel (capacity 1, {DROPS})"] = Tutel(degree=2, capacity_factor=1.0)
    for label, system in forms.items():
        try:
            yield label, _plan(system, model, cluster)
        except NotApplicable as reason:
            print(f"{label}: not applicable: {reason}")


def _plan(system: System, model: ModelSpec, cluster: ClusterSpec) -> Plan:
    work = Workload(seq=SEQ, global_batch=BATCH, micro_batch=1)
    costs = CostModel(model, cluster, load_calibration(cluster.calibration), work)
    problem = Problem(model, cluster, work, costs, system.native_transport, "rank", max(1, cluster.gpus // 2))
    reason: Exception | None = None
    for candidate in sorted(system.candidates(problem), key=lambda c: c.get("pp", 2) != 2):
        try:
            layout = system.layout(problem, candidate)
            plan = Plan(layout, system.program(problem, layout))
            verify(plan.program)
        except (NotApplicable, ValueError) as error:
            reason = error
            continue
        if layout.placement.gpus_used == cluster.gpus:
            return plan
    raise NotApplicable(f"no plan on {cluster.gpus} ranks" + (f": {reason}" if reason else ""))


def losses_of(crew: Crew, plan: Plan, what: Setting) -> Curve:
    """A system's curve."""
    layout = plan.layout
    cut = Cut(BATCH, SEQ, layout.placement.replicas, layout.batch.microbatches)
    given = (plan, what.model, cut, what.options, what.source, what.course)
    history = crew.call(train, *given, timeout_s=60.0 + 15.0 * what.course.steps)[0]
    return Curve(layout.system, {metrics.step: metrics.loss for metrics in history})


def differences(curves: Mapping[str, Curve]) -> dict[str, float]:
    """Largest difference of each curve to any other on any step; those that drop tokens are left out."""
    largest = {name: 0.0 for name in curves if DROPS not in name}
    for one, other in combinations(largest, 2):
        apart = max(curves[one].differences(curves[other]).values())
        largest[one], largest[other] = max(largest[one], apart), max(largest[other], apart)
    return largest


def run(asked: Asked) -> dict[str, Curve]:
    """Train everything; curves by label, the single process first."""
    what, crew = setting(asked.steps), Forked(asked.ranks)
    single = train_single(what.model, what.options, what.source, what.course, BATCH, SEQ)
    curves = {SINGLE: Curve(SINGLE, {metrics.step: metrics.loss for metrics in single})}
    for label, plan in plans(what.model, asked.ranks):
        found = losses_of(crew, plan, what)
        curves[label] = Curve(label, found.losses)
        print(f"{label}: last loss {list(found.losses.values())[-1]:.12f}", flush=True)
    return curves


def read_arguments(given: Sequence[str]) -> Asked:
    """From key=value. Raises ValueError in one line."""
    values = dict(argument.partition("=")[::2] for argument in given)
    if unknown := sorted(set(values) - {"steps", "ranks", "out"}):
        raise ValueError(f"no setting {unknown[0]!r}; settings: steps, ranks, out")
    numbers = {"steps": Asked.steps, "ranks": Asked.ranks}
    for key, least in (("steps", 2), ("ranks", 2)):
        if key in values:
            if not values[key].isdecimal() or int(values[key]) < least:
                raise ValueError(f"{key}={values[key]}: allowed: a whole number of at least {least}")
            numbers[key] = int(values[key])
    return Asked(numbers["steps"], numbers["ranks"], Path(values.get("out", Asked.out)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare, draw; the exit status."""
    try:
        asked = read_arguments(list(sys.argv[1:] if arguments is None else arguments))
        curves = run(asked)
    except (ValueError, RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    asked.out.mkdir(parents=True, exist_ok=True)
    drawn = list(curves.values())
    with drawing():
        save(curves_figure(drawn), asked.out / "curves.png")
    write_table(drawn, asked.out / "curves.csv")
    apart = differences(curves)
    for label, value in apart.items():
        print(f"{label}: largest difference to any other {value:.1e}")
    worst = max(apart.values())
    print(f"{asked.out / 'curves.png'}: {len(apart)} curves within {worst:.1e} over {asked.steps} steps")
    if worst > BOUND:
        print(f"error: the systems differ by {worst:.1e}, more than {BOUND:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
