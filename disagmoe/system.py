"""The System protocol: what a system under test must offer.

A system (DisagMoE, Megatron-1F1B, Tutel, yours) is a planner. It lists the
candidates of its own search space, lays each of them out on the cluster, and
turns a layout into a Program. It never simulates, times or draws: the harness
does that alike for every system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from disagmoe.cost.model import CostModel
from disagmoe.plan.plan import Layout
from disagmoe.plan.program import Program
from disagmoe.specs.cluster import ClusterSpec
from disagmoe.specs.model import ModelSpec
from disagmoe.specs.workload import Workload

Candidate = Mapping[str, str | int | float]
"""One point of a system's search space, e.g. {"pp": 8, "virtual": 2, "micro_batch": 1}."""


@dataclass(frozen=True)
class Problem:
    """What every system is given: the model, the cluster, the batch and the transport.

    `transport` and `merge` are resolved by the view ("native" or "uniform")
    before a system sees them. `ep` is the expert-parallel size asked for, None
    where the system may choose. `costs` prices operations, for planners that
    balance layers over stages; it holds the calibration.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    costs: CostModel
    transport: str
    merge: str
    ep: int | None = 16


class Variant(NamedTuple):
    """One row of a system that is shown in several forms.

    `label` is "" for the plain form. `system` is the planner configured for it.
    `native_transport` is set where the form differs by its transport in the
    native view only; it then has no row of its own in the uniform view.
    """

    label: str
    system: System
    native_transport: str | None = None


def variants_of(system: System, view: str) -> tuple[Variant, ...]:
    """The rows of a system in one view: what its `variants()` lists, or just itself."""
    listed = getattr(system, "variants", None)
    forms = (Variant("", system),) if listed is None else tuple(Variant(*form) for form in listed())
    return tuple(form for form in forms if view == "native" or form.native_transport is None)


NO_RECOMPUTE: tuple[Candidate, ...] = ({},)
SELECTIVE_LEVELS: tuple[Candidate, ...] = ({}, {"recompute": "selective"})
RECOMPUTE_LEVELS: tuple[Candidate, ...] = (*SELECTIVE_LEVELS, {"recompute": "full"})


def recompute_levels(system: System) -> tuple[Candidate, ...]:
    """What a system may recompute, cheapest first, as additions to a candidate; nothing unless it says so."""
    levels: tuple[Candidate, ...] = getattr(system, "recompute_levels", NO_RECOMPUTE)
    return levels


def recompute_of(candidate: Candidate) -> dict[str, str | int | float]:
    """What `recompute_levels` added to a candidate: options of the Layout, by the names of `cost.recompute`."""
    return {key: value for key, value in candidate.items() if key.startswith("recompute")}


def without_recompute(candidate: Candidate) -> Candidate:
    """A candidate without the additions of `recompute_levels`."""
    return {key: value for key, value in candidate.items() if not key.startswith("recompute")}


class NotApplicable(Exception):
    """A system cannot run this problem; the message is the reason shown in the table."""


@runtime_checkable
class System(Protocol):
    """A planner. Implementations are frozen dataclasses whose fields are the user's options.

    A system that is shown in several rows also has `variants() -> tuple[Variant, ...]`;
    one that can recompute activations has `recompute_levels`, additions to a
    candidate ({"recompute": "full"}, ...) in the order in which they are tried.
    """

    @property
    def name(self) -> str:
        """Registry name and row label, e.g. "megatron_1f1b"."""
        ...

    @property
    def native_transport(self) -> str:
        """Transport of this system in the `native` view: "nccl", "deepep" or "m2n_rdma"."""
        ...

    def candidates(self, problem: Problem) -> Iterable[Candidate]:
        """The search space, in a fixed order. Raises NotApplicable with the reason.

        A candidate may carry an integer "tier": the tuner looks at a higher tier
        only when nothing of the lower ones fits in memory.
        """
        ...

    def refinements(self, problem: Problem, candidate: Candidate) -> Iterable[Candidate]:
        """Variations of a good candidate, tried in a second round (may be empty)."""
        ...

    def layout(self, problem: Problem, candidate: Candidate) -> Layout:
        """Place one candidate on the cluster. Raises NotApplicable where it cannot be placed."""
        ...

    def program(self, problem: Problem, layout: Layout) -> Program:
        """The ordered operations of a layout."""
        ...
