"""Tutel's own moe_layer inside our block.

Decides what of a layer is Tutel's: gate, dispatch, experts and combine, everything
between the FFN norm and the residual. Attention, norms, shared experts, dense layers,
embedding and head are ours; the gate runs on our router's parameter. Every rank holds all
layers and 1 / ranks of the experts: the backward of Tutel's all-to-all runs over the world
whatever its group (tutel/impls/communicate.py, `RestoreBackward` is given none), so that fewer
ranks cannot share the experts.

Tutel is imported when a layer is built; `peers.py` says how to install it. Written
against version 0.4, commit ac0e51b of https://github.com/microsoft/Tutel
(tutel/impls/moe_layer.py, tutel/experts/llama_ffn.py). On CPU it ignores the overlap
degree (`a2a_ffn_overlap_degree > 1 and y.is_cuda`) but for the rounding of the capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from baselines.native.coverage import normalised
from baselines.native.slot import Slot
from baselines.tutel import ALGORITHMS, DEGREES, capacity
from disagmoe.model import Blueprint, Piece
from disagmoe.model.block import AttentionPart, ExpertPart
from disagmoe.model.embedding import EmbeddingPart
from disagmoe.model.experts import Mlp
from disagmoe.model.head import HeadPart
from disagmoe.specs import ModelSpec


@dataclass(frozen=True)
class TutelOptions:
    """`degree` is a2a_ffn_overlap_degree, `algorithm` of the all-to-all "linear" or "2dh".

    `capacity_factor` > 0 fixes the capacity and drops what exceeds it, 0 drops nothing,
    < 0 follows the fullest expert up to a capacity factor of that size.
    """

    degree: int = 1
    algorithm: str = "linear"
    capacity_factor: float = 0.0

    def __post_init__(self) -> None:
        if self.degree not in DEGREES:
            raise ValueError(f"tutel degree={self.degree}: allowed are {', '.join(map(str, DEGREES))}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"tutel algorithm={self.algorithm}: allowed are {', '.join(ALGORITHMS)}")

    def bound(self, tokens: int, spec: ModelSpec) -> int | None:
        """Rows of one expert from one rank's `tokens`, beyond which they are dropped; None: nothing is."""
        if self.capacity_factor == 0.0:
            return None
        return capacity(tokens, spec.experts, spec.top_k, abs(self.capacity_factor), 1.0, self.degree)


class TutelFfn(nn.Module):
    """The FFN half of an MoE layer: norm, Tutel's layer on the gate of `attention`, shared experts, residual."""

    def __init__(self, blueprint: Blueprint, attention: AttentionPart, options: TutelOptions, ranks: int) -> None:
        super().__init__()
        spec = blueprint.spec
        if attention.router is None or attention.ffn_norm is None:
            raise ValueError(f"{attention.prefix} is dense: Tutel has nothing to do there")
        self.ffn_norm = attention.ffn_norm
        self.shared = Mlp(blueprint, spec.shared_width) if spec.shared_width else None
        self.scale = spec.routed_scaling_factor
        self.moe: Any = (
            import_module("tutel.moe")
            .moe_layer(
                gate_type={"type": "top", "k": spec.top_k, "capacity_factor": options.capacity_factor},
                experts={
                    "type": "llama_ffn",
                    "num_experts_per_device": spec.experts // ranks,
                    "hidden_size_per_expert": spec.expert_width,
                },
                model_dim=spec.hidden,
                a2a_ffn_overlap_degree=options.degree,
                use_2dh=options.algorithm == "2dh",
                normalize_gate=normalised(spec),
            )
            .to(blueprint.device)
        )
        self.moe.gates[0].wg.weight = attention.router.weight

    def forward(self, x: Tensor) -> Tensor:
        """Rows [t, hidden] after attention -> rows after the layer."""
        normed = self.ffn_norm(x)
        out: Tensor = self.moe(normed) * self.scale + x
        return out if self.shared is None else out + self.shared(normed)


class TutelModel(nn.Module):
    """Our model whose experts are Tutel's; this rank's share of it."""

    def __init__(self, spec: ModelSpec, options: TutelOptions, device: torch.device) -> None:
        super().__init__()
        self.spec, self.rank, self.ranks = spec, dist.get_rank(), dist.get_world_size()
        blueprint = Blueprint(spec, device=device, seed=None)
        self.embedding = EmbeddingPart(blueprint)
        self.attention = nn.ModuleList(AttentionPart(blueprint, layer) for layer in range(spec.layers))
        self.ffn = nn.ModuleList(self._ffn(blueprint, layer, options) for layer in range(spec.layers))
        self.head = HeadPart(blueprint)

    def _ffn(self, blueprint: Blueprint, layer: int, options: TutelOptions) -> nn.Module:
        attention = self.attention[layer]
        if not self.spec.is_moe(layer):
            return ExpertPart(blueprint, layer)
        assert isinstance(attention, AttentionPart)
        return TutelFfn(blueprint, attention, options, self.ranks)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Token ids and next tokens [sequences, seq] -> cross entropy summed over them."""
        x = self.embedding(tokens.flatten())
        for attention, ffn in zip(self.attention, self.ffn, strict=True):
            assert isinstance(attention, AttentionPart)
            x = ffn(x + attention.attention(attention.attention_norm(x), tokens.shape[1]))
        result: Tensor = self.head(x, targets.flatten())
        return result

    def moe_layers(self) -> list[TutelFfn]:
        return [ffn for ffn in self.ffn if isinstance(ffn, TutelFfn)]

    def slots(self) -> dict[str, Slot]:
        """Global name -> slot of every parameter on this rank."""
        pieces = [*self.embedding.all_pieces(), *self.head.all_pieces()]
        found: dict[str, Slot] = {}
        for layer, (attention, ffn) in enumerate(zip(self.attention, self.ffn, strict=True)):
            assert isinstance(attention, AttentionPart)
            pieces += attention.all_pieces()
            if isinstance(ffn, ExpertPart):
                pieces += ffn.all_pieces()
            elif isinstance(ffn, TutelFfn):
                pieces += [] if ffn.shared is None else ffn.shared.pieces(f"layers.{layer}.shared.")
                found |= dict(self._experts(layer, ffn.moe.experts))
        return found | {piece.name: _slot(piece) for piece in pieces}

    def _experts(self, layer: int, experts: Any) -> Iterator[tuple[str, Slot]]:
        """Tutel keeps [experts, in, out] flat: gate W_fc1, up W_fc2, down W_fc3."""
        hidden, width = self.spec.hidden, self.spec.expert_width
        number = self.spec.experts // self.ranks
        for place in range(number):
            prefix = f"layers.{layer}.experts.{self.rank * number + place}."
            for name, parameter, into, out in (
                ("w1", experts.W_fc1, hidden, width),
                ("w3", experts.W_fc2, hidden, width),
                ("w2", experts.W_fc3, width, hidden),
            ):
                yield prefix + name, Slot(parameter, (out, into), _transposed(number, into, out, place))


def _transposed(number: int, into: int, out: int, place: int) -> Callable[[Tensor], Tensor]:
    return lambda flat: flat.view(number, into, out)[place].t()


def _slot(piece: Piece) -> Slot:
    assert isinstance(piece.tensor, nn.Parameter)
    return Slot(piece.tensor, tuple(piece.value.shape), lambda t: t[piece.index])
