"""`python -m bench.advise`: does disaggregation pay on my model, length and cluster?

    python -m bench.advise model=qwen3 seq=32k cluster=h800_128
    python -m bench.advise model=qwen3 seq=4k,16k,32k nic_gbit=100,200,400

takes the settings of `python -m bench` (transport, systems, batch, ...) and
answers on one screen, with a roofline beside it. Lists for `seq`, `nics_per_gpu`
or `nic_gbit` ask for the region instead: a map of the points at which
disaggregation pays. `solver=` chooses who divides the GPUs (auto, cbc, highs or
exhaustive). A mistake is one line on stderr and exit status 2.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.command import configuration, run_command
from bench.config import RunConfig
from bench.identity import identify, plain
from bench.progress import Bar
from disagmoe.allocator import Settings
from disagmoe.specs import parse_size

LIST_AXES = ("seq", "nics_per_gpu", "nic_gbit")
_UNSAFE = re.compile(r"[^A-Za-z0-9._=-]+")


@dataclass(frozen=True)
class Question:
    """A command line taken apart: settings of a run, axes of a region, solver."""

    overrides: tuple[str, ...]
    axes: dict[str, tuple[float, ...]]
    settings: Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer a command line; returns the exit status."""
    return run_command(__doc__, arguments, _answer)


def _answer(given: list[str]) -> bool:
    question = take_apart(given)
    answer(configuration(question.overrides), question)
    return True


def take_apart(arguments: Sequence[str]) -> Question:
    """Separate what only the advisor knows from the settings of a run. Raises ValueError."""
    overrides: list[str] = []
    axes: dict[str, tuple[float, ...]] = {}
    solver = "auto"
    for argument in arguments:
        key, _, value = argument.partition("=")
        values = [part.strip() for part in value.strip().strip("[]").split(",")]
        if argument.startswith("-"):
            raise ValueError(f"{argument}: allowed: --help, and settings such as model=qwen3 seq=32k")
        if key == "solver":
            solver = value
        elif key in LIST_AXES and (len(values) > 1 or key != "seq"):
            axes[key] = _numbers(key, values)
        else:
            overrides.append(argument)
    if "seq" in axes:
        overrides.append(f"seq={int(axes['seq'][0])}")
    return Question(tuple(overrides), axes, Settings(solver))


def _numbers(key: str, values: Sequence[str]) -> tuple[float, ...]:
    """Values of an axis, ascending."""
    try:
        numbers = [float(parse_size(v, key)) if key == "seq" else float(v) for v in values]
    except ValueError as error:
        raise ValueError(
            str(error) if key == "seq" else f"{key}={','.join(values)}: allowed: numbers above 0"
        ) from None
    if min(numbers) <= 0.0 or len(set(numbers)) < len(numbers):
        raise ValueError(f"{key}={','.join(values)}: allowed: distinct numbers above 0")
    return tuple(sorted(numbers))


def answer(config: RunConfig, question: Question) -> None:
    """Print the screen (or the map's numbers) and write the files."""
    if config.backend != "simulate":
        raise ValueError(f"backend={config.backend}: advice is simulated; allowed: simulate")
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if question.axes:
        _answer_region(config, question)
    else:
        _answer_point(config, question)


def _answer_point(config: RunConfig, question: Question) -> None:
    from bench.advice import advise  # what is slow to load comes here, off the way to an error message
    from bench.report.advice import print_advice
    from bench.report.roofline import roofline_figure
    from bench.report.style import save

    with Bar(len(config.systems) * len(config.views) + len(config.views)) as bar:
        advice = advise(config, question.settings, bar)
    stem = _stem(config, "advise")
    written = []
    if advice.roofline is not None:
        figure = roofline_figure(advice, advice.roofline)
        written.append(_write(config, f"{stem}_roofline.png", lambda path: save(figure, path)))
    record = json.dumps(plain(_record(advice)), indent=1, allow_nan=False) + "\n"
    written.append(_write(config, f"{stem}.json", lambda path: path.write_text(record, encoding="utf-8")))
    print_advice(advice, written)


def _record(advice: Any) -> dict[str, Any]:
    """The numbers behind the screen."""
    return {
        "schema": "disagmoe.advice/1",
        "model": advice.config.model.name,
        "cluster": advice.config.cluster,
        "workload": advice.config.workload,
        "backend": advice.config.backend,
        "calibration": Path(advice.config.calibration).stem,
        "views": [
            {
                **{k: v for k, v in vars(view).items() if k not in ("split", "limits")},
                "gain": view.gain,
                "speedup": view.speedup,
                "binds": None if view.limits is None else view.limits.binds,
                "shares": None if view.limits is None else view.limits.shares,
                "split": None if view.split is None else _split_record(view.split),
            }
            for view in advice.views
        ],
        "roofline": None if advice.roofline is None else asdict(advice.roofline),
    }


def _split_record(split: Any) -> dict[str, Any]:
    def allocation(plan: Any) -> dict[str, Any] | None:
        if plan is None:
            return None
        parts = {k: v for k, v in vars(plan).items() if k != "nodes"}
        return {**parts, "bottleneck_s": plan.bottleneck_s, "binds": plan.binds, "status": plan.status}

    values = {k: v for k, v in vars(split).items() if k not in ("seed", "free")}
    return {**values, "program": allocation(split.seed), "without_memory_limit": allocation(split.free)}


def _answer_region(config: RunConfig, question: Question) -> None:
    from bench.region import region, write_csv
    from bench.report.roofline import region_figure
    from bench.report.style import save

    count = 1
    for values in question.axes.values():
        count *= len(values)
    with Bar(count) as bar:
        result = region(config, question.axes, bar)
    stem = _stem(config, "region_" + "_".join(question.axes))
    figure = region_figure(result)
    picture = _write(config, f"{stem}.png", lambda path: save(figure, path))
    table = _write(config, f"{stem}.csv", lambda path: write_csv(path, result))
    print(result.verdict)
    print(f"map: {picture}\nnumbers: {table}")


def _stem(config: RunConfig, what: str) -> str:
    model, cluster = (_UNSAFE.sub("-", name)[:60] for name in (config.model.name, config.cluster.name))
    return f"{what}_{model}_{config.workload.seq}_{cluster}_{identify(config).config_id[:8]}"


def _write(config: RunConfig, name: str, write: Callable[[Path], object]) -> Path:
    """Write a file of the results directory, whole or not at all."""
    config.results_dir.mkdir(parents=True, exist_ok=True)
    path = config.results_dir / name
    draft = path.with_name(f".{os.getpid()}-{name}")
    try:
        write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
