"""What a run is: every value of the command line checked and resolved once.

Decides which values this version accepts and what each default means. Nothing
here knows of Hydra: it hands over a plain mapping (conf/config.yaml with its
overrides) and the names chosen in each group. Every refusal is a ValueError of
one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baselines.registry import REFERENCE, get_system, system_class, system_names
from bench.choices import other_device, read_calibration, read_cluster, read_model
from bench.selection import WHOLE, Selection, read_selection
from bench.study import Study, study_from_mapping
from disagmoe.allocator.tuner import DEFAULT_BUDGET
from disagmoe.cost.calibration import MERGES, TRANSPORTS, load_calibration
from disagmoe.specs import (
    ClusterSpec,
    ModelSpec,
    Workload,
    context_warning,
    default_global_batch,
    parse_size,
)
from disagmoe.specs import fields as read
from disagmoe.specs.workload import OPTIMIZERS

VIEWS: Mapping[str, tuple[str, ...]] = {
    "native": ("native",),
    "uniform": ("uniform",),
    "both": ("native", "uniform"),
}
BACKENDS = ("simulate", "emulate", "measure")
IMPLEMENTATIONS = ("equivalent", "native", "both")
VIEWS_OF_BACKEND = {"simulate": "both", "emulate": "native", "measure": "native"}
"""The views shown where `transport` is null."""
EMULATED_PROCESSES = (4, 8)
MOST_REPEATS = 100
DEPTHS = ("full", "common", "fitting")
ARTIFACTS = ("all", "tables", "auto")
PLANS_FROM = ("default_batch",)
MAX_TAG = 200
SETTINGS = (
    *("model", "cluster", "calibration", "seq", "batch", "micro_batch", "skew", "stragglers", "optimizer"),
    *("systems", "system", "transport", "uniform_transport", "merge", "contention_scale", "ep", "depth", "budget"),
    *("plans_from", "study", "backend", "impl", "processes", "repeats", "artifacts"),
    *("gantt_window", "gantt_workers"),
    *("results_dir", "force", "debug", "tag"),
)
"""The top-level keys of a configuration."""
_REQUIRED = frozenset(SETTINGS) - {"calibration"}
_TIMES = re.compile(r"([1-9][0-9]{0,5})[xX]")

Options = Mapping[str, Any]


@dataclass(frozen=True)
class RunConfig:
    """One resolved run.

    `full_layers` is the depth of the uncut model. `calibration` is a shipped name
    or a path. `systems` are registry names in the order of the tables, the
    reference first; `system_options` holds the options set for some of them. `ep`
    None lets the planners choose, `merge` None merges copies as each transport
    does. `contention_scale` s turns every contention factor f of the calibration
    into 1 + s * (f - 1). `budget` is the number of plans timed per tuning round;
    with `plans_from` "default_batch" only the best plans of the default batch are
    tried. `study` asks for a study of many points instead of one comparison.
    `backend` runs the plans, `impl` says whose code does (ours, the real systems', or
    both); `processes` are the ranks of a run on this machine (None: as the backend
    does) and `repeats` the steps it times. `files` are the data files the run was
    read from. The fields from `artifacts` on do not change results.
    """

    model: ModelSpec
    full_layers: int
    cluster: ClusterSpec
    workload: Workload
    calibration: str
    views: tuple[str, ...]
    uniform_transport: str
    merge: str | None
    systems: tuple[str, ...]
    system_options: Mapping[str, Options]
    ep: int | None
    depth: str
    backend: str
    impl: str
    budget: int
    tag: str
    contention_scale: float = 1.0
    plans_from: str | None = None
    study: Study | None = None
    processes: int | None = None
    repeats: int = 3
    files: tuple[Path, ...] = ()
    artifacts: str = "all"
    selection: Selection = WHOLE
    force: bool = False
    debug: bool = False
    results_dir: Path = Path("results")
    warnings: tuple[str, ...] = field(default=(), compare=False)


def resolve(values: Options, choices: Mapping[str, str | None], *, sweep: bool = False) -> RunConfig:
    """Check and resolve the values of conf/config.yaml.

    `choices` names the option taken in the groups model, cluster and
    calibration. `sweep` says that this is one job of several, which keeps only
    tables unless told otherwise. Raises ValueError.
    """
    _check_settings(values)
    model, full_layers, model_file = read_model(values["model"], choices["model"])
    cluster, cluster_file = read_cluster(values["cluster"], choices["cluster"])
    calibration, calibration_file = read_calibration(values.get("calibration"), choices.get("calibration"), cluster)
    workload = _workload(values, cluster)
    systems = _systems(values["systems"])
    backend, impl, processes = _backend(values)
    artifacts = _one_of("artifacts", values["artifacts"], ARTIFACTS)
    if artifacts == "auto":
        artifacts = "tables" if sweep else "all"
    ep = None if values["ep"] == "auto" else _positive("ep", values["ep"], "or auto")
    depth = _one_of("depth", values["depth"], DEPTHS)
    if depth == "common":
        model = _at_common_depth(model, cluster, calibration, ep, workload.optimizer)
    study = None if values["study"] is None else study_from_mapping(values["study"], model)
    if study is not None and depth == "common":
        others = (_at_common_depth(other, cluster, calibration, ep, workload.optimizer) for other in study.models[1:])
        study = replace(study, models=(model, *others))
    files = [model_file, cluster_file, calibration_file]
    files += [read.shipped("model").get(other.name) for other in study.models[1:]] if study else []
    warnings = (context_warning(model, workload.seq), other_device(calibration, cluster))
    resolved = RunConfig(
        model=model,
        full_layers=full_layers,
        cluster=cluster,
        workload=workload,
        calibration=calibration,
        views=VIEWS[_one_of("transport", values["transport"] or VIEWS_OF_BACKEND[backend], tuple(VIEWS))],
        uniform_transport=_one_of("uniform_transport", values["uniform_transport"], TRANSPORTS),
        merge=_or_none("merge", values["merge"], MERGES),
        systems=systems,
        system_options=_system_options(values["system"], systems),
        ep=ep,
        depth=depth,
        backend=backend,
        impl=impl,
        processes=processes,
        repeats=_repeats(values["repeats"]),
        budget=DEFAULT_BUDGET if values["budget"] is None else _positive("budget", values["budget"]),
        tag=_tag(values["tag"]),
        contention_scale=_scale(values["contention_scale"]),
        plans_from=_or_none("plans_from", values["plans_from"], PLANS_FROM),
        study=study,
        files=tuple(path for path in files if path is not None),
        artifacts=artifacts,
        selection=read_selection(values["gantt_window"], values["gantt_workers"]),
        force=read.as_bool(values["force"], "force"),
        debug=read.as_bool(values["debug"], "debug"),
        results_dir=Path(read.as_str(values["results_dir"], "results_dir")),
        warnings=tuple(warning for warning in warnings if warning),
    )
    return _cut_to_fit(resolved) if depth == "fitting" else resolved


def _backend(values: Options) -> tuple[str, str, int | None]:
    """What runs the plans, whose code, and on how many processes."""
    backend = _one_of("backend", values["backend"], BACKENDS)
    impl = _one_of("impl", values["impl"], IMPLEMENTATIONS)
    processes = None if values["processes"] is None else _positive("processes", values["processes"])
    if impl != "equivalent" and backend != "measure":
        raise ValueError(f"impl={impl} runs the real systems: allowed with backend=measure only, not {backend}")
    if backend == "emulate" and processes not in (None, *EMULATED_PROCESSES):
        raise ValueError(f"processes={processes}: allowed with backend=emulate: 4, 8")
    if backend == "simulate" and processes is not None:
        raise ValueError(f"processes={processes}: a simulation starts none; allowed with backend=emulate and measure")
    if backend != "simulate" and values["study"] is not None:
        raise ValueError(f"backend={backend}: a study is simulated; allowed: simulate")
    return backend, impl, processes


def _repeats(value: object) -> int:
    repeats = _positive("repeats", value)
    if repeats > MOST_REPEATS:
        raise ValueError(f"repeats={repeats}: allowed: 1 to {MOST_REPEATS}")
    return repeats


def _at_common_depth(
    model: ModelSpec, cluster: ClusterSpec, calibration: str, ep: int | None, optimizer: str
) -> ModelSpec:
    """The model cut to the layers that every shipped system fits."""
    from bench.depth import common_depth  # plans and simulates, which most command lines do not need here

    layers = common_depth(
        model, cluster, load_calibration(calibration), ep, optimizer, say=lambda line: print(line, flush=True)
    )
    return model.with_layers(layers)


def _cut_to_fit(config: RunConfig) -> RunConfig:
    """The models of a study cut to the layers at which all of its points fit."""
    from bench.fitting import fitted  # plans and simulates, like the common depth

    return fitted(config)


def _check_settings(values: Options) -> None:
    for wrong, what in ((set(values) - set(SETTINGS), "no setting"), (_REQUIRED - set(values), "no value for")):
        if wrong:
            raise ValueError(f"{what} {sorted(wrong)[0]!r}; settings: {', '.join(SETTINGS)}")


def _one_of(key: str, value: object, allowed: Sequence[str], when: str = "") -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{key}={_shown(value)}: allowed{' ' + when if when else ''}: {', '.join(allowed)}")
    return value


def _or_none(key: str, value: object, allowed: Sequence[str]) -> str | None:
    return None if value is None else _one_of(key, value, allowed, "besides null")


def _scale(value: object) -> float:
    scale = read.as_float(value, "contention_scale")
    if scale < 0.0:
        raise ValueError(f"contention_scale={_shown(value)}: allowed: a number of at least 0 (0: ideal overlap)")
    return scale


def _shown(value: object) -> str:
    """A value as the user would type it."""
    return "null" if value is None else str(value)


def _positive(key: str, value: object, otherwise: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{key}={_shown(value)}: allowed: a positive integer{' ' + otherwise if otherwise else ''}")
    return value


def _workload(values: Options, cluster: ClusterSpec) -> Workload:
    seq = parse_size(values["seq"], "seq")
    micro_batch = values["micro_batch"]
    stragglers = []
    for item in read.as_list(values["stragglers"], "stragglers"):
        pair = read.as_list(item, "stragglers entry")
        if len(pair) != 2:
            raise ValueError(f"stragglers must be a list of [gpu, slowdown] pairs, got {item}")
        stragglers.append((read.as_int(pair[0], "straggler GPU"), read.as_float(pair[1], "straggler slowdown")))
        if stragglers[-1][0] >= cluster.gpus:
            raise ValueError(f"straggler on GPU {pair[0]}: cluster {cluster.name} has GPUs 0 to {cluster.gpus - 1}")
    return Workload(
        seq=seq,
        global_batch=_global_batch(values["batch"], seq),
        micro_batch=None if micro_batch is None else _positive("micro_batch", micro_batch),
        skew=read.as_float(values["skew"], "skew"),
        stragglers=tuple(stragglers),
        optimizer=_one_of("optimizer", values["optimizer"], OPTIMIZERS),
    )


def _global_batch(value: Any, seq: int) -> int:
    """Sequences per step: the default, a number, or a multiple of the default ("4x")."""
    if value is None:
        return default_global_batch(seq)
    times = _TIMES.fullmatch(value.strip()) if isinstance(value, str) else None
    return parse_size(value, "batch") if times is None else int(times[1]) * default_global_batch(seq)


def _systems(value: object) -> tuple[str, ...]:
    """The systems asked for, in registry order, without repetition; the reference always runs first."""
    if value == "all":
        return system_names()
    names = value.split(",") if isinstance(value, str) else read.as_list(value, "systems")
    asked = [str(name).strip() for name in names]
    if not asked or not all(asked):
        raise ValueError(f"systems={_shown(value)}: allowed: all, or any of {', '.join(system_names())}")
    for name in asked:
        system_class(name)  # raises where there is none of this name
    return tuple(name for name in system_names() if name in asked or name == REFERENCE)


def _system_options(value: object, systems: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Options per system: those of conf/system/<name>.yaml, then those of the command line."""
    given = read.as_mapping(value, "system")
    unused = [name for name in given if name not in systems]
    if unused:
        raise ValueError(
            f"system.{unused[0]} is set but {unused[0]} does not run; systems that run: {', '.join(systems)}"
        )
    presets = read.shipped("system")
    merged: dict[str, dict[str, Any]] = {}
    for name in systems:
        preset = read.read_file(presets[name], f"system {name}") if name in presets else {}
        options = {**preset, **read.as_mapping(given.get(name, {}), f"system.{name}")}
        try:
            get_system(name, **options)  # raises at an unknown option or a bad value
        except TypeError as error:
            raise ValueError(f"system.{name}: {error}") from None
        if options:
            merged[name] = options
    return merged


def _tag(value: object) -> str:
    tag = "" if value is None else str(value)
    if isinstance(value, list | dict) or len(tag) > MAX_TAG or not (tag == "" or tag.isprintable()):
        raise ValueError(f"tag={_shown(value)[:60]}: allowed: a text of at most {MAX_TAG} printable characters")
    return tag
