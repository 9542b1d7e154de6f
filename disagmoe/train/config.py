"""What a training run is: every option, its default, and how options are read.

Decides the language of the command line: `key=value`, each key once, a preset
first (`preset=text` reads conf/train/text.yaml), then what is written. Every
mistake is one line that names the key, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from disagmoe.ops import Kind
from disagmoe.specs import ModelSpec, load_model, parse_size
from disagmoe.specs.fields import CONF
from disagmoe.train.plan import RingShape

RECOMPUTED = {
    "none": frozenset[Kind](),
    "attention": frozenset({Kind.ATTN}),
    "ffn": frozenset({Kind.FFN}),
    "both": frozenset({Kind.ATTN, Kind.FFN}),
}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """All options; `help` of a field is what `python -m disagmoe.train help` prints."""

    model: str = _option("tiny", "shipped model, or path of a config.json or YAML file")
    layers: int | None = _option(None, "cut the model to its first layers")
    seq: int = _option(128, "tokens per sequence (8k = 8192)")
    batch: int = _option(16, "sequences per step, over all ranks")
    microbatches: int = _option(4, "micro-batches per step and replica")

    p: int = _option(1, "stages of the ring")
    m: int = _option(1, "attention ranks per stage")
    n: int = _option(1, "expert ranks per stage")
    dp: int = _option(1, "copies of the whole ring")
    order: str = _option("comm_stage", "megatron or comm_stage")
    group: int | None = _option(None, "micro-batches in flight, 2p to 4p")
    head: str = _option("last_f", "where the output head is: last_f, next_a or spread")
    compute_streams: int = _option(1, "1, or 2: forward and backward side by side")
    merge: str = _option("rank", "copies of a token: none, rank or node")
    transport: str = _option("pairs", "pairs (point to point) or union (all-to-all)")
    node_size: int | None = _option(None, "ranks per logical node")
    recompute: str = _option("none", "what is computed again in backward: none, attention, ffn or both")

    steps: int = _option(100, "steps in all, those of a resumed run included")
    precision: str = _option("fp32", "fp32, bf16 (autocast) or fp64")
    seed: int = _option(0, "of the initial parameters and of the data's order")
    lr: float = _option(3e-3, "highest learning rate")
    min_lr: float | None = _option(None, "learning rate at the end; a tenth of lr unless given")
    warmup: int = _option(10, "steps of linear warm-up")
    weight_decay: float = _option(0.1, "of matrices")
    beta1: float = _option(0.9, "AdamW")
    beta2: float = _option(0.95, "AdamW")
    clip: float = _option(1.0, "largest global gradient norm; 0: no clipping")
    balance: float = _option(0.0, "weight of the balance loss")
    z: float = _option(0.0, "weight of the router's z loss")
    bias_rate: float = _option(0.0, "step of the routers' correction bias (models that have one)")

    data: str = _option("synthetic", "synthetic, text (UTF-8 file) or tokens (.npy or raw ids)")
    path: str | None = _option(None, "file of data=text and data=tokens")
    token_type: str = _option("uint16", "type of raw token ids")

    out: str | None = _option(None, "folder of logs and checkpoints; results/train/<model>-<digest> unless given")
    save_every: int = _option(0, "steps between checkpoints; 0: at the end only")
    keep: int = _option(3, "checkpoints that stay")
    resume: str = _option("auto", "auto: from the newest valid checkpoint in out; none: afresh")
    log_every: int = _option(10, "steps between lines on the screen, and between measured timelines")

    device: str = _option("cpu", "cpu (gloo), or cuda (NCCL; written, not tested)")
    peak: str | None = _option(None, "device whose peak MFU refers to, as H800; none: no MFU")
    threads: int = _option(1, "CPU threads per rank")
    timeout_s: float = _option(25.0, "longest wait for another rank inside one operation")
    single: bool = _option(False, "train the whole model in one process, for comparison")
    debug: bool = _option(False, "show the traceback of an error")

    @property
    def shape(self) -> RingShape:
        return RingShape(self.p, self.m, self.n, self.dp)

    @property
    def spec(self) -> ModelSpec:
        """The model, cut where asked."""
        model = load_model(self.model)
        return model if self.layers is None else model.with_layers(self.layers)

    @property
    def lowest_lr(self) -> float:
        return self.lr / 10 if self.min_lr is None else self.min_lr

    @property
    def folder(self) -> Path:
        """Where the run writes; equal training, equal folder, whatever the placement."""
        if self.out is not None:
            return Path(self.out)
        what = {key: value for key, value in dataclasses.asdict(self).items() if key not in _NOT_IDENTITY}
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]
        return Path("results") / "train" / f"{self.spec.name}-{digest}"


_NOT_IDENTITY = (
    *("p", "m", "n", "dp", "order", "group", "head", "compute_streams", "merge", "transport", "node_size"),
    *("recompute", "microbatches", "steps", "out", "save_every", "keep", "resume", "log_every"),
    *("device", "peak", "threads", "timeout_s", "debug"),
)
"""Options that do not change what is trained."""


def read_config(arguments: Sequence[str]) -> TrainConfig:
    """The configuration of a command line. Raises ValueError in one line."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            raise ValueError(f"{argument!r} is not key=value; `python -m disagmoe.train help` lists the keys")
        if key in given:
            raise ValueError(f"{key} is given twice: {given[key]!r} and {value!r}")
        given[key] = value
    values = _preset(given.pop("preset", None))
    values |= given
    hints = get_type_hints(TrainConfig)
    if unknown := sorted(values.keys() - hints.keys()):
        raise ValueError(f"unknown key {', '.join(unknown)}; known: preset, {', '.join(hints)}")
    config = TrainConfig(**{key: _parse(key, value, hints[key]) for key, value in values.items()})
    if config.recompute not in RECOMPUTED:
        raise ValueError(f"recompute={config.recompute!r} is unknown; allowed: {', '.join(RECOMPUTED)}")
    return config


def describe_options() -> str:
    """Every option with its default, for `help`."""
    lines = ["python -m disagmoe.train [preset=<name>] [key=value ...]", ""]
    for option in dataclasses.fields(TrainConfig):
        default = (
            ""
            if option.default is None
            else str(option.default).lower()
            if isinstance(option.default, bool)
            else option.default
        )
        lines.append(f"  {option.name + '=' + str(default):24} {option.metadata['help']}")
    names = ", ".join(sorted(file.stem for file in (CONF / "train").glob("*.yaml")))
    return "\n".join([*lines, "", f"  presets: {names}"])


def _preset(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    file = Path(name) if name.endswith((".yaml", ".yml")) else CONF / "train" / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(f.stem for f in (CONF / "train").glob("*.yaml")))
        raise ValueError(f"preset={name!r} is unknown; shipped: {known}; or the path of a YAML file")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(content, Mapping):
        raise ValueError(f"{file}: must hold key: value lines")
    return {str(key): value for key, value in content.items()}


def _parse(key: str, value: Any, hint: Any) -> Any:
    """A value, written (str) or from a preset, as the type of its field."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    kind, optional = kinds[0], type(None) in get_args(hint)
    if optional and value in (None, "none", "null"):
        return None
    try:
        if key == "seq":
            return parse_size(value)
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if kind is str:
            if not str(value):
                raise ValueError
            return str(value)
        if isinstance(value, bool):
            raise ValueError
        return kind(value)
    except (ValueError, KeyError, TypeError) as error:
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
        reason = f": {error}" if key == "seq" and error.args else ""
        raise ValueError(f"{key}={value}: must be {wanted}{' or none' if optional else ''}{reason}") from None
