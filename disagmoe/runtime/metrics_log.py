"""What is written down of a run: one JSON line per step, TensorBoard where it is installed, a line on the screen.

Decides the fields. `StepMetrics` is one step; fields that are not known are null,
never NaN. Communication is taken from the measured Timeline, on the steps that
have one. A resumed run continues its file: lines of steps that are run again go.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from torch import Tensor


@dataclass(frozen=True)
class StepMetrics:
    """One step. Times in seconds.

    `expert_load` is the largest max / mean of any layer, `idle_experts` counts those
    of all layers. `compute_s` to `wait_s` are means over all ranks. `mfu` needs a
    named device; `tokens_per_s` counts the tokens trained on. `dropped_copies` of
    tokens found no room in a full expert (a system with a capacity), over all layers.
    """

    step: int
    loss: float
    cross_entropy: float
    balance: float
    z: float
    grad_norm: float
    lr: float
    tokens: int
    step_s: float
    tokens_per_s: float
    expert_load: float
    idle_experts: int
    mfu: float | None = None
    compute_s: float | None = None
    overlapped_comm_s: float | None = None
    exposed_comm_s: float | None = None
    bubble_s: float | None = None
    wait_s: float | None = None
    dropped_copies: int = 0


class Log(Protocol):
    """Where metrics go."""

    def write(self, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...


def expert_load(counts: Mapping[int, Tensor]) -> tuple[float, int]:
    """Largest max / mean load of any layer, and the experts of all layers that got no token; `counts` by layer [E]."""
    largest, idle = 1.0, 0
    for of_layer in counts.values():
        values = of_layer.double()
        largest = max(largest, float(values.max() / values.mean()) if float(values.sum()) else 1.0)
        idle += int((of_layer == 0).sum())
    return largest, idle


class JsonLines:
    """`metrics.jsonl` of a run, from step `first` on."""

    def __init__(self, file: Path, first: int) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_before(file, first) if file.exists() else []
        part = file.with_name(f".{file.name}-{os.getpid()}")
        part.write_text("".join(kept), encoding="utf-8")
        part.rename(file)
        self._stream: TextIO = file.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        self._stream.write(json.dumps(_strict(asdict(metrics)), allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class TensorBoard:
    """Scalars for TensorBoard; without the package (`tensorboard`) nothing is written."""

    def __init__(self, folder: Path, first: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._writer: Any = None
            return
        self._writer = SummaryWriter(str(folder), purge_step=first)

    @property
    def available(self) -> bool:
        return self._writer is not None

    def write(self, metrics: StepMetrics) -> None:
        if self._writer is not None:
            for name, value in _strict(asdict(metrics)).items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Screen:
    """A bar that is redrawn on a terminal; elsewhere one line every `every` steps."""

    WIDTH = 24

    def __init__(self, first: int, steps: int, every: int, stream: TextIO | None = None) -> None:
        self._first, self._steps, self._every = first, steps, every
        self._stream = sys.stdout if stream is None else stream
        self._begin_s = time.monotonic()
        self._live = self._stream.isatty()

    def write(self, metrics: StepMetrics) -> None:
        done = metrics.step + 1
        if not self._live and done % self._every and done != self._steps:
            return
        left_s = (time.monotonic() - self._begin_s) / (done - self._first) * (self._steps - done)
        text = (
            f"step {done}/{self._steps}  loss {metrics.loss:.4f}  grad {metrics.grad_norm:.3g}  lr {metrics.lr:.2g}  "
            f"{metrics.tokens_per_s:,.0f} tokens/s  load {metrics.expert_load:.2f}"
        )
        if metrics.exposed_comm_s is not None:
            text += f"  exposed {100 * metrics.exposed_comm_s / metrics.step_s:.0f} %"
        if self._live:
            full = round(self.WIDTH * done / self._steps)
            self._stream.write(f"\r\x1b[K{'━' * full}{'╌' * (self.WIDTH - full)} {text}  {_clock(left_s)} left")
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._live:
            self._stream.write("\n")


def open_logs(folder: Path | None, first: int, steps: int, every: int, *, screen: bool) -> list[Log]:
    """The logs of a run from step `first` on; only rank 0 has any."""
    logs: list[Log] = [Screen(first, steps, every)] if screen else []
    if folder is not None:
        logs += [JsonLines(folder / "metrics.jsonl", first), TensorBoard(folder / "tensorboard", first)]
    return logs


def _strict(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON has; others become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _lines_before(file: Path, first: int) -> list[str]:
    """Whole lines of steps before `first`."""
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # cut off when the run was killed
        if line.endswith("\n") and step < first:
            kept.append(line)
    return kept


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
