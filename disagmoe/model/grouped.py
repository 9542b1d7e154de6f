"""Matrix multiplies of rows grouped by expert.

Rows come sorted by expert, `counts` says how many each has (host integers: they
are known from the exchange). torch's grouped kernel is used where it takes the
types and strides, one multiply per expert elsewhere; both give an idle expert a
gradient of exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from disagmoe.model.deferred import Tape, compute_dtype, exact, give

ALIGNMENT_BYTES = 16
"""Row strides the grouped kernel demands are multiples of this."""

_kernel: Callable[..., Tensor] | None = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int], *, tape: Tape | None = None
) -> Tensor:
    """x [n, in], weight [experts, out, in], bias [experts, out] -> [n, out].

    Row i belongs to the expert whose run of `counts` it falls in; counts sum to n.
    """
    if len(counts) != weight.shape[0] or sum(counts) != x.shape[0]:
        raise ValueError(f"counts {list(counts)} do not fit {x.shape[0]} rows of {weight.shape[0]} experts")
    dtype = compute_dtype(x)
    result: Tensor = _GroupedLinear.apply(x, weight, bias, tuple(counts), tape, dtype)  # type: ignore[no-untyped-call]
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: tuple[int, ...],
        tape: Tape | None,
        dtype: torch.dtype,
    ) -> Tensor:
        with exact(x):
            operand = x.to(dtype).contiguous()
            ctx.save_for_backward(operand, weight, bias)
            ctx.tape, ctx.counts, ctx.input_dtype = tape, counts, x.dtype
            result = multiply(operand, weight.to(dtype).transpose(1, 2), counts)
            if bias is not None:
                result += bias.to(dtype).repeat_interleave(torch.tensor(counts, device=x.device), dim=0)
            return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        x = x.detach()  # a deferred gradient must not keep the graph alive
        counts = ctx.counts
        # The grouped kernel refuses broadcast gradients (those of a sum, for one).
        grad = grad.contiguous()
        with exact(x):
            grad_x = grad_weight = grad_bias = None
            if ctx.needs_input_grad[0]:
                grad_x = multiply(grad, weight.to(grad.dtype), counts).to(ctx.input_dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = give(ctx.tape, weight, lambda: outer(grad, x, counts))
            if bias is not None and ctx.needs_input_grad[2]:
                grad_bias = give(ctx.tape, bias, lambda: sums(grad, counts, bias.dtype))
        return grad_x, grad_weight, grad_bias, None, None, None


def multiply(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """x [n, a] by matrices [experts, a, b], each row by its expert's -> [n, b]."""
    if _kernel is not None and kernel_takes(x, matrices.shape[1], matrices.shape[2]):
        return _kernel(x, matrices, offs=_offsets(counts, x.device))
    return multiply_one_by_one(x, matrices, counts)


def multiply_one_by_one(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """As `multiply`, one expert after the other."""
    result = x.new_empty(x.shape[0], matrices.shape[2])
    for expert, rows in _runs(counts):
        torch.mm(x[rows], matrices[expert], out=result[rows])
    return result


def outer(left: Tensor, right: Tensor, counts: Sequence[int]) -> Tensor:
    """left [n, a], right [n, b] -> [experts, a, b]: per expert left^T right over its rows, zero where it has none."""
    if _kernel is not None and kernel_takes(left, left.shape[1], right.shape[1]):
        result = _kernel(left.t(), right, offs=_offsets(counts, left.device))
        idle = [expert for expert, count in enumerate(counts) if count == 0]
        if idle:  # not every build of the kernel writes what has no rows
            result[idle] = 0
        return result
    return outer_one_by_one(left, right, counts)


def outer_one_by_one(left: Tensor, right: Tensor, counts: Sequence[int]) -> Tensor:
    """As `outer`, one expert after the other."""
    result = left.new_zeros(len(counts), left.shape[1], right.shape[1])
    for expert, rows in _runs(counts):
        torch.mm(left[rows].t(), right[rows], out=result[expert])
    return result


def kernel_takes(x: Tensor, *widths: int) -> bool:
    """Whether the grouped kernel takes rows like those of `x`, with matrices of these widths."""
    if x.shape[0] == 0 or any(width * x.element_size() % ALIGNMENT_BYTES for width in widths):
        return False
    if x.device.type == "cuda":
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def _runs(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of every expert that has any."""
    for expert, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        if count:
            yield expert, slice(end - count, end)


def _offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


def sums(rows: Tensor, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Sum of the rows of each expert [experts, width]."""
    result = rows.new_zeros(len(counts), rows.shape[1], dtype=dtype)
    for expert, run in _runs(counts):
        result[expert] = rows[run].sum(0, dtype=dtype)
    return result
