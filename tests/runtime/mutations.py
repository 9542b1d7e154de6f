"""Deliberate faults of a distributed step. Each must be noticed by the comparison with the single-process model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from disagmoe.model import AttentionPart, ExpertPart, Saved
from disagmoe.ops import Kind
from disagmoe.runtime.attention_ops import AttentionOps
from disagmoe.runtime.buckets import Bucket
from disagmoe.runtime.child import Context
from disagmoe.runtime.cut import StepBatch
from disagmoe.runtime.exchange import Exchange
from disagmoe.runtime.expert_ops import ExpertOps
from disagmoe.runtime.route import End
from tests.runtime.training_cases import Case, Outcome, one_step


def _after(target: Any, name: str, change: Any) -> Any:
    """Let a method's result go through `change`."""
    whole = getattr(target, name)
    return mock.patch.object(target, name, lambda *args, **kwargs: change(whole(*args, **kwargs)))


def gate_path_dropped() -> Any:
    """Gate weights get no gradient back from the experts."""
    drop = lambda found: found and (found[0], None if found[1] is None else torch.zeros_like(found[1]))  # noqa: E731
    return _after(Exchange, "dispatch_backward", drop)


def not_reduced(*purposes: str) -> Any:
    """Gradients that several ranks hold are not summed."""
    whole = Bucket.reduce
    return mock.patch.object(Bucket, "reduce", lambda self: self.share.purpose in purposes or whole(self))


def residual_twice() -> Any:
    """Every rank that gets a copy of a row adds the residual, not only its home."""
    whole = ExpertOps._run

    def run(self: ExpertOps, part: ExpertPart, arrived: Any, *args: Any, **kwargs: Any) -> Tensor:
        everywhere = replace(arrived, home=torch.arange(arrived.rows.shape[0]))
        return whole(self, part, everywhere, *args, **kwargs)

    return mock.patch.object(ExpertOps, "_run", run)


def one_copy_comes_back() -> Any:
    """Of the gradients of a token's copies only the first is used."""

    def first(self: End, wire: Tensor, dtype: torch.dtype) -> Tensor:
        if self.order is None:
            return wire
        total = wire.new_zeros(self.size, *wire.shape[1:])
        for place in reversed(range(wire.shape[0])):
            total[self.order[place]] = wire[place]
        return total

    return mock.patch.object(End, "add_up", first)


def micro_batch_mean() -> Any:
    """The loss of every micro-batch is a mean of its own."""
    return _set_up(lambda self: setattr(self, "_token_scale", self._token_scale * self._batch.cut.microbatches))


def balance_not_attached() -> Any:
    """The balance loss is reported but has no gradient."""
    return _set_up(lambda self: setattr(self, "_balance_scale", None))


def _set_up(change: Any) -> Any:
    whole = AttentionOps.__init__

    def init(self: AttentionOps, *args: Any) -> None:
        whole(self, *args)
        change(self)

    return mock.patch.object(AttentionOps, "__init__", init)


def last_micro_batch_lost() -> Any:
    """Gradients of the last micro-batch's attention are computed and thrown away."""
    whole = AttentionOps.attention

    def attention(self: AttentionOps, op: Any) -> None:
        lost = op.phase != 0 and op.microbatch == self._batch.cut.microbatches - 1
        with mock.patch.object(Saved, "backward", _without_gradients) if lost else ExitStack():
            whole(self, op)

    return mock.patch.object(AttentionOps, "attention", attention)


def _without_gradients(self: Saved, *gradients: Any) -> tuple[Tensor, ...]:
    return self.backward_input(*[torch.zeros_like(g) if isinstance(g, Tensor) else g for g in gradients])


def routed_twice() -> Any:
    """What is recomputed chooses its experts again, and chooses otherwise."""
    whole = AttentionPart.start

    def start(self: AttentionPart, x: Tensor, seq: int, chosen: Tensor | None = None) -> Any:
        if chosen is not None:
            chosen = (chosen + 1) % self.router.spec.experts  # type: ignore[union-attr]
        return whole(self, x, seq, chosen)

    return mock.patch.object(AttentionPart, "start", start)


def targets_not_shifted() -> Any:
    """Every token is asked for itself."""
    return mock.patch.object(StepBatch, "targets", StepBatch.inputs)


MUTATIONS = {
    "gate path dropped": (gate_path_dropped, Case(n=2)),
    "shared norm not summed": (lambda: not_reduced("norm"), Case()),
    "attention replicas not summed": (lambda: not_reduced("dense"), Case(m=2)),
    "shared experts not summed": (lambda: not_reduced("dense"), Case(n=2, family="deepseek")),
    "experts not summed over replicas": (lambda: not_reduced("expert"), Case(dp=2)),
    "tied matrix not summed": (lambda: not_reduced("tied"), Case(family="tied_all_experts")),
    "residual added twice": (residual_twice, Case(n=2)),
    "one copy comes back": (one_copy_comes_back, Case(n=2)),
    "mean per micro-batch": (micro_batch_mean, Case()),
    "last micro-batch lost": (last_micro_batch_lost, Case()),
    "balance loss not attached": (balance_not_attached, Case()),
    "recompute routes again": (routed_twice, Case(recompute=(Kind.ATTN,))),
    "targets not shifted": (targets_not_shifted, Case()),
}


def faulty_step(context: Context, name: str) -> Outcome:
    """One step with a fault; collective."""
    fault, case = MUTATIONS[name]
    with fault():
        return one_step(context, case)
