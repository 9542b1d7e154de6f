"""A decoder-only mixture-of-experts transformer from a ModelSpec, cut where a disaggregated run cuts it.

Read `block.py` first: the two halves of a layer. One process that holds all parts
is `ReferenceModel`; a distributed run holds some of them per rank.
"""

from disagmoe.model.balance import LossWeights, update_correction_bias
from disagmoe.model.block import AttentionOutput, AttentionPart, ExpertPart
from disagmoe.model.conventions import Conventions, Yarn, conventions_of
from disagmoe.model.embedding import EmbeddingPart
from disagmoe.model.head import HeadPart
from disagmoe.model.hf_weights import hf_conventions, hf_weights, load_hf_weights
from disagmoe.model.parts import Blueprint, Part, Piece
from disagmoe.model.reference import LossReport, ReferenceModel
from disagmoe.model.router import Routing
from disagmoe.model.segment import Saved

__all__ = [
    "AttentionOutput",
    "AttentionPart",
    "Blueprint",
    "Conventions",
    "EmbeddingPart",
    "ExpertPart",
    "HeadPart",
    "LossReport",
    "LossWeights",
    "Part",
    "Piece",
    "ReferenceModel",
    "Routing",
    "Saved",
    "Yarn",
    "conventions_of",
    "hf_conventions",
    "hf_weights",
    "load_hf_weights",
    "update_correction_bias",
]
