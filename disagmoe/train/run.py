"""From a TrainConfig to a finished run: checked first, then started, on one machine or as one rank of many.

Decides what is checked before any process starts: model, ring, plan, batch, data
and options. Processes of torchrun or Slurm find their place in the environment;
otherwise this process forks all ranks on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from disagmoe.model import LossWeights
from disagmoe.plan.plan import Plan
from disagmoe.plan.verify import verify
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.data import Source, make_source
from disagmoe.runtime.environment import init_from_environment
from disagmoe.runtime.launch import spawn
from disagmoe.runtime.metrics_log import StepMetrics
from disagmoe.runtime.optimizer import Recipe
from disagmoe.runtime.single import train_single
from disagmoe.runtime.step import RunOptions
from disagmoe.runtime.trainer import Course, train
from disagmoe.specs import ModelSpec, device
from disagmoe.train.config import RECOMPUTED, TrainConfig
from disagmoe.train.plan import ring_plan


@dataclass(frozen=True)
class Prepared:
    """Everything a rank needs, checked."""

    config: TrainConfig
    spec: ModelSpec
    plan: Plan
    cut: Cut
    options: RunOptions
    course: Course
    source: Source


def prepare(config: TrainConfig) -> Prepared:
    """Check a configuration as a whole. Raises ValueError in one line."""
    _check_device(config.device)
    spec = config.spec
    cut = Cut(config.batch, config.seq, config.shape.dp, config.microbatches)
    plan = ring_plan(
        spec,
        config.shape,
        microbatches=config.microbatches,
        sequences=config.batch,
        order=config.order,
        group=config.group,
        head=config.head,
        compute_streams=config.compute_streams,
        merge=config.merge,
        recompute=RECOMPUTED[config.recompute],
    )
    verify(plan)
    recipe = Recipe(
        lr=config.lr,
        min_lr=config.lowest_lr,
        warmup=config.warmup,
        steps=config.steps,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        clip=config.clip,
    )
    options = RunOptions(
        seed=config.seed,
        precision=config.precision,
        weights=LossWeights(config.balance, config.z),
        recipe=recipe,
        bias_rate=config.bias_rate,
        transport=config.transport,
        node_size=config.node_size,
        timeout_s=config.timeout_s,
    )
    course = Course(
        config.steps,
        config.folder,
        config.save_every,
        config.keep,
        config.resume,
        show_every=config.log_every,
        peak_device=None if config.peak is None else device(config.peak).name,
    )
    source = make_source(
        config.data,
        vocab=spec.vocab,
        seq=config.seq,
        seed=config.seed,
        path=config.path,
        token_type=config.token_type,
    )
    return Prepared(config, spec, plan, cut, options, course, source)


def _check_device(name: str) -> None:
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is unknown; allowed: cpu, cuda")
    if name == "cuda" and not torch.cuda.device_count():  # does not initialise CUDA, so ranks can still be forked
        raise ValueError("device=cuda, but torch finds no CUDA device here; device=cpu runs without one")


def train_rank(context: Context, prepared: Prepared) -> list[StepMetrics]:
    """The whole run on one rank."""
    what = prepared
    return train(context, what.plan, what.spec, what.cut, what.options, what.source, what.course)


def start(prepared: Prepared, say: Callable[[str], None]) -> list[StepMetrics]:
    """Run it; the metrics of every step that was run now (of this rank, where others started the processes)."""
    config = prepared.config
    if config.single:
        torch.set_num_threads(config.threads)
        return train_single(prepared.spec, prepared.options, prepared.source, prepared.course, config.batch, config.seq)
    say(_headline(prepared))
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        context = init_from_environment(device=config.device, group_timeout_s=config.timeout_s)
        return train_rank(context, prepared)
    return spawn(
        config.shape.ranks,
        train_rank,
        (prepared,),
        timeout_s=None,
        silence_s=max(120.0, 4 * config.timeout_s),
        group_timeout_s=config.timeout_s,
        threads=config.threads,
        device=config.device,
    )[0]


def _headline(prepared: Prepared) -> str:
    config, spec = prepared.config, prepared.spec
    return (
        f"{spec.title}: {config.shape.ranks} ranks = {config.dp} x {config.p} x ({config.m} A + {config.n} F), "
        f"{config.batch} sequences of {config.seq} tokens in {config.microbatches} micro-batches, {config.precision}, "
        f"{prepared.source.title} -> {prepared.course.folder}"
    )
