"""What is kept of a forward and what is done again in the backward: the recompute policy.

A policy is chosen per component, attention (with the router) and FFN (experts,
shared experts, dense MLPs), and is one of

- `none`: everything the backward needs is kept;
- `selective`: Megatron-Core's output-discarding recompute of cheap parts
  (`--recompute-modules layernorm moe_act mla_up_proj`,
  https://github.com/NVIDIA/Megatron-LM, megatron/core/transformer/transformer_config.py).
  Outputs of both norms and, with latent attention, the up-projected queries, keys
  and values are dropped on the attention side, the outputs of the experts'
  activation function on the FFN side. They are redone inside the backward, so a
  Program has no rows for it; `core_attn` is no module here, as fused attention
  never keeps its probabilities;
- `full`: only the component's input is kept and its forward runs again (phase R)
  before its backward.

Fully recomputed experts need their tokens again: `resend` dispatches them once
more (nothing but the layer's input is kept anywhere, Megatron's full recompute),
`keep` keeps the rows that arrived. Megatron's checkpointed layer repeats its
combine too, as it is one function (`combine` = "again"); a disaggregated layer
does not, since no backward needs what a combine returns, and a colocated one may
leave it out ("never").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagmoe.ops import Kind

MODES = ("none", "selective", "full")
TOKENS = ("resend", "keep")
COMBINES = ("again", "never")
MODULES = ("layernorm", "moe_act", "mla_up_proj")
"""What `selective` drops, by Megatron-Core's names."""


@dataclass(frozen=True)
class Recompute:
    """The policy of one plan; `modules` narrows what `selective` drops."""

    attention: str = "none"
    ffn: str = "none"
    tokens: str = "resend"
    modules: tuple[str, ...] = MODULES
    combine: str = "again"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("recompute of attention", self.attention, MODES),
            ("recompute of the FFN", self.ffn, MODES),
            ("tokens of recomputed experts", self.tokens, TOKENS),
            ("combine of recomputed experts", self.combine, COMBINES),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: allowed are {', '.join(allowed)}")
        if unknown := [m for m in self.modules if m not in MODULES]:
            raise ValueError(f"recompute module {unknown[0]!r}: allowed are {', '.join(MODULES)}")

    @classmethod
    def of(cls, options: Mapping[str, str | int | float]) -> Recompute:
        """The policy in a Layout's options.

        `recompute` holds for both components, `recompute_attention` and
        `recompute_ffn` for one; `recompute_tokens` is "resend" or "keep", and
        `recompute_combine` "again" or "never".
        """
        both = str(options.get("recompute", "none"))
        return cls(
            attention=str(options.get("recompute_attention", both)),
            ffn=str(options.get("recompute_ffn", both)),
            tokens=str(options.get("recompute_tokens", "resend")),
            combine=str(options.get("recompute_combine", "again")),
        )

    @property
    def resends(self) -> bool:
        """Whether the tokens of recomputed experts are dispatched again."""
        return self.ffn == "full" and self.tokens == "resend"

    def repeated(self, *, disaggregated: bool) -> frozenset[Kind]:
        """Operations that a Program repeats in phase R."""
        again = {
            Kind.ATTN: self.attention == "full",
            Kind.DISPATCH: self.resends,
            Kind.FFN: self.ffn == "full",
            Kind.COMBINE: self.resends and self.combine == "again" and not disaggregated,
        }
        return frozenset(kind for kind, wanted in again.items() if wanted)

    def drops(self, module: str) -> bool:
        """Whether `selective` drops this module's output."""
        mode = self.ffn if module == "moe_act" else self.attention
        return mode == "selective" and module in self.modules


NO_RECOMPUTE = Recompute()
