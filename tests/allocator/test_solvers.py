"""What is believed of a solver, and what happens when there is none."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import pulp
import pytest

from disagmoe.allocator import engines, solvers
from disagmoe.allocator.solvers import (
    Infeasible,
    IntegerProgram,
    NoAnswer,
    Settings,
    SolverError,
    SolverMissing,
    Unbounded,
    whole,
)

PROGRAMS = [
    pytest.param("cbc"),
    pytest.param("highs", marks=pytest.mark.skipif(not solvers.installed("highs"), reason="highspy is not installed")),
]


def two_pools() -> IntegerProgram:
    """8 GPUs in two pools with a step of max(3 a, 5 f): 5 and 3 give 15."""
    program = IntegerProgram()
    for name in ("gpu-attn", "gpu attn"):
        program.whole(name, 0, 10)
    program.real("T")
    program.row([("gpu-attn", 1), ("gpu attn", 1)], "==", 8)
    program.row([("gpu-attn", 3.0), ("T", -1)], "<=", 0)
    program.row([("gpu attn", 5.0), ("T", -1)], "<=", 0)
    return program


@pytest.mark.parametrize(
    ("value", "expected"), [(2.9999999, 3), (5.0000001, 5), (1e-8, 0), (0.9999999, 1), (-1e-9, 0), (4.0, 4)]
)
def test_almost_whole_is_whole(value: float, expected: int) -> None:
    assert whole(value, "gpus") == expected


@pytest.mark.parametrize("value", [2.4, 0.5, 1.0 - 2e-5, float("nan"), float("inf")])
def test_not_whole_is_an_error(value: float) -> None:
    with pytest.raises(SolverError, match=r"gpus = .* not integral"):
        whole(value, "gpus")


def answers_with(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """Let the solver say that x0, x1, ... have these values."""

    def engine(problem: pulp.LpProblem, settings: Settings, where: Path, name: str) -> engines.Outcome:
        return engines.Outcome("optimal", {f"x{i}": value for i, value in enumerate(values)}, 0.0)

    monkeypatch.setattr(engines, "cbc", engine)


def test_solution_is_rounded_and_its_sums_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers_with(monkeypatch, 4.9999999, 3.0000001, 15.0)
    answer = two_pools().minimise([("T", 1)], Settings("cbc"))
    assert answer.counts == {"gpu-attn": 5, "gpu attn": 3}
    answers_with(monkeypatch, 4.9999999, 2.0000001, 15.0)
    with pytest.raises(SolverError, match="after rounding, 1 of its rows do not hold"):
        two_pools().minimise([("T", 1)], Settings("cbc"))
    answers_with(monkeypatch, 5.6, 2.4, 15.0)
    with pytest.raises(SolverError, match=r"gpu-attn = 5\.6, which is not integral"):
        two_pools().minimise([("T", 1)], Settings("cbc"))


@pytest.mark.parametrize("solver", PROGRAMS)
class TestPrograms:
    def test_names_alike_to_a_solver_stay_apart(self, solver: str) -> None:
        answer = two_pools().minimise([("T", 1)], Settings(solver))
        assert answer.counts == {"gpu-attn": 5, "gpu attn": 3}
        assert answer.values["T"] == pytest.approx(15.0)
        assert answer.proven
        assert answer.solver == solver

    def test_infeasible_and_unbounded_are_typed(self, solver: str) -> None:
        program = two_pools()
        program.row([("gpu-attn", 1)], ">=", 9)
        with pytest.raises(Infeasible, match=solver):
            program.minimise([("T", 1)], Settings(solver))
        endless = IntegerProgram()
        endless.real("T")
        endless.whole("k", 0, 3)
        endless.row([("T", 1), ("k", 1)], ">=", 1)
        with pytest.raises(Unbounded, match=solver):
            endless.minimise([("T", -1)], Settings(solver))

    def test_nothing_is_printed_warned_or_left(
        self, solver: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        work_tree, temporary = tmp_path / "tree", tmp_path / "tmp"
        work_tree.mkdir()
        temporary.mkdir()
        monkeypatch.chdir(work_tree)
        monkeypatch.setattr(solvers.tempfile, "tempdir", str(temporary))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            two_pools().minimise([("T", 1)], Settings(solver))
        print("ours")
        assert capfd.readouterr() == ("ours\n", "")
        assert not list(work_tree.iterdir())
        assert not list(temporary.iterdir())

    def test_thread_count_may_change_between_solves(self, solver: str) -> None:
        for threads in (1, 2, 1):
            assert two_pools().minimise([("T", 1)], Settings(solver, threads=threads)).counts["gpu-attn"] == 5

    def test_hardly_any_time(self, solver: str) -> None:
        program = IntegerProgram()
        for i in range(60):
            program.whole(i, 0, 1)
        # 29 of 60 odd weights with a given sum: too hard to end at once.
        program.row([(i, float(2 * i * i + 3)) for i in range(60)], "==", 35001.0)
        program.row([(i, 1.0) for i in range(60)], "==", 29.0)
        costs = [float((i * 37) % 101) for i in range(60)]
        try:
            answer = program.minimise(list(enumerate(costs)), Settings(solver, time_limit_s=1e-3))
        except NoAnswer as reason:
            line = str(reason)
        else:
            objective = sum(costs[i] * answer.counts[i] for i in range(60))
            line = "" if answer.proven or answer.bound <= objective + 1e-6 else "bound above the objective"
        assert line in ("", f"{solver}: no feasible point within 0.001 s; allow more time or another solver")


def stub(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_program_that_is_missing_or_broken_is_one_line_that_names_it(tmp_path: Path) -> None:
    broken = stub(tmp_path / "broken", "exit 1")
    not_executable = tmp_path / "plain"
    not_executable.write_text("")
    for path in (tmp_path / "none", broken, not_executable):
        with pytest.raises(SolverMissing) as caught:
            two_pools().minimise([("T", 1)], Settings(f"cbc:{path}"))
        line = str(caught.value)
        assert f"solver cbc:{path}" in line
        assert "choose another with solver=auto" in line
        assert "\n" not in line


def test_a_program_that_writes_nothing_is_missing_too(tmp_path: Path) -> None:
    with pytest.raises(SolverMissing, match="silent"):
        two_pools().minimise([("T", 1)], Settings(f"cbc:{stub(tmp_path / 'silent', 'exit 0')}"))


def test_auto_takes_the_next_one_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engines, "pulp_cbc_path", str(stub(tmp_path / "cbc", "exit 1")))
    if solvers.installed("highs"):
        answer = two_pools().minimise([("T", 1)], Settings())
        assert answer.solver == "highs"
        assert len(answer.skipped) == 1
        assert "solver cbc" in answer.skipped[0]
    monkeypatch.setitem(__import__("sys").modules, "highspy", None)
    with pytest.raises(SolverMissing, match=r"solver cbc: .*; solver highs: .*pip install highspy"):
        two_pools().minimise([("T", 1)], Settings())


def test_cbc_on_the_path_is_used_where_pulp_brings_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundled = engines.pulp_cbc_path
    (tmp_path / "cbc").symlink_to(Path(bundled).resolve())
    monkeypatch.setattr(engines, "pulp_cbc_path", str(tmp_path / "gone"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert two_pools().minimise([("T", 1)], Settings("cbc")).solver == "cbc"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SolverMissing, match="cbc is not there"):
        two_pools().minimise([("T", 1)], Settings("cbc"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"solver": "glpk"}, "unknown solver 'glpk': choose solver=auto"),
        ({"time_limit_s": 0.0}, "time limit"),
        ({"threads": 0}, "at least 1 thread"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**changes)  # type: ignore[arg-type]


def test_a_variable_is_declared_once() -> None:
    program = IntegerProgram()
    program.whole("k", 0, 1)
    with pytest.raises(ValueError, match="'k' is there already"):
        program.real("k")
