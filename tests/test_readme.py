"""The README: its commands run, its lists are complete, its numbers come from the committed example."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from bench.example import BEGIN, END, headline, replace_block
from disagmoe.specs import cluster_names, load_cluster, model_names

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "results" / "example"


def commands() -> list[str]:
    """Every command line the README shows, in code blocks and in the table."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if not language]
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`((?:make|\.venv/bin/python) [^`]*)`", README)
    return sorted({line.split(" #")[0].strip() for line in lines if line.strip()})


MAKE = [c for c in commands() if c.startswith("make ")]
BENCH = [c for c in commands() if c.startswith(".venv/bin/python -m bench ")]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("command", MAKE)
def test_make_targets_exist(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_is_known_to_this_test() -> None:
    others = {".venv/bin/python -m bench.collect"}
    assert MAKE
    assert BENCH
    assert {c for c in commands() if c not in MAKE and c not in BENCH} == others


@pytest.mark.slow
@pytest.mark.parametrize("command", BENCH)
def test_bench_commands_run(command: str, tmp_path: Path) -> None:
    # Two systems are enough to see that the command runs, and all of them take minutes.
    quicker = [f"results_dir={tmp_path}", "artifacts=tables", "systems=[disagmoe]"]
    arguments = [sys.executable, *shlex.split(command)[1:], *quicker]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    runs = list(tmp_path.glob("*/results.json"))
    assert len(runs) == (12 if " -m " in command.replace("-m bench", "", 1) else 1)
    for run in runs:
        assert all(row["status"] in ("ok", "oom") for row in json.loads(run.read_text())["rows"])


def test_lists_of_models_and_clusters_are_complete() -> None:
    for kind, names in (("Models: ", model_names()), ("Clusters: ", cluster_names())):
        text = README[README.index(kind) :].split("\n\n")[0].split(". ")[0]
        listed = set(re.findall(r"`([a-z0-9_]+)`", text))
        assert listed == set(names), kind


def test_the_cluster_of_the_readme_loads(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "my_cluster.yaml"
    path.write_text(text)
    cluster = load_cluster(str(path))
    assert (cluster.gpus, cluster.nodes, cluster.nic_gbs_per_gpu()) == (128, 16, 50.0)


def test_headline_table_is_the_committed_example() -> None:
    block = README.split(BEGIN)[1].split(END)[0].strip()
    assert block == headline(pd.read_csv(EXAMPLE / "summary.csv"))
    assert replace_block(README, block) == README


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_reading_order_exists() -> None:
    for path in re.findall(r"`((?:disagmoe|bench|docs|examples|conf)/[\w./-]*)`", README):
        assert (ROOT / path).exists(), path
