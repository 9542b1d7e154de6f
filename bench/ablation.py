"""What every switch of `disagmoe_plus` is worth: each alone, and all together, beside `disagmoe` and the baselines.

Decides the cells: models by lengths, by exchange (each system's own transport, or one
for all), by calibration and by batch. In a cell a switch is on and all others are
off (`switch_trials.py` says which plans it gets), or all are as they are shipped; its
gain is `disagmoe`'s step over its own. Cells of `totals` and of other batches have
the search and `disagmoe` only: they count what is won at equal transport; at another
batch both try the best plans of the default one too, as their searches look at less
where Programs are large. Cells with one transport for all also ask the baselines with a `replay` they do not have by
default, and bound what any mix of both forms could take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baselines.registry import system_options
from bench.ablation_points import bounds, compared, point
from bench.axes import sequences, with_options
from bench.comparison import OWN_SYSTEM
from bench.config import PLANS_FROM, RunConfig
from bench.evaluate import Row
from bench.kept_answers import kept
from bench.points import Answer, Task, answers, asked
from bench.sensitivity import Progress, based, competitors
from bench.switch_trials import ALL, NONE, fastest, of_split, searched
from disagmoe.specs import ModelSpec, default_global_batch

NATIVE = "native"


@dataclass(frozen=True)
class Cell:
    """One model, length, exchange, calibration and batch, with what is tried there.

    `times` is the batch in multiples of the default one; `replay` what baselines with
    that option are asked beside their default, "" for nothing.
    """

    config: RunConfig
    exchange: str
    switches: tuple[str, ...]
    times: float = 1.0
    replay: str = ""

    @property
    def text(self) -> str:
        """The place in words."""
        config = self.config
        batch = "" if self.times == 1.0 else f" batch {self.times:g}x"
        return f"{config.model.name} {config.workload.seq} {self.exchange} {config.calibration}{batch}"

    @property
    def at(self) -> dict[str, Any]:
        """What all points of the cell share, beside model and length."""
        return {"exchange": self.exchange, "calibration": self.config.calibration, "batch": self.times}


@dataclass(frozen=True)
class _Group:
    """Cells that differ in model and length only."""

    exchange: str
    switches: tuple[str, ...]
    seqs: tuple[int, ...]
    times: float = 1.0
    replay: str = ""


def cells(config: RunConfig) -> list[Cell]:
    """All cells of the study, calibration by calibration."""
    assert config.study is not None
    return [
        Cell(_at(config, model, seq, group, calibration), group.exchange, group.switches, group.times, group.replay)
        for calibration in map(str, config.study.settings("calibrations"))
        for group in _groups(config)
        for model in config.study.models
        for seq in group.seqs
    ]


def _groups(config: RunConfig) -> Iterator[_Group]:
    assert config.study is not None
    study = config.study
    alone = tuple(str(name) for name in study.settings("switch"))
    seqs, large = (tuple(int(seq) for seq in study.settings(axis)) for axis in ("switch_seq", "batch_seq"))
    exchanges = [str(name) for name in study.settings("exchange")]
    replay = next((str(name) for name in study.settings("replay")), "")
    for name in exchanges:
        yield _Group(name, (*alone, ALL), seqs, replay="" if name == NATIVE else replay)
    for name in (str(name) for name in study.settings("totals")):
        if name not in exchanges:
            yield _Group(name, (ALL,), seqs)
    for factor in study.settings("batch"):
        for name in exchanges:
            if name != NATIVE:
                yield _Group(name, (ALL,), large or seqs, times=float(factor))


def _at(config: RunConfig, model: ModelSpec, seq: int, group: _Group, calibration: str) -> RunConfig:
    native = group.exchange == NATIVE
    usual = replace(
        based(config, model),
        workload=replace(config.workload, seq=seq, global_batch=default_global_batch(seq)),
        calibration=calibration,
        views=(NATIVE,) if native else ("uniform",),
        uniform_transport=config.uniform_transport if native else group.exchange,
    )
    return replace(usual, workload=replace(usual.workload, global_batch=sequences(usual, group.times)))


def first_tasks(config: RunConfig, cell: Cell) -> dict[str, Task]:
    """What can be asked at once: the competitors, switches that are searched for, and `replay` of some baselines."""
    found = {name: asked(f"{cell.text} {name}", cell.config, name) for name in competitors(config)}
    if cell.replay:
        for name in competitors(config):
            if "replay" in system_options(name):
                there = with_options(cell.config, name, replay=cell.replay)
                found[f"{name} replay"] = asked(f"{cell.text} {name} replay={cell.replay}", there, name)
    assert config.study is not None
    for switch in cell.switches:
        task = searched(cell.config, cell.text, switch, config.study.plans)
        if task is not None:
            found[switch] = task
    if cell.times != 1.0:
        for name in (OWN_SYSTEM, ALL):
            there = replace(found[name].config, plans_from=PLANS_FROM[0])
            found[f"{name} again"] = asked(f"{found[name].name} again", there, found[name].system)
    return found


def second_tasks(cell: Cell, split: Answer) -> dict[str, Task]:
    """What is tried on the split that `disagmoe` chose, by switch."""
    tasks = ((switch, of_split(cell.config, cell.text, switch, split)) for switch in cell.switches)
    return {switch: task for switch, task in tasks if task is not None}


def parts(config: RunConfig) -> int:
    """How many parts the progress bar counts at least: what is asked at once."""
    return sum(len(first_tasks(config, cell)) for cell in cells(config))


def conduct(config: RunConfig, progress: Progress, processes: int | None = None) -> dict[str, Any]:
    """The record's points: per cell `disagmoe` and every switch, then the baselines, then the bounds."""
    asked_for = cells(config)
    first = _answered([first_tasks(config, cell) for cell in asked_for], progress, processes)
    later = [second_tasks(cell, got[OWN_SYSTEM][0]) for cell, got in zip(asked_for, first, strict=True)]
    second = _answered(later, progress, processes)
    points: list[dict[str, Any]] = []
    for cell, found, on_split in zip(asked_for, first, second, strict=True):
        points += _points(config, cell, found, on_split)
    return {"points": points}


def _answered(
    groups: Sequence[Mapping[str, Task]], progress: Progress, processes: int | None
) -> list[dict[str, tuple[Answer, ...]]]:
    """The answers to groups of named tasks."""
    replies = iter(answers([task for group in groups for task in group.values()], progress, processes, kept))
    return [{name: next(replies) for name in group} for group in groups]


Answers = Mapping[str, tuple[Answer, ...]]


def _points(config: RunConfig, cell: Cell, found: Answers, on_split: Answers) -> Iterator[dict[str, Any]]:
    names = [name for name in competitors(config) if name != OWN_SYSTEM]
    rivals = [one.row for name in names for one in found[name]]
    plain = fastest(NONE, found[OWN_SYSTEM][0].row, _rows(found, OWN_SYSTEM))
    beside = compared(cell.config, cell.at, plain, rivals)
    yield point(beside, "switch", NONE, plain)
    for switch in cell.switches:
        rows = [*_rows(found, switch), *_rows(on_split, switch)]
        yield point(beside, "switch", switch, fastest(switch, plain, rows))
    for row in rivals:
        yield point(beside, "system", str(row["system"]), row)
    for name in names:
        for one in found.get(f"{name} replay", ()):
            yield point(beside, "replay", name, one.row)
    if cell.exchange != NATIVE and cell.times == 1.0:
        yield from bounds(cell.config, beside)


def _rows(found: Answers, name: str) -> list[Row]:
    """What was answered under a name, and where it was asked again."""
    return [one.row for key in (name, f"{name} again") for one in found.get(key, ())]
