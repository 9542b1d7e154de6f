"""Every switch of `disagmoe_plus` alone in a cut: what stands for it, and that the cut shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench.checked
from bench.checked import Planned, cuts
from bench.crosscheck import main
from bench.cut import CutPlan, make_cut
from bench.emulation import Ran, run_cut
from bench.evaluate import Outcome
from bench.switches import DURATIONS, GROUPS, ORDER, TOGETHER, UNDONE, Switched, read_switches, same_program
from disagmoe.allocator import Tuned
from disagmoe.ops import Kind, Phase
from disagmoe.plan.plan import Plan
from disagmoe.plan.program import COLUMNS, Program
from disagmoe.runtime.emulate import EmulatedStep
from disagmoe.runtime.pacing import Pace
from disagmoe.simulator import simulate
from disagmoe.system import Candidate, NotApplicable, Problem, Variant
from disagmoe.systems.disagmoe_plus import SWITCHES
from tests.bench.helpers import config
from tests.bench.test_cut import problem

SHOWN = {
    "spread_head": ORDER,
    "split_backward": ORDER,
    "look_ahead": ORDER,
    "free_groups": GROUPS,
    "balanced_map": ORDER,
    "shared_nodes": DURATIONS,
    "other_depths": GROUPS,
    "early_gather": ORDER,
    "hybrid": TOGETHER,
}


@cache
def there() -> Problem:
    """A model with windowed and full attention in turn, as a balanced map needs."""
    return problem("gpt_oss", layers=12)


@cache
def first(switch: str) -> tuple[Switched, Plan, Candidate]:
    """The first plan that shows a switch."""
    system = Switched(switch)
    for candidate in system.candidates(there()):
        try:
            layout = system.layout(there(), candidate)
            return system, Plan(layout, system.program(there(), layout)), candidate
        except NotApplicable:
            continue
    raise AssertionError(switch)


def cut_of(switch: str, processes: int, **changes: str | int) -> CutPlan:
    """The cut of that plan, or of one with some choices changed."""
    system, _, candidate = first(switch)
    candidate = {**candidate, **changes}
    return make_cut(system, there(), system.layout(there(), candidate), candidate, processes)


def workers_of(program: Program, kind: Kind) -> set[int]:
    return set(program.worker[program.kind == int(kind)].tolist())


def ranks_of(cut: CutPlan) -> dict[str, list[int]]:
    workers = cut.plan.layout.placement.workers
    return {pool: [w.gpus for w in workers if w.pool == pool] for pool in {w.pool for w in workers}}


def rows_of(program: Program) -> list[tuple[int, ...]]:
    return sorted(zip(*(getattr(program, name).tolist() for name in COLUMNS if name != "pair"), strict=True))


def test_switches_are_named_in_any_order() -> None:
    assert read_switches("all") == SWITCHES == tuple(UNDONE)
    assert read_switches("[hybrid, spread_head]") == ("spread_head", "hybrid")
    with pytest.raises(
        ValueError, match=r"switches=hybrid,nope: no switch 'nope'; allowed: all, or any of spread_head"
    ):
        read_switches("hybrid,nope")
    with pytest.raises(ValueError, match="no switch 'all'"):
        read_switches("all,hybrid")


@pytest.mark.parametrize("processes", [4, 8])
@pytest.mark.parametrize("switch", SWITCHES)
def test_the_cut_of_every_switch_shows_it(switch: str, processes: int) -> None:
    system, cut = first(switch)[0], cut_of(switch, processes)
    assert cut.plan.layout.placement.gpus_used == processes
    assert system.shown(there(), cut, processes) == SHOWN[switch]
    assert simulate(cut.plan.program, cut.pricing).step_s > 0.0


def test_what_is_seen_of_each_switch_in_its_program() -> None:
    spread = cut_of("spread_head", 4).plan.program
    assert workers_of(spread, Kind.HEAD) == {2, 3}
    assert workers_of(spread, Kind.P2P) == {2, 3}
    split = cut_of("split_backward", 4).plan.program
    experts = split.kind == int(Kind.FFN)
    assert set(split.phase[experts].tolist()) >= {int(Phase.I), int(Phase.W)}
    assert int(Phase.B) not in split.phase[experts]
    balanced = cut_of("balanced_map", 4).plan.layout.placement.attn
    assert balanced != tuple(layer % 2 for layer in range(8))
    full = [layer for layer in range(8) if there().model.window(layer) is None]
    assert {balanced.count(0), balanced.count(1)} == {4}
    assert {sum(balanced[layer] == group for layer in full) for group in (0, 1)} == {len(full) // 2}
    early = cut_of("early_gather", 4).plan.program
    gathers = np.flatnonzero((early.kind == int(Kind.GRAD_SYNC)) & (early.phase == int(Phase.F)))
    assert sorted(set(early.layer[gathers].tolist())) == [-1, *range(8)]
    assert set(ranks_of(cut_of("hybrid", 4))) == {"AF"}


def test_a_window_only_changes_the_order() -> None:
    cut, without = cut_of("look_ahead", 4), cut_of("look_ahead", 4, rows=0)
    assert not same_program(cut.plan.program, without.plan.program)
    assert rows_of(cut.plan.program) == rows_of(without.plan.program)


def test_groups_of_a_cut_are_in_proportion() -> None:
    assert first("free_groups")[2]["n"] == 8
    assert ranks_of(cut_of("free_groups", 4)) == {"A": [1, 1], "F": [1, 1]}
    assert ranks_of(cut_of("free_groups", 8)) == {"A": [1] * 4, "F": [1] * 4}
    large: dict[str, str | int] = {"p": 2, "dp": 1, "m": 32, "n": 32, "nics": "halves", "group": 8}
    assert ranks_of(cut_of("free_groups", 8, **large)) == {"A": [4], "F": [4]}
    with pytest.raises(NotApplicable, match="needs 8 processes: groups of 32 experts' GPUs are 4 ranks where 16 are 2"):
        cut_of("free_groups", 4, **large)
    depths: dict[bool, CutPlan] = {}
    system = Switched("other_depths")
    for candidate in system.candidates(there()):
        deeper = int(candidate["p_f"]) > int(candidate["p"])
        if deeper not in depths:
            depths[deeper] = make_cut(system, there(), system.layout(there(), candidate), candidate, 8)
    assert ranks_of(depths[True]) == {"A": [4], "F": [2, 2]}
    assert ranks_of(depths[False]) == {"A": [2, 2], "F": [4]}
    assert depths[False].sizes == {"p": 2, "F groups": 1, "A:F": "2:4"}


def test_a_cut_that_shows_nothing_is_told_and_not_run() -> None:
    """A plan whose backwards are whole says nothing of split ones."""
    system, plan, candidate = first("split_backward")
    whole = {**candidate, "put_off": -1}
    tuned = Tuned("ok", "", whole, Plan(system.layout(there(), whole), plan.program), 1.0, 1.0, ())
    row = {"system": "disagmoe_plus", "variant": "split_backward", "view": "native", "status": "ok", "reason": ""}
    one = Planned(row, Outcome(None, None, tuned), Variant("split_backward", system), 1)
    run = replace(config(backend="emulate"), model=there().model, cluster=there().cluster, workload=there().workload)
    made, reasons = cuts(run, there().costs, [one], 4)
    assert not made
    assert reasons == [
        "native view, disagmoe_plus (split_backward): "
        "no difference in this cut: it is the same with and without the switch"
    ]


def stand_in(slower: float) -> Callable[..., Ran]:
    """Runs of cuts that start no process."""

    def run(cut: CutPlan, processes: int, repeats: int, **options: Any) -> Ran:
        simulated = simulate(cut.plan.program, cut.pricing)
        times = {name: slower * getattr(simulated, name) for name in ("start_s", "end_s", "post_s")}
        slow = replace(simulated, **times, origin="emulated")
        return Ran(cut, Pace(2.0, 1e-6), simulated, [EmulatedStep(slow, 3.0, 0.0, 0.0, 0.5, None)] * repeats)

    return run


def test_the_command_runs_the_switches_that_mean_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.checked, "run_cut", stand_in(1.02))
    settings = ["model=tiny", "cluster=laptop", "seq=512", "batch=32", "ep=2", f"results_dir={tmp_path}"]
    assert main([*settings, "switches=look_ahead,balanced_map,early_gather", "processes=4"]) == 0
    (directory,) = tmp_path.glob("crosscheck_look_ahead_balanced_map_early_gather_*")
    record = json.loads((directory / "crosscheck.json").read_text())
    assert [check["variant"] for check in record["checks"]] == ["look_ahead", "early_gather"]
    assert all(check["step_error"] == pytest.approx(0.02) for check in record["checks"])
    assert [verdict["holds"] for verdict in record["verdicts"]] == [True] * 3
    (reason,) = record["left_out"]
    assert reason.startswith("4 processes: native view, disagmoe_plus (balanced_map): not applicable: ")
    page = (directory / "crosscheck.md").read_text()
    assert "differs in" in page and "## What was cut" in page


@pytest.mark.slow
@pytest.mark.parametrize("processes", [4, 8])
@pytest.mark.parametrize("switch", SWITCHES)
def test_the_cut_of_every_switch_runs_on_real_processes(switch: str, processes: int) -> None:
    """No machine, however busy, makes a step or an operation shorter than modelled without contention."""
    cut = cut_of(switch, processes)
    one = np.ones_like(cut.pricing.slows_compute)
    alone = replace(cut.pricing, slows_compute=one, slowed_by_compute=one)
    most = simulate(cut.plan.program, cut.pricing).step_s
    least = simulate(cut.plan.program, alone).step_s
    wall_s = 2.0 if processes == 4 else 4.0
    ran = run_cut(cut, processes, 1, warm_ups=0, pace=Pace(dilation=wall_s / most, slack_s=100.0 * most))
    timeline = ran.best.timeline
    assert timeline.step_s > 0.95 * least
    assert np.all(timeline.end_s - timeline.start_s >= 0.95 * alone.duration_s)
    assert ran.best.late_share == 0.0
