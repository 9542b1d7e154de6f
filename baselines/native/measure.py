"""Peers as an implementation of `backend=measure`: which plans they run, and what every rank does.

Decides how a plan of ours is handed to a peer: same model, batch, starting values, data,
optimizer and number of steps; for Megatron-Core also pipeline, layer split, micro-batch
group and expert parallelism. What a peer cannot run as planned is refused with the
reason, never run as something else.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Protocol

from baselines.native.megatron import shape
from baselines.native.peers import MEGATRON, Peer, peer_of
from baselines.native.result import NativeStep
from baselines.native.tutel import trainer
from baselines.native.tutel.model import TutelOptions
from disagmoe.cost.recompute import NO_RECOMPUTE, Recompute
from disagmoe.plan.plan import Layout
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Fetch
from disagmoe.runtime.data import Synthetic
from disagmoe.runtime.measure import (
    RankReport,
    Span,
    Trial,
    forget_peak_memory,
    moment,
    peak_memory_gib,
    together,
)
from disagmoe.runtime.measured import clock_offset_s
from disagmoe.systems.pipelines import stages_of


class Runner(Protocol):
    """What runs steps of a peer on this rank."""

    def step(self, fetch: Fetch) -> NativeStep: ...

    def close(self) -> None: ...


def load(peer: Peer) -> None:
    """Import a peer's adapter, before ranks are forked: Megatron-Core takes seconds. Without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if peer is MEGATRON:
            import baselines.native.megatron.schedule  # noqa: F401
        else:
            import_module("tutel.moe")


def refusal(trial: Trial, device: str) -> str | None:
    """Why the peer of a plan cannot run it on `device`; None: it can."""
    layout = trial.plan.layout
    peer = peer_of(layout.system)
    if peer is None:
        return f"{layout.system} has no native implementation here; impl=both runs it on this suite's executor"
    if peer.installed is None:
        return peer.missing
    if Recompute.of(layout.options) != NO_RECOMPUTE:
        return f"the {peer.name} adapter recomputes nothing"
    try:
        if peer is MEGATRON:
            shape.check_runnable(trial.model, _shape(layout), trial.cut, trial.options.precision)
        else:
            _check_tutel(trial, device)
    except ValueError as error:
        return str(error)
    return None


def measure(context: Context, trial: Trial) -> RankReport:
    """Run a trial on this rank, by the peer of its system. Collective over the world."""
    forget_peak_memory(context.device)
    source = Synthetic(trial.model.vocab, trial.cut.seq, trial.options.seed)
    offset_s = clock_offset_s(context)
    took_s: list[float] = []
    steps: list[NativeStep] = []
    runner = _megatron(context, trial) if peer_of(trial.plan.layout.system) is MEGATRON else _tutel(context, trial)
    for step in range(trial.steps):
        first = step * trial.cut.sequences
        batch = source.samples(range(first, first + trial.cut.sequences))  # made before the clock starts
        begin_s = together(context)
        steps.append(runner.step(lambda wanted, batch=batch: batch[wanted.start : wanted.stop]))  # type: ignore[misc]
        end_s = moment(context) + offset_s
        took_s.append(end_s - Span.of(begin_s + offset_s, end_s, begin_s + offset_s).begin_s)
        context.beat()
    runner.close()
    return RankReport(
        tuple(took_s),
        tuple(step.loss for step in steps),
        peak_memory_gib(context.device),
        dropped=tuple(step.dropped for step in steps),
    )


def _megatron(context: Context, trial: Trial) -> Runner:
    from baselines.native.megatron.schedule import MegatronRunner

    options = trial.options
    return MegatronRunner(
        context, trial.model, _shape(trial.plan.layout), trial.cut, options.recipe,
        seed=options.seed, precision=options.precision,
    )  # fmt: skip


def _shape(layout: Layout) -> shape.Shape:
    return shape.Shape(
        pp=int(layout.options["pp"]),
        ep=layout.ep,
        dp=layout.batch.data_ranks,
        stage_layers=stages_of(layout),
        group=int(layout.options["group"]),
        overlap=layout.system == "megatron_1f1b_overlap",
    )


def _check_tutel(trial: Trial, device: str) -> None:
    layout = trial.plan.layout
    ranks, options = layout.placement.gpus_used, _tutel_options(layout)
    if int(layout.options["pp"]) != 1 or layout.ep != ranks:
        raise ValueError(
            f"Tutel has no pipeline and shares the experts over all ranks: pp={layout.options['pp']}, ep={layout.ep} "
            f"on {ranks} ranks; system.tutel.pp=1 ep={ranks} plans what it runs"
        )
    if options.degree > 1 and device == "cpu":
        raise ValueError(f"Tutel ignores the overlap degree on CPU: degree {options.degree} would be degree 1")
    trainer.check_runnable(trial.model, options, trial.cut, ranks, trial.options.precision)


def _tutel(context: Context, trial: Trial) -> Runner:
    options = trial.options
    return trainer.TutelRunner(
        context, trial.model, _tutel_options(trial.plan.layout), trial.cut, options.recipe,
        seed=options.seed, precision=options.precision,
    )  # fmt: skip


def _tutel_options(layout: Layout) -> TutelOptions:
    return TutelOptions(
        layout.chunks, "2dh" if layout.two_level else "linear", float(layout.options["capacity_factor"])
    )
