"""`python -m bench.crosscheck`: does real execution agree with the simulator?

    python -m bench.crosscheck model=qwen3 seq=8k
    python -m bench.crosscheck model=qwen3 seq=8k processes=4
    python -m bench.crosscheck model=gpt_oss seq=8k switches=all

runs the cut of every system's plan on 4 and on 8 processes and simulates the very
same cut with the same durations. Decides what agreement means: the limits below.
The best of three repeats counts; a system beyond a limit gets one more try, since
other work on the machine can only make it slower (it is recorded). As a negative
control one cut is run with overlap forbidden: it must come out slower by what its
simulation says. `switches=` (all, or a list) runs switches of disagmoe_plus instead
of systems, each on with all others off, in a plan of its form (`switches.py`).
Takes the settings of `python -m bench`. Exit status 1: no agreement, 2: a mistake in
the command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.command import configuration, run_command
from bench.config import EMULATED_PROCESSES, RunConfig
from bench.evaluate import cost_model
from bench.identity import directory_name, identify, plain
from bench.machine import machine
from bench.publish import locked, publish
from bench.results import run_block
from bench.side_by_side import in_order
from bench.switches import DURATIONS, read_switches
from disagmoe.systems.disagmoe_plus import SWITCHES

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
    shows: str = ""
    """Of a switch of `disagmoe_plus`: what its cut shows of it."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The full-size plan in words."""
    cut: Mapping[str, Any] = field(default_factory=dict)
    """The sizes of its cut."""

    @property
    def label(self) -> str:
        name = f"{self.system} ({self.variant})" if self.variant else self.system
        return f"{name}, no overlap" if self.control else name

    def error(self, what: str) -> float:
        """(emulated - simulated) of a time, as a share of the simulated step."""
        return (self.emulated[what] - self.simulated[what]) / self.simulated["step_time_s"]

    @property
    def counts(self) -> bool:
        """Whether agreement says anything: not where the Program is that without the switch."""
        return self.shows != DURATIONS

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
    there = [check for check in checks if check.processes == processes and check.counts]
    mine = [check for check in there if not check.control]
    on = f"{processes} processes"
    if not mine:
        yield Verdict(f"{on}: what ran and counts", "nothing", False)
        return
    errors = [abs(check.error("step_time_s")) for check in mine]
    exposed = [abs(check.error("exposed_comm_s")) for check in mine]
    for what, found, most in (
        ("mean error of the step", sum(errors) / len(errors), MEAN_STEP_ERROR),
        ("largest error of the step", max(errors), MOST_STEP_ERROR),
        ("largest error of exposed communication, of the step", max(exposed), MOST_EXPOSED_ERROR),
    ):
        yield Verdict(f"{on}: {what} at most {100 * most:g} %", f"{100 * found:.1f} %", found <= most)
    systems = [check for check in mine if not check.shows]
    if systems:
        swapped = swaps(systems)
        yield Verdict(f"{on}: same ranking of the systems", ", ".join(swapped) or "same", not swapped)
    yield from (_control(check, mine) for check in there if check.control)


def _control(check: Check, others: Sequence[Check]) -> Verdict:
    """Whether a cut without overlap is slower than the same cut with it by what the simulation says."""
    key = (check.system, check.variant, check.view)
    plain_run = next(c for c in others if (c.system, c.variant, c.view) == key)
    slower = check.emulated["step_time_s"] / plain_run.emulated["step_time_s"]
    expected = check.simulated["step_time_s"] / plain_run.simulated["step_time_s"]
    return Verdict(
        f"{check.processes} processes: {check.label} is slower by what its simulation says, "
        f"± {100 * MOST_CONTROL_ERROR:g} %",
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


def run_checks(
    config: RunConfig, counts: Sequence[int], switches: Sequence[str] = (), say: Any = print
) -> tuple[list[Check], list[str]]:
    """Every system, or every switch named, on every number of processes; in words what could not be run as it is."""
    from bench.checked import checked, cuts, planned, planned_switch  # torch is slow to load
    from bench.emulated import memory_notes

    costs = cost_model(config)
    plan: Any = planned_switch if switches else planned
    asked = [(view, name) for view in config.views for name in switches or config.systems]
    say(f"planning {len(asked)} {'switches' if switches else 'systems'}")
    found = [
        one for group in in_order([partial(plan, config, costs, name, view) for view, name in asked]) for one in group
    ]
    checks: list[Check] = []
    left_out = memory_notes([one.row for one in found])
    for processes in counts:
        made, reasons = cuts(config, costs, found, processes)
        left_out += [f"{processes} processes: {reason}" for reason in reasons]
        control = next((name for name in CONTROLS if any(one.row["system"] == name for one in made)), None)
        for one in made:
            for forbidden in (False, True) if one.row["system"] == control else (False,):
                check = checked(config, one, processes, forbidden=forbidden)
                error = 100 * check.error("step_time_s")
                say(f"{processes} processes: {check.label}: step {error:+.1f} % of the simulated one")
                checks.append(check)
            control = None if one.row["system"] == control else control
    return checks, left_out


def conduct(config: RunConfig, command: Sequence[str], switches: Sequence[str] = ()) -> tuple[Path, bool]:
    """Run, judge, write and print; the directory, and whether every limit holds."""
    from bench.report.crosscheck import markdown, write_csv, write_parity

    identity = identify(config)
    counts = (config.processes,) if config.processes else EMULATED_PROCESSES
    checks, left_out = run_checks(config, counts, switches, lambda line: print(line, flush=True))
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
    what = ["crosscheck", *([] if not switches else ["switches"] if switches == SWITCHES else switches)]
    target = config.results_dir / f"{'_'.join(what)}_{directory_name(config, identity.run_id)}"

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
    switches = [value for key, _, value in (argument.partition("=") for argument in given) if key == "switches"]
    settings = [argument for argument in given if argument.partition("=")[0] != "switches"]
    asked = read_switches(switches[-1]) if switches else ()
    config = configuration(["backend=emulate", *settings])
    if config.backend != "emulate":
        raise ValueError(f"backend={config.backend}: a cross-check emulates; allowed: emulate")
    machine(gpus=False)
    return conduct(config, ("python", "-m", "bench.crosscheck", *given), asked)[1]


if __name__ == "__main__":
    sys.exit(main())
