"""What `make example` keeps of runs."""

from __future__ import annotations

import os
from pathlib import Path

from bench.example import keep_crosschecks


def run(results: Path, name: str, age_s: int) -> None:
    folder = results / name
    folder.mkdir(parents=True)
    for file in ("crosscheck.md", "crosscheck.csv", "parity.png", "parity.svg", "crosscheck.json"):
        (folder / file).write_text(name)
    os.utime(folder / "crosscheck.md", (1e9 - age_s, 1e9 - age_s))


def test_the_newest_crosscheck_of_either_kind_is_kept(tmp_path: Path) -> None:
    run(tmp_path, "crosscheck_qwen3_8192_emulate_b", age_s=1)
    run(tmp_path, "crosscheck_qwen3_8192_emulate_a", age_s=2)
    run(tmp_path, "crosscheck_qwen3_4096_emulate_c", age_s=0)  # of another length
    target = tmp_path / "example"
    keep_crosschecks(tmp_path, target)
    kept = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    names = ("crosscheck.md", "crosscheck.csv", "parity.png")
    assert kept == {f"crosscheck/systems/{name}": "crosscheck_qwen3_8192_emulate_b" for name in names}
    run(tmp_path, "crosscheck_switches_gpt_oss_8192_emulate_d", age_s=5)
    keep_crosschecks(tmp_path, target)
    assert (target / "crosscheck" / "switches" / "crosscheck.md").read_text().startswith("crosscheck_switches")
