"""The experts of one rank computed tile by tile, as a fused exchange needs them (Comet).

Decides how the two multiplies of an expert are cut. Forward, the first is cut
along rows: every group of rows is computed when it has arrived. The second is cut
along its output columns, since a finished column can be summed and sent while the
next is computed; a column needs the rows of all groups. Backward mirrors this: the
gradient of the second multiply's input runs group by group as gradients arrive,
that of the first multiply's input column block by column block, and the weight
gradients come last. Column blocks of a gradient cannot pass the norm (it mixes
all columns of a row), so what leaves is the gradient of the normed rows; whoever
owns a row takes it through the norm. The owner also adds the residual's gradient.

Gradients are written out: autograd has no notion of half a multiply. The
activation alone goes through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import silu

from disagmoe.model.block import ExpertPart
from disagmoe.model.deferred import accumulate as add_gradient
from disagmoe.model.deferred import compute_dtype, exact
from disagmoe.model.experts import GroupedExperts, Mlp, activate
from disagmoe.model.grouped import multiply, outer, sums
from disagmoe.model.parts import accumulation_dtype


def column_ranges(width: int, columns: int) -> tuple[slice, ...]:
    """Near-equal blocks of `width` columns; some are empty where there are fewer columns than blocks."""
    size, larger = divmod(width, columns)
    ends = list(accumulate(size + (i < larger) for i in range(columns)))
    return tuple(slice(end - size - (i < larger), end) for i, end in enumerate(ends))


@dataclass
class _Group:
    """Rows of one arrival: [r] rows, [p] pairs of a row and a local expert, sorted by expert; [n] rows at home here."""

    rows: int
    row: Tensor  # [p] of each pair
    cell: Tensor  # [p] place of each pair in the flattened ids
    slot: Tensor  # [p] local expert
    weight: Tensor  # [p] gate weight
    shape: torch.Size  # of the ids
    home: Tensor  # [n]
    own: Tensor  # [n, hidden] rows at home
    normed: Tensor  # [r, hidden]
    fused: Tensor  # [p, 2 width] gate and up
    shared: Tensor | None  # [n, 2 shared width]


@dataclass
class _Inner:
    """What is between the two multiplies, of all groups; `order` sorts their pairs by expert."""

    order: Tensor
    counts: list[int]
    row: Tensor  # [P] in that order
    weight: Tensor  # [P]
    leaf: Tensor  # [P, 2 width]
    value: Tensor  # [P, width], with its graph
    home: Tensor  # [N]
    own: Tensor  # [N, hidden]
    shared_leaf: Tensor | None
    shared: Tensor | None


class TiledExperts:
    """One pass of one micro-batch through the experts of one rank, `columns` blocks in the second half.

    Calls come in this order: `first` per group, `second` per column, then
    `first_back` per group, `second_back` per column, `weight_back`. Rows of all
    groups are numbered one after the other.
    """

    def __init__(self, part: ExpertPart, columns: int) -> None:
        if part.experts is None:
            raise ValueError(f"layer {part.layer} is dense: there are no experts to cut into tiles")
        self._part = part
        self._experts: GroupedExperts = part.experts
        self._shared: Mlp | None = part.shared
        self._groups: list[_Group] = []
        self._inner: _Inner | None = None
        self._grads: list[Tensor] = []  # of the results, group by group
        self._grad_fused: list[Tensor] = []
        self._grad_shared: Tensor | None = None
        self._fused: Tensor | None = None
        self.ranges = column_ranges(part.ffn_norm.weight.shape[0], columns)

    @property
    def rows(self) -> int:
        """Rows of all groups so far."""
        return sum(group.rows for group in self._groups)

    def slice_of(self, group: int) -> slice:
        """Where the rows of a group are among all."""
        start = sum(g.rows for g in self._groups[:group])
        return slice(start, start + self._groups[group].rows)

    @torch.no_grad()
    def first(self, rows: Tensor, ids: Tensor, weights: Tensor, home: Tensor) -> None:
        """Norm and first multiply of the next group: the arguments of `ExpertPart.forward`."""
        experts, number = self._experts, len(self._experts.experts)
        slots = self._part.slots[ids.long()].flatten()
        counts: list[int] = torch.bincount(slots, minlength=number + 1)[:number].tolist()
        cell = slots.argsort(stable=True)[: sum(counts)]
        row = cell // ids.shape[1]
        normed = self._part.ffn_norm(rows)
        dtype = compute_dtype(rows)
        with exact(rows):
            fused = multiply(normed.index_select(0, row).to(dtype), _transposed(experts.w13, dtype), counts)
            if experts.b13 is not None:
                fused += experts.b13.to(dtype)[slots[cell]]
            shared = None
            if self._shared is not None:
                shared = normed.index_select(0, home).to(dtype) @ self._shared.w13.to(dtype).t()
        self._groups.append(
            _Group(
                rows.shape[0], row, cell, slots[cell], weights.flatten()[cell], ids.shape, home,
                rows.index_select(0, home), normed, fused, shared,
            )
        )  # fmt: skip

    def second(self, column: int) -> Tensor:
        """Columns `ranges[column]` of the partial sums [rows, columns]; the first call does the activation."""
        if self._inner is None:
            self._inner = self._activate()
        with torch.no_grad():
            return self._columns(self._inner, self.ranges[column])

    @torch.no_grad()
    def first_back(self, group: int, grad: Tensor) -> Tensor:
        """Gradient of the results of a group's rows [r, hidden] -> that of its gate weights, as ids."""
        found, inner = self._groups[group], self._through()
        experts, wide = self._experts, accumulation_dtype(grad.dtype)
        dtype = found.fused.dtype
        start = sum(len(g.row) for g in self._groups[:group])
        mine = torch.empty_like(inner.order).scatter_(
            0, inner.order, torch.arange(len(inner.order), device=grad.device)
        )
        value = inner.value.detach()[mine[start : start + len(found.row)]]
        counts = torch.bincount(found.slot, minlength=len(experts.experts)).tolist()
        picked = grad.index_select(0, found.row)
        with exact(grad):
            plain = multiply(picked.to(dtype), experts.w2.to(dtype), counts).to(wide)
            by_weight = (plain * value.to(wide)).sum(1)
            if experts.b2 is not None:
                by_weight = by_weight + (picked.to(wide) * experts.b2.to(wide)[found.slot]).sum(1)
            self._grad_fused.append((plain * found.weight.to(wide).unsqueeze(1)).to(dtype))
            if self._shared is not None:
                back = grad.index_select(0, found.home).to(dtype) @ self._shared.w2.to(dtype)
                self._grad_shared = back if self._grad_shared is None else torch.cat((self._grad_shared, back))
        self._grads.append(grad)
        result = torch.zeros(found.shape.numel(), dtype=found.weight.dtype, device=grad.device)
        return result.index_copy_(0, found.cell, by_weight.to(result.dtype)).view(found.shape)

    def second_back(self, column: int) -> Tensor:
        """Columns `ranges[column]` of the gradient of the normed rows [rows, columns]."""
        if self._fused is None:
            self._fused, self._grad_shared = self._activate_back()
        inner, experts, cut = self._through(), self._experts, self.ranges[column]
        dtype, total_dtype = self._fused.dtype, accumulation_dtype(self._grads[0].dtype)
        with torch.no_grad(), exact(self._fused):
            part = multiply(self._fused, _columns_of(experts.w13, cut, 2).to(dtype), inner.counts)
            total = torch.zeros(self.rows, part.shape[1], dtype=total_dtype, device=part.device)
            total.index_add_(0, inner.row, part.to(total_dtype))
            if self._shared is not None and self._grad_shared is not None:
                own = self._grad_shared @ self._shared.w13[:, cut].to(dtype)
                total.index_add_(0, inner.home, own.to(total_dtype))
        return total.to(self._grads[0].dtype)

    @torch.no_grad()
    def weight_back(self) -> None:
        """Add the gradients of all weights but the norm's."""
        inner, experts = self._through(), self._experts
        assert self._fused is not None
        dtype = self._fused.dtype
        normed = torch.cat([group.normed for group in self._groups]).to(dtype)
        grad = torch.cat(self._grads)
        with exact(grad):
            weighted = grad.index_select(0, inner.row) * inner.weight.to(grad.dtype).unsqueeze(1)
            weighted = weighted.to(dtype).contiguous()
            add_gradient(experts.w13, outer(self._fused, normed.index_select(0, inner.row), inner.counts))
            add_gradient(experts.w2, outer(weighted, inner.value.detach(), inner.counts))
            if experts.b13 is not None and experts.b2 is not None:
                add_gradient(experts.b13, sums(self._fused, inner.counts, experts.b13.dtype))
                add_gradient(experts.b2, sums(weighted, inner.counts, experts.b2.dtype))
            if self._shared is not None and self._grad_shared is not None and inner.shared is not None:
                at_home = grad.index_select(0, inner.home).to(dtype)
                add_gradient(self._shared.w13, self._grad_shared.t() @ normed.index_select(0, inner.home))
                add_gradient(self._shared.w2, at_home.t() @ inner.shared.detach())

    def _through(self) -> _Inner:
        if self._inner is None:
            raise RuntimeError("the second half has not begun")
        return self._inner

    def _activate(self) -> _Inner:
        groups, offsets = self._groups, [self.slice_of(i).start for i in range(len(self._groups))]
        slots = torch.cat([group.slot for group in groups])
        order = slots.argsort(stable=True)
        row = torch.cat([group.row + start for group, start in zip(groups, offsets, strict=True)])
        with torch.enable_grad(), exact(slots):
            leaf = torch.cat([group.fused for group in groups])[order].requires_grad_()
            value = activate(leaf, self._experts.rules)
            shared_leaf = shared = None
            if self._shared is not None:
                parts = [group.shared for group in groups if group.shared is not None]
                shared_leaf = torch.cat(parts).requires_grad_()
                gate, up = shared_leaf.chunk(2, dim=-1)
                shared = silu(gate) * up
        for group in groups:
            group.fused, group.shared = group.fused[:0], None  # they live in the leaves now
        return _Inner(
            order=order,
            counts=torch.bincount(slots, minlength=len(self._experts.experts)).tolist(),
            row=row[order],
            weight=torch.cat([group.weight for group in groups])[order],
            leaf=leaf,
            value=value,
            home=torch.cat([group.home + start for group, start in zip(groups, offsets, strict=True)]),
            own=torch.cat([group.own for group in groups]),
            shared_leaf=shared_leaf,
            shared=shared,
        )

    def _columns(self, inner: _Inner, cut: slice) -> Tensor:
        experts, dtype = self._experts, inner.value.dtype
        total_dtype = accumulation_dtype(inner.own.dtype)
        with exact(inner.own):
            part = multiply(
                inner.value.detach(), _columns_of(experts.w2, cut, 1).to(dtype).transpose(1, 2), inner.counts
            )
            if experts.b2 is not None:
                counts = torch.tensor(inner.counts, device=part.device)
                part += experts.b2[:, cut].to(dtype).repeat_interleave(counts, dim=0)
            total = torch.zeros(self.rows, part.shape[1], dtype=total_dtype, device=part.device)
            total.index_add_(0, inner.row, part.to(total_dtype) * inner.weight.to(total_dtype).unsqueeze(1))
            at_home = inner.own[:, cut].to(total_dtype)
            if self._shared is not None and inner.shared is not None:
                at_home = at_home + (inner.shared.detach() @ self._shared.w2[cut].to(dtype).t()).to(total_dtype)
            total.index_add_(0, inner.home, at_home)
        return total.to(inner.own.dtype)

    def _activate_back(self) -> tuple[Tensor, Tensor | None]:
        """Gradients before the activation: of the pairs, sorted by expert, and of the shared experts."""
        inner = self._through()
        grad = torch.cat(self._grad_fused)[inner.order]
        (fused,) = torch.autograd.grad(inner.value, inner.leaf, grad)
        shared = None
        if inner.shared is not None and inner.shared_leaf is not None:
            (shared,) = torch.autograd.grad(inner.shared, inner.shared_leaf, self._grad_shared)
        self._grad_fused = []
        return fused.contiguous(), shared


def _transposed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).transpose(1, 2)


def _columns_of(weight: Tensor, cut: slice, dim: int) -> Tensor:
    """Some columns of stacked matrices, aligned as the grouped kernel wants them."""
    return weight.narrow(dim, cut.start, cut.stop - cut.start).contiguous()
