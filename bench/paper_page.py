"""`python -m bench.paper_page [results_dir]`: results/paper.md, paper.csv and paper.png|svg from what was run.

Every claim of the paper beside ours, per model, length, calibration and batch, with
a verdict, and where the differences come from. Reads results only: `make sweep-paper`
makes them first. Decides the order of the page; its numbers are `paper_entries.py`'s.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.collect import results_command, write_text
from bench.paper_entries import entries, runs_of_the_paper, studies_of_the_paper, times_of
from bench.replay import KEPT
from bench.report import paper
from bench.report.columns import DASH
from bench.report.facts import ORIGIN, Results
from bench.report.grid import Grid, escaped, markdown_lines
from bench.report.points import AXIS_TITLES, EQUAL, point_grid
from bench.report.reasons import explanations, reasons_grid
from bench.report.text import length
from bench.verdicts import RATIO_STEP, Entry, Record

PAGE, TABLE = "paper.md", "paper.csv"
NICS = {"ratio": ", half of the NICs for each pool"}
MARK = {"inside": "✓", "outside": "✗", "not comparable": ""}


def page(runs: Sequence[Results], studies: Sequence[Record]) -> str:
    """The whole page as Markdown."""
    found = entries(runs, studies)
    lines = list(_introduction(runs, studies))
    lines += markdown_lines(summary_grid(found))
    lines += ["", "![ours beside the paper's ranges](paper.png)"]
    for claim in paper.CLAIMS[:8]:
        grid = _matrix([entry for entry in found if entry.claim == claim.text], claim)
        lines += markdown_lines(grid, 3) if grid.cells else []
    lines += [
        "",
        f"{MARK['inside']} inside, {MARK['outside']} outside the published range (last printed digit included).",
    ]
    for axis in AXIS_TITLES:
        lines += _study_section(axis, studies, found)
    lines += markdown_lines(reasons_grid(runs))
    lines += ["", "### Points outside the range of the speed-up over Megatron-1F1B, default batch", ""]
    lines += [f"- {escaped(line)}" for line in explanations([run for run in runs if times_of(run) == 1])]
    lines += ["", "## Not comparable", ""]
    lines += [f"- {escaped(line)}" for line in _not_comparable(found)]
    return "\n".join(lines) + "\n"


def _introduction(runs: Sequence[Results], studies: Sequence[Record]) -> Iterator[str]:
    origins = ", ".join(dict.fromkeys(ORIGIN[str(run["backend"])] for run in runs))
    clusters = ", ".join(dict.fromkeys(str(run["cluster"]["name"]) for run in runs))
    yield from (f"# Against the DisagMoE paper ({origins})", "")
    yield (
        f"Ours are {origins} on {clusters}; the paper's ([arXiv 2605.11005](https://arxiv.org/abs/2605.11005)) were"
        " measured, are read from public summaries, and are inputs of nothing here."
    )
    yield (
        "Native view: the baselines on NCCL, DisagMoE on its own transport with copies merged per node. A verdict"
        " compares one result with the published range; the paper gives no error bars."
    )
    large = [run for run in runs if times_of(run) > 1]
    if any((run.get("settings") or {}).get("plans_from") for run in large):
        yield (
            f"At the larger batch no new search is made: the best {KEPT} plans of every system at the default batch are"
            " simulated again there. Filling and draining weighs more on some than on others, hence the second batch."
        )
    for calibration in dict.fromkeys(str(run["calibration"]) for run in runs):
        yield f"Calibration {calibration}: " + _about(calibration)
    yield ""
    count = f"{len(runs)} comparisons and {len(studies)} studies of single claims"
    yield f"From {count}; {TABLE} has every line with its run."


def _about(calibration: str) -> str:
    from disagmoe.cost.calibration import calibration_names, load_calibration

    return load_calibration(calibration).about if calibration in calibration_names() else "a file of yours."


def summary_grid(found: Sequence[Entry]) -> Grid:
    """One line per claim: how many comparable results lie inside, per calibration and batch, and their range."""
    columns = sorted({(entry.calibration, entry.times) for entry in found})
    cells = []
    for claim in dict.fromkeys(entry.claim for entry in found):
        mine = [entry for entry in found if entry.claim == claim]
        published = paper.range_text(vars(mine[0]))
        counts = [_count([e for e in mine if (e.calibration, e.times) == column]) for column in columns]
        values = [entry.ours for entry in mine if entry.ours is not None]
        ours = DASH if not values else _span(min(values), max(values), mine[0].unit)
        cells.append((claim, published, *counts, ours))
    headings = ("claim", "paper, measured", *(f"{name}, batch {n}×" for name, n in columns), "ours, all")
    return Grid("Verdicts: inside the published range, of those comparable", headings, tuple(cells))


def _count(mine: Sequence[Entry]) -> str:
    judged = [entry for entry in mine if entry.verdict != "not comparable"]
    return f"{sum(entry.verdict == 'inside' for entry in judged)} of {len(judged)}" if judged else DASH


def _span(low: float, high: float, unit: str) -> str:
    return paper.range_text({"low": low, "high": high, "unit": unit})


def _matrix(mine: Sequence[Entry], claim: paper.Claim) -> Grid:
    """Ours by model, calibration and batch over the lengths; claims of one length have one column."""
    judged = [entry for entry in mine if entry.verdict != "not comparable"]
    lengths = sorted({entry.seq for entry in judged})
    lines: dict[tuple[str, str, float], dict[int, str]] = {}
    for entry in mine:
        if entry.seq in lengths and any((e.model, e.seq) == (entry.model, entry.seq) for e in judged):
            text = f"{paper.value_text(entry.ours, entry.unit)} {MARK[entry.verdict]}".strip()
            lines.setdefault((entry.model, entry.calibration, entry.times), {})[entry.seq] = text
    cells = [
        (model, calibration, f"{n}×", *(found.get(seq, DASH) for seq in lengths))
        for (model, calibration, n), found in sorted(lines.items())
    ]
    published = paper.range_text({"low": claim.low, "high": claim.high, "unit": claim.unit})
    headings = ("model", "calibration", "batch", *map(length, lengths))
    title = f"{claim.text}: paper {published}" + (f" ({claim.note})" if claim.note else "")
    return Grid(title, headings, tuple(cells), frozenset({0, 1}))


# ---- what the study says --------------------------------------------------------------------------------------------


def _study_section(axis: str, studies: Sequence[Record], found: Sequence[Entry]) -> list[str]:
    """One group of points per calibration and what the claims make of them."""
    lines: list[str] = []
    for record in studies:
        points = [point for point in record["points"] if point["axis"] == axis]
        if points:
            title = f"{AXIS_TITLES[axis]}{NICS.get(axis, '')}, calibration {record['calibration']}"
            lines += markdown_lines(point_grid(axis, points, title, brief=True))
    if axis == "ratio" and lines:
        points = [point for record in studies for point in record["points"] if point["axis"] == axis]
        lines += ["", escaped(f"{_arithmetic(found)}{_binding(points)}")]
    return lines


def _binding(points: Sequence[Record]) -> str:
    """Which pool keeps the equal split from gaining by a change: the one that computes most of the step."""
    shares = [p["pool_compute"] for p in points if p["at"]["ratio"] == EQUAL and set(p["pool_compute"]) == {"A", "F"}]
    experts = [share for share in shares if share["F"] > share["A"]]
    if not experts:
        return ""
    a, f = ([100 * share[pool] for share in experts] for pool in ("A", "F"))
    return (
        f" At {EQUAL} the experts' GPUs compute more of the step than attention's in {len(experts)} of {len(shares)}"
        f" cases ({min(f):.0f}–{max(f):.0f} % against {min(a):.0f}–{max(a):.0f} %): fewer of them lengthen it there."
    )


def _arithmetic(found: Sequence[Entry]) -> str:
    """Why the published step from 16:16 to 16:10 cannot be met, with ours."""
    ours = [entry.ours for entry in found if entry.claim == RATIO_STEP and entry.ours is not None]
    said = f"The step from 16:16 to 16:10: {paper.RATIO_ARITHMETIC}."
    if ours:
        per_gpu = [value * 32 / 26 for value in ours]
        said += f" Ours: {_span(min(ours), max(ours), 'x')} per step, {_span(min(per_gpu), max(per_gpu), 'x')} per GPU."
    return said


def _not_comparable(found: Sequence[Entry]) -> Iterator[str]:
    """Every claim and reason once, with how often; what is stated for one model or length is said together."""
    counted: dict[tuple[str, str], int] = {}
    for entry in found:
        if entry.verdict == "not comparable":
            note = "stated for another model or length" if entry.note.startswith("stated for") else entry.note
            counted[entry.claim, note] = counted.get((entry.claim, note), 0) + 1
    for (claim, note), count in counted.items():
        yield f"{claim}: {note} ({count} result{'s' if count > 1 else ''})"


# ---- files ----------------------------------------------------------------------------------------------------------


def table(found: Sequence[Entry]) -> str:
    """paper.csv: one line per claim and result."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(Entry.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    for entry in found:
        values: Mapping[str, object] = vars(entry)
        writer.writerow({key: "" if value is None else value for key, value in values.items()})
    return out.getvalue()


def write_page(results_dir: Path) -> list[Path]:
    """Write the page, its table and its picture; returns the files. Raises ValueError where nothing was run."""
    from bench.report.paper_figure import write_figure

    runs = runs_of_the_paper(results_dir) if results_dir.is_dir() else []
    if not runs:
        raise ValueError(f"{results_dir} holds no run in the paper's setting: make sweep-paper")
    runs.sort(
        key=lambda run: (times_of(run), str(run["calibration"]), str(run["model"]["name"]), run["workload"]["seq"])
    )
    studies = studies_of_the_paper(results_dir)
    found = entries(runs, studies)
    write_text(results_dir / PAGE, page(runs, studies))
    write_text(results_dir / TABLE, table(found))
    return [results_dir / PAGE, results_dir / TABLE, *write_figure(found, results_dir)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return results_command("bench.paper_page", __doc__, write_page, arguments)


if __name__ == "__main__":
    sys.exit(main())
