"""`python -m bench.example`: the committed example results and the numbers in the README.

Takes the newest runs from the results directory (make the sweep first), keeps
the small files of them in results/example/, and rewrites the README's headline
table between its markers, so that no number there is typed by hand. The newest
cross-checks are kept too, where there are any.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pandas as pd

from bench.collect import EXAMPLE
from bench.report import paper
from disagmoe.specs import default_global_batch

ROOT = Path(__file__).resolve().parents[1]
SHOWN_RUN = "qwen3_8192_simulate_"
"""Prefix of the run whose tables and pictures are kept whole (but for its traces)."""
CALIBRATION = "h800"
"""The headline is of this calibration, at the default batch and with all settings as by default."""
KEPT = ("table.md", "table.csv", "results.json", "speedup.png", "breakdown.png", "timeline_native_disagmoe.png")
CROSSCHECKS = {"systems": "crosscheck_qwen3_8192_emulate_*", "switches": "crosscheck_switches_*"}
"""Folder under crosscheck/ -> the runs of which the newest is kept."""
BEGIN, END = "<!-- headline:begin (make example writes this) -->", "<!-- headline:end -->"
MODELS = {"deepseek_moe": "DeepSeek-MoE (paper's Table 2)", "gpt_oss": "GPT-OSS-120B", "qwen3": "Qwen3-235B-A22B"}


def headline(summary: pd.DataFrame) -> str:
    """Markdown table: speed-up of DisagMoE by model, sequence and view, beside the paper's range."""
    plain = summary["settings"].isna() & (summary["calibration"] == CALIBRATION)
    usual = summary["global_batch"] == summary["seq"].map(default_global_batch)
    rows = summary[plain & usual & (summary["system"] == "disagmoe") & summary["model"].isin(list(MODELS))]
    seqs = sorted(rows["seq"].unique())
    claim = next(c for c in paper.CLAIMS if c.text == "speed-up over Megatron-1F1B")
    low, high = claim.low or 0.0, claim.high or 0.0
    lengths = " | ".join(f"{seq // 1024}K" for seq in seqs)
    lines = [
        f"| DisagMoE over Megatron-1F1B, simulated | {lengths} | paper, measured |",
        f"|---|{'---:|' * len(seqs)}---|",
    ]
    for view in rows["view"].unique():
        for model, title in MODELS.items():
            cells = [_cell(rows, view, model, seq, low, high) for seq in seqs]
            published = f"{low:.2f}–{high:.2f}×" if view == "native" else "not in the paper"
            lines.append(f"| {title}, {view} view | {' | '.join(cells)} | {published} |")
    return "\n".join(lines)


def _cell(rows: pd.DataFrame, view: str, model: str, seq: int, low: float, high: float) -> str:
    """One speed-up; bold where it lies inside the paper's range."""
    found = rows[(rows["view"] == view) & (rows["model"] == model) & (rows["seq"] == seq)]
    if found.empty:
        return "–"
    row = found.iloc[-1]
    if row["status"] != "ok":
        return str(row["status"])
    inside = view == "native" and low <= round(row["speedup"], 2) <= high
    return f"**{row['speedup']:.2f}×**" if inside else f"{row['speedup']:.2f}×"


def replace_block(text: str, block: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with what stands between the markers replaced. Raises ValueError without markers."""
    if begin not in text or end not in text:
        raise ValueError(f"the page lacks the markers {begin!r} and {end!r}")
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n\n{block}\n\n{end}{rest.split(end, 1)[1]}"


def keep_crosschecks(results_dir: Path, target: Path) -> None:
    """The page, the numbers and the parity plot of the newest cross-check of either kind; what is kept stays else."""
    for kind, pattern in CROSSCHECKS.items():
        runs = sorted(results_dir.glob(f"{pattern}/crosscheck.md"), key=lambda path: path.stat().st_mtime)
        if not runs:
            continue
        folder = target / "crosscheck" / kind
        folder.mkdir(parents=True, exist_ok=True)
        for path in (path for path in runs[-1].parent.iterdir() if path.suffix in (".md", ".csv", ".png")):
            shutil.copy(path, folder / path.name)


def main(results_dir: Path = ROOT / "results") -> None:
    runs = sorted(results_dir.glob(f"{SHOWN_RUN}*/speedup.png"), key=lambda path: path.stat().st_mtime)
    if not runs or not (results_dir / "summary.csv").exists():
        sys.exit(
            f"{results_dir} lacks the sweep or the {SHOWN_RUN}* run with its pictures: "
            "run `make sweep` and `make bench MODEL=qwen3 SEQ=8k` first"
        )
    target = results_dir / EXAMPLE
    target.mkdir(exist_ok=True)
    for path in target.iterdir():
        if path.is_file():  # folders hold what others made
            path.unlink()
    for name in KEPT:
        shutil.copy(runs[-1].parent / name, target / name)
    for path in [
        results_dir / "summary.md",
        results_dir / "summary.csv",
        *results_dir.glob(f"by_sequence_speedup*_{CALIBRATION}.png"),
    ]:
        shutil.copy(path, target / ("by_sequence_speedup.png" if path.suffix == ".png" else path.name))
    keep_crosschecks(results_dir, target)
    readme = ROOT / "README.md"
    readme.write_text(replace_block(readme.read_text(), headline(pd.read_csv(target / "summary.csv"))))
    print(f"wrote {target} and the headline table of {readme.name}")


if __name__ == "__main__":
    main()
