"""Linear layers whose weight gradient may be computed later.

Decides what the two halves of a backward pass are. The input half (I) runs
autograd and pushes the weight gradient of every matrix multiply (and embedding)
on a `Tape`; the weight half (W) runs the tape. W therefore costs just the weight
multiplies and keeps only their two operands, as in DualPipe's WeightGradStore.
Gradients of norms and sinks are sums over rows and stay in I.

Types are explicit: a multiply runs in the type of its input, or in the autocast
type where autocast is on, and gradients return in the type of what they belong
to. Without a tape everything is plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Tape:
    """Weight gradients of one forward pass: added to `.grad` at once, or when the tape runs.

    `deferring` is set by the owner for the input half of a backward pass.
    """

    def __init__(self) -> None:
        self.deferring = False
        self._pending: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, parameter: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Add `gradient()` to the gradient of `parameter`, now or later."""
        if self.deferring:
            self._pending.append((parameter, gradient))
        else:
            accumulate(parameter, gradient())

    @torch.no_grad()
    def run(self) -> None:
        """Compute what was deferred, in the order of the backward pass, releasing each operand after its use."""
        pending = self._pending
        pending.reverse()
        while pending:
            parameter, gradient = pending.pop()
            with exact(parameter):
                accumulate(parameter, gradient())


@torch.no_grad()
def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to `parameter.grad`."""
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


def give(tape: Tape | None, parameter: Tensor, gradient: Callable[[], Tensor]) -> Tensor | None:
    """Inside a backward function: the gradient itself for autograd, or None after handing it to the tape."""
    if tape is None:
        return gradient().to(parameter.dtype)
    tape.add(parameter, gradient)
    return None


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which a multiply of `x` runs: autocast's where it is on, otherwise that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def exact(x: Tensor) -> torch.autocast:
    """A context without autocast: types inside are as written."""
    return torch.autocast(device_type=x.device.type, enabled=False)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tape: Tape | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out] -> [rows, out] in `dtype`.

    `dtype` None: `compute_dtype(x)`.
    """
    result: Tensor = _Linear.apply(x, weight, bias, tape, dtype or compute_dtype(x))  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tape: Tape | None, dtype: torch.dtype
    ) -> Tensor:
        with exact(x):
            operand = x.to(dtype)
            ctx.save_for_backward(operand, weight, bias)
            ctx.tape, ctx.input_dtype = tape, x.dtype
            return torch.nn.functional.linear(operand, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        x = x.detach()  # a deferred gradient must not keep the graph alive
        with exact(x):
            grad_x = None
            if ctx.needs_input_grad[0]:
                grad_x = (grad @ weight.to(grad.dtype)).to(ctx.input_dtype)
            grad_weight = grad_bias = None
            if ctx.needs_input_grad[1]:
                grad_weight = give(ctx.tape, weight, lambda: grad.t() @ x)
            if bias is not None and ctx.needs_input_grad[2]:
                grad_bias = give(ctx.tape, bias, lambda: grad.sum(0, dtype=bias.dtype))
        return grad_x, grad_weight, grad_bias, None, None


def look_up(table: Tensor, index: Tensor, *, tape: Tape | None = None) -> Tensor:
    """Rows `index` [rows] of `table` [entries, width] -> [rows, width]."""
    result: Tensor = _LookUp.apply(table, index, tape)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, tape: Tape | None) -> Tensor:
        ctx.save_for_backward(table, index)
        ctx.tape = tape
        return table[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        table, index = ctx.saved_tensors
        return (
            give(ctx.tape, table, lambda: torch.zeros_like(table).index_add_(0, index, grad.to(table.dtype))),
            None,
            None,
        )
