"""Training steps of Megatron-Core's own schedule, DDP and distributed optimizer.

Decides what Megatron is handed: an iterator of micro-batches per model chunk, the mean
loss of a micro-batch, our starting values, our learning rates. The batch is cut as for a
colocated plan of ours: micro-batch i is a run of consecutive sequences, divided over the
ranks of a stage in order. What it cannot run is refused before anything is built.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from baselines.native.megatron import compat
from baselines.native.megatron.model import build_chunks, local_experts, start_parallel, transformer_config, unwrapped
from baselines.native.megatron.recorder import Recorder
from baselines.native.megatron.shape import TYPES, Shape, check_runnable
from baselines.native.megatron.weights import slots_of
from baselines.native.result import NativeStep
from baselines.native.slot import Slot
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import Cut, Fetch
from disagmoe.runtime.optimizer import Recipe
from disagmoe.specs import ModelSpec


class MegatronRunner:
    """This rank's part of a Megatron-Core run. Collective over the world; use as a context manager.

    `recipe` None computes gradients and updates nothing. Raises ValueError for a model
    or a batch that Megatron cannot run.
    """

    def __init__(
        self,
        context: Context,
        spec: ModelSpec,
        shape: Shape,
        cut: Cut,
        recipe: Recipe | None = None,
        *,
        seed: int = 0,
        precision: str = "fp32",
    ) -> None:
        if context.world_size != shape.ranks:
            raise ValueError(
                f"pp={shape.pp} with {shape.dp} ranks per stage needs {shape.ranks}, not {context.world_size}"
            )
        check_runnable(spec, shape, cut, precision)
        self.spec, self.shape, self.cut, self.recipe = spec, shape, cut, recipe
        self._device = context.device
        self.steps = 0
        with compat.on(self._device):
            start_parallel(shape)
            self._config = transformer_config(spec, shape, self._device, precision)
            self.chunks = build_chunks(spec, self._config, shape, cut.seq, self._device)
            self._optimizer = _optimizer(self.chunks, recipe, precision) if recipe else None
            self.slots = self._slots()
            self.load({name: slot.start(name, spec, seed) for name, slot in self.slots.items()})

    def step(self, fetch: Fetch) -> NativeStep:
        """Run one step on the sequences that `fetch` gives."""
        with compat.on(self._device):
            return self._step(fetch)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite every parameter this rank holds; `values` by global name, others in it are ignored."""
        for name, slot in self.slots.items():
            slot.fill(values[name])
        if self._optimizer:
            self._optimizer.reload_model_params()  # it keeps copies

    def values(self) -> dict[str, Tensor]:
        """Global name -> copy of every parameter this rank holds."""
        return {name: slot.value() for name, slot in self.slots.items()}

    def gradients(self) -> dict[str, Tensor]:
        """As `values`, the complete gradients. Collective; for inspection."""
        for chunk in self.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for bucket in buffer.buckets:
                    _gather(bucket.grad_data, buffer.data_parallel_group)
        return {name: slot.gradient() for name, slot in self.slots.items()}

    def close(self) -> None:
        """Give up Megatron's process groups."""
        parallel_state.destroy_model_parallel()

    def __enter__(self) -> MegatronRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _slots(self) -> dict[str, Slot]:
        first = local_experts(self.spec, self.shape).start
        return {name: slot for c in self.chunks for name, slot in slots_of(unwrapped(c), self.spec, first).items()}

    def _step(self, fetch: Fetch) -> NativeStep:
        recorder = Recorder([unwrapped(chunk) for chunk in self.chunks], combined=self.shape.overlap)
        self._config.timers = recorder
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        batches = [self._inputs(fetch, microbatch) for microbatch in range(self.cut.microbatches)]
        many = self.shape.interleaved
        begin_s = time.perf_counter()
        losses = get_forward_backward_func()(
            forward_step_func=partial(_forward, recorder),
            data_iterator=[enumerate(batches) for _ in self.chunks] if many else enumerate(batches),
            model=self.chunks if many else self.chunks[0],
            num_microbatches=self.cut.microbatches,
            seq_length=self.cut.seq,
            micro_batch_size=self._sequences,
            forward_only=False,
        )
        norm = self._update()
        seconds = time.perf_counter() - begin_s
        recorder.close()
        return NativeStep(self._mean(losses), norm, seconds, actions=tuple(recorder.actions))

    @property
    def _sequences(self) -> int:
        """Sequences of one micro-batch on one rank."""
        return self.cut.sequences // (self.shape.dp * self.cut.microbatches)

    def _inputs(self, fetch: Fetch, microbatch: int) -> Tensor:
        first = self.cut.sequences_of(0, microbatch).start
        first += parallel_state.get_data_parallel_rank() * self._sequences
        return fetch(range(first, first + self._sequences)).to(self._device)

    def _update(self) -> float | None:
        """Megatron's optimizer step; the norm before clipping."""
        if self._optimizer is None or self.recipe is None:
            return None
        for group in self._optimizer.param_groups:  # both are set by Megatron's scheduler in its own training loop
            group["lr"] = self.recipe.lr_at(self.steps)
            group["weight_decay"] = self.recipe.weight_decay * group["wd_mult"]
        self.steps += 1
        _, norm, _ = self._optimizer.step()
        return None if norm is None else float(norm)

    def _mean(self, losses: list[Tensor]) -> float:
        """Mean over micro-batches and over the ranks of the last stage, which alone have losses."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss
        dist.all_reduce(total)
        return float(total) / (self.shape.dp * self.cut.microbatches)


def _optimizer(chunks: list[Any], recipe: Recipe, precision: str) -> Any:
    """Adam with decoupled weight decay on matrices, clipping by global norm, state sharded over replicas."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=recipe.lr,
        min_lr=recipe.min_lr,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        adam_eps=recipe.epsilon,
        clip_grad=recipe.clip,
        bf16=precision == "bf16",
        params_dtype=TYPES[precision],
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def _forward(
    recorder: Recorder, batches: Iterator[tuple[int, Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Megatron's forward step: run a chunk on its next micro-batch (combined 1F1B: say how it is run)."""
    microbatch, tokens = next(batches)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    arguments = {"input_ids": inputs, "position_ids": positions, "attention_mask": None, "labels": targets}
    recorder.forward(unwrapped(model), microbatch)
    if return_schedule_plan:
        return model.build_schedule_plan(**arguments), _mean_loss
    output = model(**arguments)
    recorder.output(output)
    return output, _mean_loss


def _mean_loss(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [sequences, seq] -> their mean, for autograd and for the report."""
    mean = losses.mean()
    return mean, mean.detach().clone()


def _gather(gradients: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank of `group` holds the reduced gradient of its shard; give all of them to all."""
    shards = list(gradients.chunk(dist.get_world_size(group)))
    dist.all_gather(shards, shards[dist.get_rank(group)].clone(), group=group)
