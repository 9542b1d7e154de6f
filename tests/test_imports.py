"""The arrows between the packages, and what a light import may not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "hydra", "omegaconf", "matplotlib", "pandas", "bench", "baselines")


def loaded_by(module: str) -> set[str]:
    """Top-level modules in memory after importing `module` in a fresh process."""
    script = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "disagmoe.specs",
        "disagmoe.cost",
        "disagmoe.plan",
        "disagmoe.timeline",
        "disagmoe.simulator",
        "disagmoe.allocator",
        "disagmoe.systems",
    ],
)
def test_the_core_loads_neither_torch_nor_hydra_nor_what_stands_above_it(module: str) -> None:
    assert loaded_by(module).isdisjoint(HEAVY)


def test_baselines_load_neither_torch_nor_hydra() -> None:
    assert loaded_by("baselines").isdisjoint({"torch", "hydra", "omegaconf", "matplotlib", "bench"})


def test_the_command_loads_no_torch() -> None:
    assert "torch" not in loaded_by("bench.cli, bench.evaluate, bench.report")


def test_import_contracts() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
