"""Which models an adapter covers, and what it lacks for the others.

Decides by facts of the ModelSpec alone, so that a model is refused by name before a peer
is imported.
"""

from __future__ import annotations

from collections.abc import Callable

from baselines.native.peers import MEGATRON, TUTEL, Peer
from disagmoe.model.conventions import conventions_of
from disagmoe.specs import ModelSpec


def normalised(spec: ModelSpec) -> bool:
    """Whether the weights of the chosen experts sum to the scaling factor."""
    return spec.scoring == "softmax_after_topk" or spec.norm_topk_prob


def megatron_lacks(spec: ModelSpec) -> list[str]:
    """What `spec` has that is not handed to Megatron-Core; empty: covered."""
    return _named(
        {
            "latent attention (MLA)": spec.mla is not None,
            "attention biases": spec.attention_bias,
            "attention sinks": spec.sinks,
            "sliding windows": bool(spec.windowed_layers),
            "router biases": spec.router_bias,
            "expert biases": spec.expert_bias,
            "a clamped activation": conventions_of(spec).activation_limit is not None,
            "a tied head": spec.tied,
            "a correction bias": spec.correction_bias,
            "group-limited routing": spec.topk_group < spec.n_group,
            "normalised weights of one expert": spec.top_k == 1 and normalised(spec),
            "sigmoid scores that are not normalised": spec.scoring == "sigmoid" and not spec.norm_topk_prob,
        }
    )


def tutel_lacks(spec: ModelSpec) -> list[str]:
    """What `spec` has that Tutel's gate and experts do not; empty: covered."""
    return _named(
        {
            "sigmoid scores": spec.scoring == "sigmoid",
            "router biases": spec.router_bias,
            "expert biases": spec.expert_bias,
            "a correction bias": spec.correction_bias,
            "group-limited routing": spec.topk_group < spec.n_group,
            "a clamped activation": conventions_of(spec).activation_limit is not None,
            "normalised weights of one expert": spec.top_k == 1 and normalised(spec),
            "an odd hidden size": spec.hidden % 2 == 1,
            "a tied head": spec.tied,
        }
    )


LACKS: dict[Peer, Callable[[ModelSpec], list[str]]] = {MEGATRON: megatron_lacks, TUTEL: tutel_lacks}


def require_covered(peer: Peer, spec: ModelSpec) -> None:
    """Raise ValueError where the adapter of `peer` does not cover `spec`."""
    if missing := LACKS[peer](spec):
        raise ValueError(f"model {spec.name}: the {peer.name} adapter does not cover {', '.join(missing)}")


def _named(found: dict[str, bool]) -> list[str]:
    return [what for what, there in found.items() if there]
