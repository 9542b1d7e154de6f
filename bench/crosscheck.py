"""`python -m bench.crosscheck`: does real execution agree with the simulator?

    python -m bench.crosscheck model=qwen3 seq=8k
    python -m bench.crosscheck model=qwen3 seq=8k processes=4

runs the cut of every system's plan on 4 and on 8 processes and simulates the very
same cut with the same durations. Decides what agreement means: the limits below.
The best of three repeats counts; a system beyond a limit gets one more try, since
other work on the machine can only make it slower (it is recorded). As a negative
control one cut is run with overlap forbidden: it must come out slower by what its
simulation says. Takes the settings of `python -m bench`. Exit status 1: no
agreement, 2: a mistake in the command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.command import configuration, run_command
from bench.config import EMULATED_PROCESSES, RunConfig
from bench.evaluate import cost_model, run_system
from bench.identity import directory_name, identify, plain
from bench.machine import machine
from bench.publish import locked, publish
from bench.results import run_block
from bench.side_by_side import in_order

MEAN_STEP_ERROR, MOST_STEP_ERROR = 0.04, 0.08
"""Of the simulated step, over all systems."""
MOST_EXPOSED_ERROR = 0.05
"""Of the simulated step."""
MOST_CONTROL_ERROR = 0.05
"""Of the simulated step without overlap."""
TIE = 0.01
"""Systems whose simulated times are closer than this are not ranked against each other."""
CONTROLS = ("disagmoe", "dualpipe", "megatron_1f1b_overlap")
"""The first of these that runs is run without overlap as well."""


@dataclass(frozen=True)
class Check:
    """One cut, simulated and emulated. Times in seconds at full size; `per_token_s` in GPU-seconds."""

    system: str
    variant: str
    view: str
    processes: int
    simulated: dict[str, float]
    emulated: dict[str, float]
    simulated_per_token_s: float
    emulated_per_token_s: float
    spread: float
    tries: int
    dilation: float
    late_share: float
    own_load: float
    foreign_load: float | None
    control: bool = False

    @property
    def label(self) -> str:
        name = f"{self.system} ({self.variant})" if self.variant else self.system
        return f"{name}, no overlap" if self.control else name

    def error(self, what: str) -> float:
        """(emulated - simulated) of a time, as a share of the simulated step."""
        return (self.emulated[what] - self.simulated[what]) / self.simulated["step_time_s"]

    @property
    def good(self) -> bool:
        step = MOST_CONTROL_ERROR if self.control else MOST_STEP_ERROR
        return abs(self.error("step_time_s")) <= step and abs(self.error("exposed_comm_s")) <= MOST_EXPOSED_ERROR


@dataclass(frozen=True)
class Verdict:
    """One limit: what was found, what is allowed, whether it holds."""

    limit: str
    found: str
    holds: bool


def verdicts(checks: Sequence[Check]) -> list[Verdict]:
    """Every limit, for each number of processes."""
    return [verdict for count in sorted({c.processes for c in checks}) for verdict in _verdicts(checks, count)]


def _verdicts(checks: Sequence[Check], processes: int) -> Iterator[Verdict]:
    mine = [check for check in checks if check.processes == processes and not check.control]
    controls = [check for check in checks if check.processes == processes and check.control]
    on = f"{processes} processes"
    if not mine:
        yield Verdict(f"{on}: systems that ran", "none", False)
        return
    errors = [abs(check.error("step_time_s")) for check in mine]
    exposed = [abs(check.error("exposed_comm_s")) for check in mine]
    for what, found, most in (
        ("mean error of the step", sum(errors) / len(errors), MEAN_STEP_ERROR),
        ("largest error of the step", max(errors), MOST_STEP_ERROR),
        ("largest error of exposed communication, of the step", max(exposed), MOST_EXPOSED_ERROR),
    ):
        yield Verdict(f"{on}: {what} at most {100 * most:g} %", f"{100 * found:.1f} %", found <= most)
    swapped = swaps(mine)
    yield Verdict(f"{on}: same ranking of the systems", ", ".join(swapped) or "same", not swapped)
    for check in controls:
        plain_run = next(c for c in mine if (c.system, c.variant, c.view) == (check.system, check.variant, check.view))
        slower = check.emulated["step_time_s"] / plain_run.emulated["step_time_s"]
        expected = check.simulated["step_time_s"] / plain_run.simulated["step_time_s"]
        yield Verdict(
            f"{on}: {check.label} is slower by what its simulation says, ± {100 * MOST_CONTROL_ERROR:g} %",
            f"{slower:.2f}× emulated, {expected:.2f}× simulated, step {100 * check.error('step_time_s'):+.1f} %",
            abs(check.error("step_time_s")) <= MOST_CONTROL_ERROR and slower > 1.0,
        )


def swaps(checks: Sequence[Check]) -> list[str]:
    """Pairs that the emulation ranks the other way round, ties left out."""
    found = []
    for view in dict.fromkeys(check.view for check in checks):
        shown = [check for check in checks if check.view == view]
        for a, b in combinations(sorted(shown, key=lambda check: check.simulated_per_token_s), 2):
            apart = b.simulated_per_token_s > (1.0 + TIE) * a.simulated_per_token_s
            if apart and b.emulated_per_token_s < a.emulated_per_token_s:
                found.append(f"{b.label} before {a.label}")
    return found


def run_checks(config: RunConfig, counts: Sequence[int], say: Any = print) -> tuple[list[Check], list[str]]:
    """Every system on every number of processes, and in words what could not be run as it is."""
    from bench.checked import checked, cuts  # torch is slow to load
    from bench.emulated import memory_notes

    costs = cost_model(config)
    asked = [(view, name) for view in config.views for name in config.systems]
    say(f"planning {len(config.systems)} systems")
    planned = [
        pair
        for pairs in in_order([partial(_planned, config, costs, name, view) for view, name in asked])
        for pair in pairs
    ]
    checks: list[Check] = []
    left_out = memory_notes([row for row, _ in planned])
    for processes in counts:
        made, reasons = cuts(config, costs, planned, processes)
        left_out += [f"{processes} processes: {reason}" for reason in reasons]
        control = next((name for name in CONTROLS if any(row["system"] == name for row, _ in made)), None)
        for row, cut in made:
            for forbidden in (False, True) if row["system"] == control else (False,):
                check = checked(config, row, cut, processes, forbidden=forbidden)
                error = 100 * check.error("step_time_s")
                say(f"{processes} processes: {check.label}: step {error:+.1f} % of the simulated one")
                checks.append(check)
            control = None if row["system"] == control else control
    return checks, left_out


def _planned(config: RunConfig, costs: Any, name: str, view: str) -> list[Any]:
    return list(run_system(config, costs, name, view))


def conduct(config: RunConfig, command: Sequence[str]) -> tuple[Path, bool]:
    """Run, judge, write and print; the directory, and whether every limit holds."""
    from bench.report.crosscheck import markdown, write_csv, write_parity

    identity = identify(config)
    counts = (config.processes,) if config.processes else EMULATED_PROCESSES
    checks, left_out = run_checks(config, counts, lambda line: print(line, flush=True))
    found = verdicts(checks)
    title = f"{config.model.title}, seq {config.workload.seq:,}, at the pace of {config.cluster.name}"
    text = markdown(title, checks, found, left_out, asdict(machine(gpus=False)))
    record = {
        "schema": "disagmoe.crosscheck/1",
        "run": run_block(identity, command, config.tag),
        "machine": machine(gpus=False),
        "checks": [{**asdict(check), "step_error": check.error("step_time_s")} for check in checks],
        "verdicts": found,
        "left_out": left_out,
    }
    target = config.results_dir / f"crosscheck_{directory_name(config, identity.run_id)}"

    def build(directory: Path) -> None:
        (directory / "crosscheck.json").write_text(json.dumps(plain(record), indent=1, allow_nan=False) + "\n")
        (directory / "crosscheck.md").write_text(text, encoding="utf-8")
        write_csv(directory / "crosscheck.csv", checks)
        write_parity(directory, title, checks)

    config.results_dir.mkdir(parents=True, exist_ok=True)
    with locked(config.results_dir, identity.run_id):
        publish(target, identity.run_id, build)
    print(f"\n{text}\nresults: {target}", flush=True)
    return target, bool(found) and all(verdict.holds for verdict in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer a command line; returns the exit status."""
    return run_command(__doc__, arguments, _check_all)


def _check_all(given: list[str]) -> bool:
    config = configuration(["backend=emulate", *given])
    if config.backend != "emulate":
        raise ValueError(f"backend={config.backend}: a cross-check emulates; allowed: emulate")
    machine(gpus=False)
    return conduct(config, ("python", "-m", "bench.crosscheck", *given))[1]


if __name__ == "__main__":
    sys.exit(main())
