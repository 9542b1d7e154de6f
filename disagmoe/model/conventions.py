"""What the model code of a family fixes and a cost model does not need.

Decides rotary base, norm epsilon, order of rotary pairs and the form of the
gated activation. The defaults are the published config.json values of each
family (huggingface.co: Qwen/Qwen3-30B-A3B, mistralai/Mixtral-8x7B-v0.1,
openai/gpt-oss-120b, deepseek-ai/*); an unknown family gets those of the first
DeepSeekMoE. YaRN stretches the context of a trained model: nothing has it
unless asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from disagmoe.specs import ModelSpec


@dataclass(frozen=True)
class Yarn:
    """Rotary frequencies stretched by `factor` (YaRN, arXiv 2309.00071).

    Pairs that turn more than `beta_fast` times within `original_positions` keep
    their frequency, those that turn less than `beta_slow` times get it divided
    by `factor`. `mscale` and `mscale_all_dim` are DeepSeek's: 0 where absent.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1.0 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def rotation_scale(self) -> float:
        """Factor on cosine and sine."""
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def score_scale(self) -> float:
        """Factor on the attention scores (1 unless `mscale_all_dim` is given)."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True)
class Conventions:
    """Facts of a family's model code.

    `rope_interleaved`: rotary pairs are neighbours (2i, 2i + 1), otherwise
    (i, i + half). `activation_limit`: None = silu(gate) * up; a number = the
    clamped form of GPT-OSS, (clamp(up) + 1) * gate * sigmoid(alpha * gate).
    """

    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    rope_interleaved: bool = False
    activation_limit: float | None = None
    activation_alpha: float = 1.702
    yarn: Yarn | None = None


_FAMILIES = {
    "qwen3_moe": Conventions(rope_theta=1_000_000.0),
    "mixtral": Conventions(rope_theta=1_000_000.0, norm_epsilon=1e-5),
    "gpt_oss": Conventions(rope_theta=150_000.0, norm_epsilon=1e-5, activation_limit=7.0),
    "deepseek": Conventions(),
    "deepseek_v2": Conventions(rope_interleaved=True),
    "deepseek_v3": Conventions(rope_interleaved=True),
}


def conventions_of(spec: ModelSpec) -> Conventions:
    """The published conventions of the family of `spec`; DeepSeekMoE's for an unknown family."""
    return _FAMILIES.get(spec.family, Conventions())
