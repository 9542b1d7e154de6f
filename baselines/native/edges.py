"""What peers and our own executor do where routing or batches are uneven: run and observed.

Decides the scenes and what is looked at. Two ranks share the experts of a small model;
router and embedding are set so that routing is known: feature 0 of every row is large and
of one sign, so that its router weight acts as a bias. The truth is the single-process
model. `bench/edge_cases.py` runs the scenes and writes the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from disagmoe.model import ReferenceModel
from disagmoe.model.experts import GroupedExperts
from disagmoe.plan.colocated import colocated_program
from disagmoe.plan.plan import Batch, Layout, Placement, Plan, Worker
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut
from disagmoe.runtime.step import RunOptions, StepRunner
from disagmoe.specs import ModelSpec, load_model

RANKS = 2
SEQ = 16
BIAS = 1.0
"""Router weight of feature 0: a distance of about 8 between logits, the rest of a logit is below 1."""


@dataclass(frozen=True)
class Scene:
    """`wanted` experts are preferred by every token, `shunned` ones by none; `sequences` of each rank."""

    name: str
    wanted: tuple[int, ...] = ()
    shunned: tuple[int, ...] = ()
    sequences: tuple[int, ...] = (2, 2)

    @property
    def spec(self) -> ModelSpec:
        return replace(load_model("tiny").with_layers(2), name="edges")

    @property
    def tokens(self) -> Tensor:
        """All sequences [sequences, seq + 1], rank after rank (near-equally, as our executor deals them)."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.spec.vocab, (sum(self.sequences), SEQ + 1), generator=generator)

    def values(self) -> dict[str, Tensor]:
        """Every parameter by global name."""
        values = {name: value.clone() for name, value in ReferenceModel(self.spec, 0).values().items()}
        values["embedding.weight"][:, 0] = 1.0
        for layer in range(self.spec.layers):
            router = values[f"layers.{layer}.router.weight"]
            router.mul_(20.0)
            router[:, 0] = 0.0
            router[list(self.wanted), 0] = BIAS
            router[list(self.shunned), 0] = -BIAS
        return values


SCENES = (
    Scene("zero-token expert", shunned=(5,)),
    Scene("skewed routing", wanted=(0, 1)),
    Scene("uneven tokens per rank", sequences=(2, 1)),
    Scene("a rank without tokens", sequences=(1, 0)),
)


@dataclass(frozen=True)
class Observation:
    """What a rank saw. Errors are relative to the single-process model, over all names it holds.

    `idle_gradient` is the largest gradient of a shunned expert here (None: none lives
    here), `rows` what the experts of this rank were given in the first MoE layer.
    """

    loss_error: float
    gradient_error: float
    idle_gradient: float | None
    rows: int
    dropped: int


def ours(context: Context, scene: Scene) -> Observation:
    """Our executor on a colocated plan of one stage."""
    spec, sequences = scene.spec, sum(scene.sequences)
    moe = [spec.is_moe(layer) for layer in range(spec.layers)]
    program = colocated_program(p=1, v=1, m=1, group=None, stage_layers=[range(spec.layers)], moe=moe)
    home = (0,) * spec.layers
    placement = Placement((Worker("P0", "AF", RANKS, 1, 1.0),), home, home, embed=0, head=0)
    layout = Layout("edges", "", placement, Batch(1, 1, RANKS), RANKS, "nccl", "none")
    with StepRunner(context, Plan(layout, program), spec, Cut(sequences, SEQ, 1, 1), RunOptions()) as runner:
        values = scene.values()
        for name, value in runner.values().items():
            value.copy_(values[name])
        experts = [m for part in runner.holdings.parts() for m in part.modules() if isinstance(m, GroupedExperts)]
        with _counted(experts[0], len) as rows:
            result = runner.step(lambda wanted: scene.tokens[wanted.start : wanted.stop])
        found = runner.gradients()
    return _observed(scene, result.report.loss, found, rows[0], 0)


def megatron(context: Context, scene: Scene) -> Observation:
    """Megatron-Core with pp = 1, ep = 2; the adapter's own check of equal batches is left out."""
    from baselines.native.megatron.model import unwrapped
    from baselines.native.megatron.schedule import MegatronRunner
    from baselines.native.megatron.shape import Shape

    class Uneven(MegatronRunner):
        def _inputs(self, fetch: Any, microbatch: int) -> Tensor:
            return _own(scene, context.rank)

    shape = Shape(1, RANKS, RANKS, (tuple(range(scene.spec.layers)),))
    with Uneven(context, scene.spec, shape, Cut(RANKS, SEQ, 1, 1)) as runner:
        runner.load(scene.values())
        experts = unwrapped(runner.chunks[0]).decoder.layers[0].mlp.experts
        with _counted(experts, len) as rows:
            step = runner.step(lambda wanted: scene.tokens)
        found = runner.gradients()
    return _observed(scene, step.loss, found, rows[0], 0)


def tutel(context: Context, scene: Scene, capacity_factor: float) -> Observation:
    """Tutel dropless (0) or with a capacity factor."""
    from baselines.native.tutel.model import TutelOptions
    from baselines.native.tutel.trainer import TutelRunner

    class Uneven(TutelRunner):
        def _inputs(self, fetch: Any, microbatch: int) -> Tensor:
            return _own(scene, context.rank)

    options = TutelOptions(capacity_factor=capacity_factor)
    runner = Uneven(context, scene.spec, options, Cut(RANKS, SEQ, 1, 1))
    runner.load(scene.values())
    experts = runner.model.moe_layers()[0].moe.experts
    with _counted(experts, lambda x: x.shape[0] * x.shape[1]) as rows:
        step = runner.step(lambda wanted: scene.tokens)
    scale = RANKS / sum(scene.sequences)  # the trainer divides by the tokens of the even batch it was told of
    found = {name: gradient * scale for name, gradient in runner.gradients().items()}
    return _observed(scene, step.loss * scale, found, rows[0], step.dropped)


def _own(scene: Scene, rank: int) -> Tensor:
    first = sum(scene.sequences[:rank])
    return scene.tokens[first : first + scene.sequences[rank]]


@contextmanager
def _counted(module: nn.Module, size: Callable[[Tensor], int]) -> Iterator[list[int]]:
    """How large the inputs of a module were, call by call."""
    seen: list[int] = []
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(size(inputs[0])))
    try:
        yield seen
    finally:
        hook.remove()


def _observed(scene: Scene, loss: float, found: dict[str, Tensor], rows: int, dropped: int) -> Observation:
    reference = ReferenceModel(scene.spec, 0)
    values = scene.values()
    for name, value in reference.values().items():
        value.copy_(values[name])
    tokens = scene.tokens
    report = reference.accumulate([(tokens[:, :-1], tokens[:, 1:])])
    truth = reference.gradients()
    total = torch.sqrt(sum((g.square().sum() for g in truth.values()), torch.zeros(())))
    error = torch.sqrt(sum(((found[n] - truth[n]).square().sum() for n in found), torch.zeros(())))
    idle = [
        float(gradient.abs().max())
        for name, gradient in found.items()
        if any(f".experts.{expert}." in name for expert in scene.shunned)
    ]
    return Observation(abs(loss / report.loss - 1.0), float(error / total), max(idle) if idle else None, rows, dropped)
