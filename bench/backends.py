"""What runs the plans of a run: the simulator alone, or real processes as well.

Decides the seam between planning and running. Every system is tuned, verified and
simulated first, whatever runs its plan; a backend then takes all rows at once, since
it needs the machine to itself, and hands back rows in the same form. A row it
cannot run becomes `failed` or `not_applicable` with the reason; the others still run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from baselines.native.peers import require_some
from bench.config import RunConfig
from bench.machine import machine
from disagmoe.cost.model import CostModel

if TYPE_CHECKING:
    from bench.evaluate import Outcome, Row

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Executed:
    """What a backend made of the simulated rows, in their order (a row may have become several).

    `layers` is the depth that ran where it was not the model's. `execution` goes
    into the record of the run: what ran on which machine.
    """

    rows: list[Row]
    outcomes: list[Outcome]
    notes: list[str] = field(default_factory=list)
    layers: int | None = None
    execution: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """Runs plans on this machine."""

    def run(
        self, config: RunConfig, costs: CostModel, simulated: Sequence[tuple[Row, Outcome]], progress: Progress
    ) -> Executed:
        """Run every row that has a plan. `costs` priced them."""
        ...


RUNNERS = {"emulate": ("bench.emulated", "Emulated"), "measure": ("bench.measured", "Measured")}
"""Module and class of every backend; loaded only where it is asked for: torch is slow to load and may be absent."""


def backend_of(config: RunConfig) -> Backend | None:
    """What runs the plans of a configuration; None where simulating them was all. Raises ValueError without torch."""
    if config.backend == "simulate":
        return None
    machine(gpus=config.backend == "measure")
    if config.impl != "equivalent":
        require_some(config.systems)
    module, name = RUNNERS[config.backend]
    return cast(Backend, getattr(import_module(module), name)())
