"""`python -m bench.plus_page [results_dir]`: the numbers and pictures of docs/disagmoe-plus.md.

Takes the newest whole study of the shipped `experiment=plus_ablation` from the results
directory, keeps what the page needs of it in results/example/plus_ablation/, and
rewrites what stands between the page's markers, so that no number there is typed by
hand. Where there is no such study, the page is made again from what was kept.
Decides which tables the page has and which sentences are made of numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from bench import plus_record
from bench.collect import results_command
from bench.example import replace_block
from bench.identity import ROOT
from bench.report import ablation
from bench.report.ablation_cells import Place, Record, by_cell, gains_of, places, switches_of
from bench.report.ablation_page import (
    far_grid,
    forms_sentence,
    mix_sentence,
    near_sentence,
    run_sentence,
    win_grid,
    worth_sentence,
)
from bench.report.ablation_tables import (
    margin_grid,
    mix_grid,
    near_grid,
    replay_grid,
    system_grid,
    won_grid,
    worth_grid,
)
from bench.report.grid import Grid, table_lines
from bench.report.style import drawing, save
from bench.results import Results
from bench.study_run import load_study
from disagmoe.systems.disagmoe_plus import SWITCHES

PAGE = ROOT / "docs" / "disagmoe-plus.md"
PICTURES = ROOT / "docs" / "pictures"
PRESET = ROOT / "conf" / "experiment" / "plus_ablation.yaml"
MAIN = Place("h800", "deepep")
"""What the page's detailed tables are of: the shipped calibration, one transport for all."""
BEGIN, END = "<!-- {}:begin (make plus-page writes this) -->", "<!-- {}:end -->"


def blocks(record: Record) -> Mapping[str, str]:
    """What stands between the markers, by name."""
    single = [place for place in places(record) if len(switches_of(record, place)) > 1]
    many = [place for place in places(record) if place.batch != 1.0 and place[:2] == MAIN[:2]]
    found = {
        "run": run_sentence(record) + " " + ablation.effort(record),
        "wins": _table(win_grid(record, MAIN)),
        "won": _table(won_grid(record)),
        "forms": forms_sentence(record),
        "margins": "\n\n".join(_titled(margin_grid(record, name)) for name in _calibrations(record)),
        "bounds": _table(system_grid(record, MAIN)),
        "far": _table(far_grid(record, MAIN)),
        "switches": _table(worth_grid(record, [MAIN], "")),
        "everywhere": _table(worth_grid(record, single, "")),
        "near": "\n\n".join([*(_table(near_grid(record, place)) for place in many), near_sentence(record)]),
        "mix": "\n\n".join([_table(mix_grid(record, MAIN)), mix_sentence(record)]),
        "replay": _table(replay_grid(record, MAIN)),
    }
    return found | {name: worth_sentence(name, gains_of(record, [MAIN], name), _count(record)) for name in SWITCHES}


def _count(record: Record) -> int:
    return len(by_cell(record, MAIN))


def _calibrations(record: Record) -> list[str]:
    return list(dict.fromkeys(place.calibration for place in places(record)))


def _table(grid: Grid) -> str:
    return "\n".join(table_lines(grid))


def _titled(grid: Grid) -> str:
    return f"{grid.title}:\n\n{_table(grid)}"


def render(text: str, record: Record) -> str:
    """The page with everything between its markers made of the record. Raises ValueError without the markers."""
    for name, block in blocks(record).items():
        text = replace_block(text, block, BEGIN.format(name), END.format(name))
    return text


def draw(record: Record, folder: Path = PICTURES) -> list[Path]:
    """Gains of the switches and margins over the baselines."""
    paths = [folder / "plus_gains.png", folder / "plus_margins.png"]
    with drawing():
        save(ablation.heat_map(record, MAIN), paths[0])
        save(ablation.margin_map(record, MAIN.calibration), paths[1])
    return paths


def newest(results_dir: Path) -> Results | None:
    """The newest whole study of what is shipped; None where there is none."""
    shipped = yaml.safe_load(PRESET.read_text(encoding="utf-8"))["study"]
    found = []
    for directory in sorted(results_dir.glob("plus_ablation_*")):
        record = load_study(directory)
        axes = {entry["axis"]: list(entry["settings"]) for entry in record["axes"]}
        also = [model["name"] for model in record["models"][1:]]
        asked = (axes, also, record["plans"])
        if asked == tuple(shipped[key] for key in ("axes", "also", "plans")) and not record["settings"]:
            found.append(record)
    return max(found, key=lambda record: str(record["run"]["created"]), default=None)


def write(results_dir: Path) -> list[Path]:
    """Keep the newest study, if any, and make the page; returns the files."""
    study = newest(results_dir)
    paths = [] if study is None else plus_record.write(study)
    record = plus_record.read()
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8", newline="\n")
    return [*paths, PAGE, *draw(record)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return results_command("bench.plus_page", __doc__, write, arguments)


if __name__ == "__main__":
    sys.exit(main())
