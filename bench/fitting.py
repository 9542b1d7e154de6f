"""`depth=fitting`: the models of a study cut to the most layers at which every one of its points fits.

A point that cannot be placed at all, whatever its memory, does not count; of the
others no single one may be out of memory, neither with the system under study nor
with the reference, so that a map of a study has no holes that only depth makes.
"""

from __future__ import annotations

from dataclasses import replace

from baselines.registry import get_system
from bench.claims import COMPARED, points
from bench.config import RunConfig
from bench.depth import deepest, remembered
from bench.evaluate import cost_model, problem_of
from bench.identity import ROOT, source_digest
from bench.points import Task, asked
from bench.simulated import Simulated
from bench.study import PLUS_ABLATION, SENSITIVITY
from disagmoe.allocator.fitting import fits
from disagmoe.specs import ModelSpec
from disagmoe.system import variants_of


def fitted(config: RunConfig) -> RunConfig:
    """The configuration with cut models. Raises ValueError where there are no points, or not even one layer fits."""
    study = config.study
    if study is None or study.kind in (SENSITIVITY, PLUS_ABLATION):
        raise ValueError("depth=fitting: allowed for experiments with points of their own, such as ratio_sweep")
    models = []
    for model in study.models:
        tasks = _tasks(config, model)
        question = ["fitting", [(task.system, task.config) for task in tasks], source_digest(ROOT)]
        models.append(model.with_layers(remembered(question, lambda t=tuple(tasks): _deepest(t))))  # type: ignore[misc]
    return replace(config, model=models[0], study=replace(study, models=tuple(models)))


def _tasks(config: RunConfig, model: ModelSpec) -> list[Task]:
    """What must fit: both systems at every point of a model, equal ones once, the longest sequences first."""
    mine = [point.config for point in points(config) if point.config.model.name == model.name]
    distinct = {repr(task): task for there in mine for name in COMPARED for task in [asked("", there, name)]}
    return sorted(distinct.values(), key=lambda task: -task.config.workload.seq)


def _deepest(tasks: tuple[Task, ...]) -> int:
    depth = tasks[0].config.model.layers
    for task in tasks:
        depth = deepest(lambda layers, task=task: _fits(task, layers), depth)  # type: ignore[misc]
        if depth == 0:
            name, seq, options = task.config.model.name, task.config.workload.seq, task.config.system_options
            raise ValueError(f"depth=fitting: not one layer of {name} fits with {task.system} at {seq:,}, {options}")
    return depth


def _fits(task: Task, layers: int) -> bool:
    """Whether a system fits with so many layers, or cannot run there whatever its memory."""
    config = replace(task.config, model=task.config.model.with_layers(layers))
    (view,) = config.views
    form = variants_of(get_system(task.system, **config.system_options.get(task.system, {})), view)[0]
    problem = problem_of(config, cost_model(config), form, view)
    return fits(form.system, problem, Simulated(problem).peak) is not False
