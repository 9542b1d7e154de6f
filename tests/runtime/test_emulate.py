"""Repeats of an emulated step: warm-ups are hurried and thrown away, repeats keep the pace they were given."""

from __future__ import annotations

from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from disagmoe.runtime import emulate as module
from disagmoe.runtime.emulate import WARM_UP_SPEED, Emulation, emulate
from disagmoe.runtime.pacing import Pace

PACE = Pace(dilation=4.0, slack_s=0.01, hold_s=0.002)


class Runner:
    """Stands for the step runner of a rank: notes the pace of every step."""

    def __init__(self, *_: object, **__: object) -> None:
        self.pacer = SimpleNamespace(pace=PACE, late_s=[])
        self.site = SimpleNamespace(groups=SimpleNamespace(ranks=None))
        self.paces: list[Pace] = []
        runners.append(self)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None

    def step(self, _: object) -> SimpleNamespace:
        self.paces.append(self.pacer.pace)
        self.pacer.late_s = [0.5, 0.0]
        return SimpleNamespace(record=None)


runners: list[Runner] = []


def test_only_repeats_keep_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    runners.clear()
    monkeypatch.setattr(module, "StepRunner", Runner)
    monkeypatch.setattr(module, "gather_timeline", lambda *_, **__: "timeline")
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda heard, told: heard.__setitem__(0, told))
    context: Any = SimpleNamespace(world_size=1, beat=lambda: None)
    told: Any = Emulation(
        plan=SimpleNamespace(program=None),  # type: ignore[arg-type]
        model=SimpleNamespace(vocab=8),  # type: ignore[arg-type]
        cut=SimpleNamespace(sequences=1, seq=2),  # type: ignore[arg-type]
        pacing=SimpleNamespace(pace=PACE),  # type: ignore[arg-type]
        warm_ups=1,
        repeats=2,
    )
    steps = emulate(context, told)
    (runner,) = runners
    hurried = Pace(PACE.dilation / WARM_UP_SPEED, PACE.slack_s, PACE.hold_s)
    assert runner.paces == [hurried, PACE, PACE]
    assert [(step.late_s, step.late_share) for step in steps] == [(0.5, 0.5)] * 2
