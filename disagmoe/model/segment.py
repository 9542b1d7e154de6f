"""Running one part cut off from the rest: forward now, backward by hand later.

Decides where autograd ends. The inputs of a segment are detached leaves, its
outputs are handed on detached; what connects segments is the runtime, which
carries tensors and gradients. `Saved` is the handle between the two passes: one
full backward (B), or its input half (I) followed by its weight half (W).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate

import torch
from torch import Tensor

from disagmoe.model.deferred import Tape

Gradient = Tensor | float | None
"""Gradient of one output: a tensor, one number for all of its entries, or None (zero)."""


class Saved:
    """What a forward pass keeps for its backward pass. Used once.

    Parameter gradients are added to `.grad`. Input gradients come back in the
    order of the inputs, zeros where an input did not matter.
    """

    def __init__(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], tape: Tape) -> None:
        self._inputs = inputs
        self._outputs: tuple[Tensor, ...] | None = outputs
        self._tape = tape
        self._weights_due = False

    def backward(self, *gradients: Gradient) -> tuple[Tensor, ...]:
        """Phase B: gradients of the outputs -> gradients of the floating-point inputs."""
        return self._differentiate(gradients, defer=False)

    def backward_input(self, *gradients: Gradient) -> tuple[Tensor, ...]:
        """Phase I: as `backward`, but the weight multiplies wait for `backward_weight`."""
        found = self._differentiate(gradients, defer=True)
        self._weights_due = True
        return found

    def backward_weight(self) -> None:
        """Phase W: add the weight gradients that phase I left."""
        if not self._weights_due:
            raise RuntimeError("the weight half of a backward pass comes once, after its input half")
        self._weights_due = False
        self._tape.run()

    def _differentiate(self, gradients: tuple[Gradient, ...], *, defer: bool) -> tuple[Tensor, ...]:
        outputs, self._outputs = self._outputs, None
        if outputs is None:
            raise RuntimeError("this forward pass was already differentiated")
        if len(gradients) != len(outputs):
            raise ValueError(f"{len(gradients)} gradients for {len(outputs)} outputs")
        pairs = [(out, _as_tensor(out, grad)) for out, grad in zip(outputs, gradients, strict=True) if grad is not None]
        self._tape.deferring = defer
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        self._tape.deferring = False
        inputs, self._inputs = self._inputs, ()
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)


def _as_tensor(output: Tensor, gradient: Tensor | float) -> Tensor:
    if not isinstance(gradient, Tensor):
        return torch.full_like(output, gradient)
    if gradient.shape != output.shape:
        raise ValueError(f"gradient of shape {tuple(gradient.shape)} for an output of shape {tuple(output.shape)}")
    return gradient.to(output.dtype)


def run_segment(
    forward: Callable[Concatenate[Tape, ...], tuple[Tensor, ...]], *inputs: Tensor
) -> tuple[tuple[Tensor, ...], Saved]:
    """Call `forward(tape, *leaves)` on detached inputs -> detached outputs and the handle for backward."""
    tape = Tape()
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        outputs = forward(tape, *leaves)
    return tuple(out.detach() for out in outputs), Saved(leaves, outputs, tape)
