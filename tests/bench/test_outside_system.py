"""A baseline from outside the tree: found by its entry point, tuned, tabulated."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from disagmoe.ops import Kind, Op, Phase, Stream
from disagmoe.plan.program import Program, Row
from disagmoe.plan.verify import verify

ROOT = Path(__file__).resolve().parents[2]


def installed_template(site: Path) -> None:
    """What pip leaves behind for the template: its module and its entry point."""
    shutil.copy(ROOT / "examples/plain_1f1b/plain_1f1b.py", site)
    info = site / "plain_1f1b-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-1f1b\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[disagmoe.systems]\nplain_1f1b = plain_1f1b:Plain1F1B\n")


def run_bench(site: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, "-m", "bench", "model=tiny", "cluster=h800_64", "seq=4k", "artifacts=tables", *overrides]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_template_shows_up_in_the_table(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    installed_template(site)
    done = run_bench(site, "systems=[plain_1f1b,disagmoe]", f"results_dir={tmp_path / 'out'}", "transport=native")
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").glob("tiny_4096_simulate_*/results.json")
    rows = {row["system"]: row for row in json.loads(results.read_text())["rows"]}
    assert set(rows) == {"megatron_1f1b", "plain_1f1b", "disagmoe"}
    assert rows["plain_1f1b"]["status"] == "ok"
    assert rows["plain_1f1b"]["plan"]["virtual_stages"] == 1
    # Its search space is part of the reference's, so it cannot be the faster one.
    assert rows["plain_1f1b"]["speedup"] <= 1.0
    assert "plain_1f1b" in done.stdout


def test_options_of_an_outside_system_are_checked(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    installed_template(site)
    out = f"results_dir={tmp_path / 'out'}"
    wrong = run_bench(site, "systems=[plain_1f1b]", "system.plain_1f1b.vpp=2", out)
    assert wrong.returncode != 0
    assert "allowed are pp" in wrong.stderr
    assert not list((tmp_path / "out").glob("**/*"))


def test_the_program_in_the_guide_verifies() -> None:
    text = (ROOT / "docs/adding-a-baseline.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    program = names["program"]
    assert isinstance(program, Program)
    verify(program)
    assert Row(0, Stream.COLL, Op(Kind.DISPATCH, Phase.B, 0, 0)) in list(program.rows())
