"""What one rank holds of the model: the parts its worker has, and who else has the same parameters.

Decides sharing. A parameter with one global name is one parameter: where one rank
holds it in two parts (a colocated FFN norm, a tied matrix whose two ends are on
one worker) it is one tensor, and where several ranks hold it the group that sums
its gradient is named here, by the purposes of `groups.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from disagmoe.model import AttentionPart, Blueprint, EmbeddingPart, ExpertPart, HeadPart, Part, Piece
from disagmoe.model.embedding import EMBEDDING_NAME
from disagmoe.model.head import CHUNK_TOKENS
from disagmoe.runtime.head_shard import HeadShard
from disagmoe.runtime.merge import Blocks
from disagmoe.runtime.wiring import Exchanges
from disagmoe.specs import ModelSpec

HEAD_NORM_NAME = "head.norm.weight"


class Share(NamedTuple):
    """Which ranks hold a parameter: `purpose` and its workers as in `Groups.reduction`; layer -1 = embedding, head."""

    purpose: str
    layer: int
    a: int = -1
    f: int = -1


@dataclass
class Holdings:
    """The parts of one rank; attention and experts by layer. Of a head it has the whole or a shard, or neither."""

    spec: ModelSpec
    embedding: EmbeddingPart | None = None
    head: HeadPart | None = None
    head_shard: HeadShard | None = None
    attention: dict[int, AttentionPart] = field(default_factory=dict)
    experts: dict[int, ExpertPart] = field(default_factory=dict)

    @classmethod
    def build(cls, blueprint: Blueprint, exchanges: Exchanges, *, chunk_tokens: int = CHUNK_TOKENS) -> Holdings:
        """The parts of this rank, with their starting values."""
        spec, placement = blueprint.spec, exchanges.placement
        worker = exchanges.groups.me.worker
        if len(placement.attn) != spec.layers or len(placement.ffn) != spec.layers:
            covered = min(len(placement.attn), len(placement.ffn))
            raise ValueError(f"the placement covers {covered} layers, model {spec.name} has {spec.layers}")
        mine = cls(spec)
        for layer in range(spec.layers):
            if worker in placement.holders(placement.attn[layer]):
                mine.attention[layer] = AttentionPart(blueprint, layer)
            if worker in placement.holders(placement.ffn[layer]):
                local = exchanges.dispatch(layer).local_experts if spec.is_moe(layer) else None
                mine.experts[layer] = ExpertPart(blueprint, layer, local)
        if worker in placement.holders(placement.embed):
            mine.embedding = EmbeddingPart(blueprint)
        if worker in placement.head_shards:
            vocabulary = Blocks.split(placement.head_shards, spec.vocab).range_of(worker)
            mine.head_shard = HeadShard(blueprint, vocabulary, chunk_tokens=chunk_tokens)
        elif not placement.head_shards and worker in placement.holders(placement.head):
            mine.head = HeadPart(blueprint, chunk_tokens=chunk_tokens)
        mine._share()
        return mine

    def _share(self) -> None:
        for layer in self.attention.keys() & self.experts.keys():
            if self.attention[layer].ffn_norm is not None:
                self.attention[layer].ffn_norm = self.experts[layer].ffn_norm
        if self.spec.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def parts(self) -> list[Part]:
        """Every part, in a fixed order."""
        ends = (self.embedding, self.head, self.head_shard)
        return [*(part for part in ends if part is not None), *self.attention.values(), *self.experts.values()]

    def pieces(self) -> dict[str, Piece]:
        """Global name -> piece, parameters and buffers."""
        return {piece.name: piece for part in self.parts() for piece in part.all_pieces()}

    def shares(self, attn: tuple[int, ...], ffn: tuple[int, ...]) -> Iterator[tuple[Share, nn.Parameter, list[Piece]]]:
        """Every parameter once, with its pieces in storage order; `attn` and `ffn` as in Placement."""
        seen: set[int] = set()
        for layer, part in self._by_layer():
            pieces: dict[int, list[Piece]] = {}
            for piece in part.all_pieces():
                if isinstance(piece.tensor, nn.Parameter):
                    pieces.setdefault(id(piece.tensor), []).append(piece)
            for parameter in part.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self._share_of(layer, pieces[id(parameter)], attn, ffn), parameter, pieces[id(parameter)]

    def _by_layer(self) -> Iterator[tuple[int, Part]]:
        yield from ((-1, part) for part in (self.embedding, self.head, self.head_shard) if part is not None)
        yield from self.attention.items()
        yield from self.experts.items()

    def _share_of(self, layer: int, pieces: list[Piece], attn: tuple[int, ...], ffn: tuple[int, ...]) -> Share:
        name = pieces[0].name
        if name == EMBEDDING_NAME and self.spec.tied:
            return Share("tied", -1)
        if name == HEAD_NORM_NAME and self.head_shard is not None:
            return Share("heads", -1)
        if layer >= 0 and name == f"layers.{layer}.ffn_norm.weight" and self.spec.is_moe(layer):
            return Share("norm", -1, attn[layer], ffn[layer]) if attn[layer] != ffn[layer] else Share("dense", layer)
        return Share("expert" if ".experts." in name else "dense", layer)
