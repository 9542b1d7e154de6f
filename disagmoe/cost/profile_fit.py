"""The `paper-profile` calibration: efficiencies that reproduce the paper's profiling figure.

Decides how the time ratios of DisagMoE's profile (arXiv 2605.11005, Figure 6a:
Qwen3-235B-A22B on eight nodes of H800) become three efficiencies: projections,
attention scores, experts. Everything else is the `h800` calibration.

The reading is ours, as the text we have says only "attention / one A2A" and
"FFN / one A2A": forward time of one layer on one rank over that of one dispatch,
EP = 16 over two nodes, NCCL all-to-all with unmerged copies, one sequence per
rank. (Read as forward and backward together, experts would run at 85 % of peak.)
Attention at two lengths fixes two efficiencies, as projections grow with s and
scores with s^2; FFN at 4K fixes the third; FFN at 32K (0.77) is left as a check.
These are ratios of one figure, not results: no speed-up of any paper enters.
Other models, lengths and cluster sizes are an extrapolation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagmoe.cost.calibration import Calibration
from disagmoe.cost.model import CostModel
from disagmoe.ops import Phase
from disagmoe.specs import Workload, load_cluster, load_model

EP = 16
NODES = 2
SHORT = 4096
LONG = 32768
ITERATIONS = 8


@dataclass(frozen=True)
class Ratios:
    """Forward time over the time of one all-to-all, at one sequence length."""

    attention: float
    ffn: float


PUBLISHED = {SHORT: Ratios(attention=1.08, ffn=0.73), LONG: Ratios(attention=2.78, ffn=0.77)}
"""Figure 6a of arXiv 2605.11005."""


def ratios(calibration: Calibration, seq: int) -> Ratios:
    """The model's own ratios under `calibration`, read as the module says."""
    model, cluster = load_model("qwen3"), load_cluster("h800_128")
    costs = CostModel(model, cluster, calibration, Workload(seq=seq, global_batch=cluster.gpus))
    exchange = costs.all_to_all(
        tokens=seq,
        ep=EP,
        nodes=NODES,
        transport="nccl",
        merge="none",
        nic_gbs=cluster.nic_gbs_per_gpu(),
        phase=Phase.F,
        combine=False,
    )
    attention = costs.attention(0, Phase.F, 1.0)
    rows = float(seq * model.top_k)
    ffn = costs.ffn(0, Phase.F, home_tokens=seq, rows=rows, local_experts=model.experts / EP)
    return Ratios(attention=attention / exchange.seconds, ffn=ffn / exchange.seconds)


def fit_profile(base: Calibration) -> dict[str, float]:
    """Projection, attention and grouped efficiency that reproduce PUBLISHED on top of `base`.

    Times are piecewise linear in 1 / efficiency (a kernel is bound either by
    arithmetic or by memory), so Newton steps on the inverses end exactly.
    Raises ValueError where the figure cannot be met with efficiencies up to 1.
    """
    names = ("projection_efficiency", "attention_efficiency", "grouped_efficiency")
    inverse = np.array([1.0 / getattr(base.rates, name) for name in names])
    for _ in range(ITERATIONS):
        error = _errors(base, names, inverse)
        slopes = np.empty((3, 3))
        for column in range(3):
            step = np.zeros(3)
            step[column] = 1e-6 * inverse[column]
            slopes[:, column] = (_errors(base, names, inverse + step) - error) / step[column]
        if np.linalg.matrix_rank(slopes) < 3:  # some time does not depend on its efficiency: nothing to solve for
            break
        inverse = inverse - np.linalg.solve(slopes, error)
    if not (np.all(inverse >= 1.0) and np.allclose(_errors(base, names, inverse), 0.0, atol=1e-9)):
        raise ValueError(f"calibration {base.name}: no efficiencies up to 1 reproduce the profile, got {1.0 / inverse}")
    return {name: float(1.0 / value) for name, value in zip(names, inverse, strict=True)}


def _errors(base: Calibration, names: tuple[str, ...], inverse: np.ndarray) -> np.ndarray:
    """Model minus published: attention at both lengths, FFN at the short one."""
    trial = base.with_rates("trial", **{name: 1.0 / value for name, value in zip(names, inverse, strict=True)})
    short, long = ratios(trial, SHORT), ratios(trial, LONG)
    return np.array(
        [
            short.attention - PUBLISHED[SHORT].attention,
            long.attention - PUBLISHED[LONG].attention,
            short.ffn - PUBLISHED[SHORT].ffn,
        ]
    )
