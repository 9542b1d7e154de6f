"""The single-process model that a peer's step is compared with, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from baselines.native.result import NativeStep
from disagmoe.model import LossReport, ReferenceModel
from disagmoe.runtime.cut import Cut
from disagmoe.specs import ModelSpec
from tests.model.shapes import BASE, FAMILIES, scramble

SPECS: dict[str, ModelSpec] = {
    "qwen3": BASE,
    "mixtral": FAMILIES["mixtral"],
    "deepseek": FAMILIES["deepseek"],
    "after_topk": replace(BASE, scoring="softmax_after_topk", routed_scaling_factor=1.5),
    "sigmoid": replace(BASE, scoring="sigmoid", routed_scaling_factor=2.5, shared_width=4),
    "interleaved_rope": replace(BASE, family="deepseek_v2", kv_heads=4, head_dim=4),
}
MARGIN = 1e-4
"""Least distance between the last chosen and the first rejected router logit: rounding cannot flip a choice."""


@dataclass(frozen=True)
class Case:
    """A step of `microbatches` micro-batches on `pp` x `dp` ranks, `dp` None: ep."""

    pp: int = 1
    virtual: int = 1
    ep: int = 1
    dp: int | None = None
    family: str = "qwen3"
    layers: int = 4
    microbatches: int = 4
    each: int = 2  # sequences of a micro-batch on one rank
    seq: int = 5
    overlap: bool = False
    group: int | None = None
    seed: int = 0

    @property
    def spec(self) -> ModelSpec:
        spec = SPECS[self.family]
        return replace(spec, layers=self.layers, windowed_layers=())

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Layers of every virtual stage, near-equal."""
        count = self.pp * self.virtual
        return tuple(tuple(i for i in range(self.layers) if i * count // self.layers == s) for s in range(count))

    @property
    def replicas(self) -> int:
        """Ranks of a stage that take different sequences."""
        return self.dp or self.ep

    @property
    def ranks(self) -> int:
        return self.pp * self.replicas

    @property
    def cut(self) -> Cut:
        return Cut(self.microbatches * self.replicas * self.each, self.seq, 1, self.microbatches)

    @property
    def tokens(self) -> Tensor:
        """All sequences [sequences, seq + 1]."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, self.spec.vocab, (self.cut.sequences, self.seq + 1), generator=generator)


@dataclass
class Truth:
    """The single-process model of a case, filled with values that leave no term at zero."""

    case: Case

    @cached_property
    def model(self) -> ReferenceModel:
        model = ReferenceModel(self.case.spec, 0)
        for part in model.parts():
            scramble(part)
        return model

    @cached_property
    def report(self) -> LossReport:
        tokens = self.case.tokens
        return self.model.accumulate([(tokens[:, :-1], tokens[:, 1:])])

    def margin(self) -> float:
        """The smallest distance between a chosen and a rejected expert, in the score that decides."""
        margins: list[float] = []

        def note(router: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            scores = (inputs[0] @ router.weight.t()).sort(-1, descending=True).values
            k = self.case.spec.top_k
            margins.append(float((scores[:, k - 1] - scores[:, k]).min()))

        hooks = [a.router.register_forward_pre_hook(note) for a, _ in self.model.layer_parts() if a.router is not None]
        with torch.no_grad():
            self.model.trunk(self.case.tokens[:, :-1])
        for hook in hooks:
            hook.remove()
        return min(margins)


def clear_choices(case: Case) -> Case:
    """`case` with the first batch in which every choice of experts is clear."""
    cases = (replace(case, seed=seed) for seed in range(100))
    return next(each for each in cases if Truth(each).margin() > MARGIN)


@dataclass(frozen=True)
class Found:
    """What one rank found. `gradient` is the largest |difference| / |gradient| over names, norms over a tensor."""

    loss: float
    expected: float
    gradient: float
    worst: str
    names: frozenset[str]
    order: str


def compare(truth: Truth, step: NativeStep, found: Mapping[str, Tensor], order: str) -> Found:
    """The findings of one rank that holds the gradients `found`."""
    report, gradients = truth.report, truth.model.gradients()
    errors = {name: float((found[name] - gradients[name]).norm() / gradients[name].norm()) for name in found}
    worst = max(errors, key=errors.__getitem__)
    return Found(step.loss, report.loss, errors[worst], worst, frozenset(found), order)
