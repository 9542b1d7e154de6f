"""Training steps of a model whose experts are Tutel's.

Decides what stands around Tutel, which has no pipeline and no trainer: a batch is divided
over the ranks as for a colocated plan of one stage, dense gradients are summed over the
ranks, experts keep theirs, and AdamW updates both.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from baselines.native.coverage import require_covered
from baselines.native.peers import TUTEL
from baselines.native.result import NativeStep
from baselines.native.tutel.model import TutelModel, TutelOptions
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut, Fetch
from disagmoe.runtime.optimizer import Recipe
from disagmoe.specs import ModelSpec


class TutelRunner:
    """This rank's part of a Tutel run on all ranks of the world. Collective.

    `recipe` None computes gradients and updates nothing. Raises ValueError for a model
    or a batch that cannot be divided.
    """

    def __init__(
        self,
        context: Context,
        spec: ModelSpec,
        options: TutelOptions,
        cut: Cut,
        recipe: Recipe | None = None,
        *,
        seed: int = 0,
        precision: str = "fp32",
    ) -> None:
        check_runnable(spec, options, cut, context.world_size, precision)
        os.environ.setdefault("LOCAL_SIZE", str(context.local_size))  # what Tutel's 2DH takes for a node
        self.spec, self.options, self.cut, self.recipe = spec, options, cut, recipe
        self._device = context.device
        self._autocast = torch.autocast(context.device.type, torch.bfloat16, enabled=precision == "bf16")
        self.model = TutelModel(spec, options, context.device)
        self.slots = self.model.slots()
        self.load({name: slot.start(name, spec, seed) for name, slot in self.slots.items()})
        owned = {id(p) for ffn in self.model.moe_layers() for p in ffn.moe.experts.parameters()}
        self._experts = [p for p in self.model.parameters() if id(p) in owned]
        self._dense = [p for p in self.model.parameters() if id(p) not in owned]
        self._optimizer = None if recipe is None else self._adam(recipe)
        self.steps = 0

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite every parameter this rank holds; `values` by global name, others in it are ignored."""
        for name, slot in self.slots.items():
            slot.fill(values[name])

    def gradients(self) -> dict[str, Tensor]:
        """Global name -> complete gradient of every parameter this rank holds."""
        return {name: slot.gradient() for name, slot in self.slots.items()}

    def step(self, fetch: Fetch) -> NativeStep:
        """Run one step on the sequences that `fetch` gives."""
        self.model.zero_grad()
        batches = [self._inputs(fetch, microbatch) for microbatch in range(self.cut.microbatches)]
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # cross entropy, dropped pairs
        begin_s = time.perf_counter()
        for tokens in batches:
            with self._autocast:
                loss = self.model.loss(tokens[:, :-1], tokens[:, 1:])
            (loss / self.cut.tokens).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            sums[0] += loss.detach()
            sums[1] += self._dropped(tokens[:, 1:].numel())
        self._reduce()
        norm = self._update()
        seconds = time.perf_counter() - begin_s
        dist.all_reduce(sums)
        return NativeStep(float(sums[0]) / self.cut.tokens, norm, seconds, int(sums[1]))

    def close(self) -> None:
        """Nothing to give up: Tutel runs on the world."""

    def _inputs(self, fetch: Fetch, microbatch: int) -> Tensor:
        wanted = self.cut.sequences_of(0, microbatch)
        share = len(wanted) // self.model.ranks
        first = wanted.start + self.model.rank * share
        return fetch(range(first, first + share)).to(self._device)

    def _dropped(self, tokens: int) -> int:
        bound = self.options.bound(tokens, self.spec)
        if bound is None:
            return 0
        return sum(int((ffn.moe.dispatch_count - bound).clamp(min=0).sum()) for ffn in self.model.moe_layers())

    def _reduce(self) -> None:
        """Sum dense gradients over the ranks; an expert has had the tokens of all ranks already."""
        gradients = [_gradient(p) for p in self._dense]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for parameter, summed in zip(self._dense, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            parameter.grad = summed.view_as(parameter)

    def _adam(self, recipe: Recipe) -> torch.optim.AdamW:
        """Decay on matrices; Tutel's experts are stacks of them, kept flat."""
        matrices = {id(s.parameter) for name, s in self.slots.items() if len(s.shape) > 1}
        groups = [
            {"params": [p for p in self.model.parameters() if (id(p) in matrices) is decayed], "weight_decay": decay}
            for decayed, decay in ((True, recipe.weight_decay), (False, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.epsilon)

    def _update(self) -> float | None:
        if self._optimizer is None or self.recipe is None:
            return None
        dense, own = (sum(float(_gradient(p).square().sum()) for p in ps) for ps in (self._dense, self._experts))
        everywhere = torch.tensor(own, dtype=torch.float64, device=self._device)
        dist.all_reduce(everywhere)
        norm = math.sqrt(dense + float(everywhere))
        factor = self.recipe.clip_factor(norm)
        for parameter in (*self._dense, *self._experts):
            _gradient(parameter).mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.lr_at(self.steps)
        self._optimizer.step()
        self.steps += 1
        return norm


def check_runnable(spec: ModelSpec, options: TutelOptions, cut: Cut, ranks: int, precision: str = "fp32") -> None:
    """Raise ValueError where Tutel cannot run this on `ranks` ranks."""
    require_covered(TUTEL, spec)
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision {precision!r}: the Tutel adapter runs fp32 and bf16 (autocast)")
    if spec.experts % ranks:
        raise ValueError(f"Tutel needs the ranks to divide the experts: {spec.experts} experts, {ranks} ranks")
    pieces = ranks * cut.microbatches
    if cut.replicas != 1 or cut.sequences % pieces:
        raise ValueError(
            f"Tutel needs equally many tokens per rank: {cut.sequences} sequences over {cut.microbatches} "
            f"micro-batches on {ranks} ranks; allowed: multiples of {pieces}"
        )


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient; zeros that nothing refers to where there is none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
