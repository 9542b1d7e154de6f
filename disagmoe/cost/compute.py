"""Seconds of compute on one GPU: GEMMs, attention kernels and everything bound by memory.

Decides which kernels an operation launches in each phase and what a kernel
costs: max(FLOPs / (peak x efficiency), bytes / HBM bandwidth) + launch.

Phases. Every projection and expert GEMM costs the same three times: forward,
input gradient (I) and weight gradient (W, accumulated into fp32 in its epilogue).
The scores cost five matrix products backward against two forward (the
probabilities are recomputed), all in I; norms, rotary embedding and the like move
1.5 times their forward bytes in I and nothing worth counting in W. R repeats F,
B is I and W. Causal masking halves the scores once, here: what a kernel computes
beyond the mask is in `attention_pad_keys`, up to the full square.
Not modelled: biases, dropout, CUDA-graph effects, host time beyond `launch_us`.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagmoe.cost.calibration import Rates
from disagmoe.cost.flops import mean_keys
from disagmoe.cost.recompute import Recompute
from disagmoe.ops import Phase
from disagmoe.specs import Device, ModelSpec

BF16 = 2
FP32 = 4
MAIN_GRAD = 2 * FP32
"""Bytes per weight to accumulate its gradient: read and write fp32."""
ADAM_BYTES = FP32 + 6 * FP32 + BF16
"""Bytes per parameter of one Adam step: read the gradient, read and write master, m and v, write bf16."""
SCORE_BACKWARD = 2.5
POINTWISE_BACKWARD = 1.5


@dataclass(frozen=True)
class Kernel:
    """One launch: `flops` at `efficiency` of peak beside `nbytes` of HBM traffic."""

    flops: float
    efficiency: float
    nbytes: float


@dataclass(frozen=True)
class Gemm:
    """`groups` products of [rows / groups, inner] with [inner, outer]; rows counts all groups.

    `use` names its efficiency: "projection", "dense" or "grouped".
    """

    rows: float
    inner: int
    outer: int
    groups: float = 1.0
    use: str = "dense"


def phases(phase: Phase) -> tuple[Phase, ...]:
    """The elementary phases (F, I, W) a phase consists of."""
    if phase is Phase.B:
        return (Phase.I, Phase.W)
    return (Phase.F,) if phase is Phase.R else (phase,)


class Compute:
    """Prices kernels on one device under one set of calibrated rates."""

    def __init__(self, rates: Rates, device: Device) -> None:
        self.rates = rates
        self.peak = device.peak_bf16_tflops * 1e12
        self.saturation = {
            "projection": (rates.projection_efficiency, rates.projection_rows_half),
            "dense": (rates.dense_efficiency, rates.dense_rows_half),
            "grouped": (rates.grouped_efficiency, rates.grouped_rows_half),
        }
        self.launch_s = rates.launch_us * 1e-6
        self.hbm = device.hbm_gbs * 1e9 * rates.hbm_efficiency

    def seconds(self, kernels: list[Kernel]) -> float:
        """Time of kernels launched one after the other."""
        total = 0.0
        for kernel in kernels:
            arithmetic = kernel.flops / (self.peak * kernel.efficiency)
            total += max(arithmetic, kernel.nbytes / self.hbm) + self.launch_s
        return total

    def pointwise(self, nbytes: float) -> Kernel:
        """A kernel bound by HBM."""
        return Kernel(flops=0.0, efficiency=1.0, nbytes=nbytes)

    def gemm(self, gemm: Gemm, phase: Phase) -> Kernel:
        """One GEMM in phase F, I or W; efficiency saturates with the rows of one group."""
        top, half = self.saturation[gemm.use]
        rows = gemm.rows / gemm.groups
        weight = gemm.groups * gemm.inner * gemm.outer * (MAIN_GRAD if phase is Phase.W else BF16)
        return Kernel(
            flops=2.0 * gemm.rows * gemm.inner * gemm.outer,
            efficiency=top * rows / (rows + half),
            nbytes=gemm.rows * (gemm.inner + gemm.outer) * BF16 + weight,
        )

    def scores(self, model: ModelSpec, window: int | None, seq: int, sequences: float, phase: Phase) -> Kernel:
        """The attention kernel (forward, or the whole backward in phase I) of `sequences` sequences."""
        rates = self.rates
        width = (model.qk_dim + model.v_dim) / 2
        # Partly masked tiles are whole tiles, but no query ever meets more keys than the sequence has.
        keys = seq * min(mean_keys(seq, window) + rates.attention_pad_keys, mean_keys(seq, None, causal=False))
        efficiency = rates.attention_efficiency * width / (width + rates.attention_dim_half)
        flops = 4.0 * width * model.heads * keys * sequences
        kv_heads = model.heads if model.mla is not None else model.kv_heads
        nbytes = sequences * seq * (model.heads + kv_heads) * 2.0 * width * BF16
        if phase is Phase.F:
            return Kernel(flops, efficiency, nbytes)
        return Kernel(flops * SCORE_BACKWARD, efficiency * rates.attention_backward_ratio, 3.0 * nbytes)


def projections(model: ModelSpec, moe: bool, tokens: float) -> list[Gemm]:
    """The weight GEMMs of one attention block; in a MoE layer the router too."""
    shapes = [(model.heads * model.v_dim, model.hidden)]
    if model.mla is None:
        shapes.append((model.hidden, (model.heads + 2 * model.kv_heads) * model.head_dim))
    else:
        mla = model.mla
        shapes.append((model.hidden, mla.kv_lora_rank + mla.qk_rope_head_dim))
        shapes.append((mla.kv_lora_rank, model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)))
        query = model.heads * model.qk_dim
        if mla.q_lora_rank is None:
            shapes.append((model.hidden, query))
        else:
            shapes += [(model.hidden, mla.q_lora_rank), (mla.q_lora_rank, query)]
    if moe:
        shapes.append((model.hidden, model.experts))
    return [Gemm(tokens, inner, outer, use="projection") for inner, outer in shapes]


def mlp(hidden: int, width: int, rows: float, groups: float = 1.0, use: str = "dense") -> list[Gemm]:
    """A gated MLP: gate and up in one GEMM, then down."""
    return [Gemm(rows, hidden, 2 * width, groups, use), Gemm(rows, width, hidden, groups, use)]


def attention_pointwise(model: ModelSpec, moe: bool, tokens: float, packed: float | None = None) -> list[float]:
    """Forward HBM bytes of the memory-bound kernels around one attention block.

    Two norms (read and write), rotary embedding and query-key norm over the
    heads, residual add; in a MoE layer also the router's softmax and top-k in
    fp32 and the permutation of a token into `packed` copies (None: top-k) for the
    exchange; a kernel that reads tokens in place needs none (0).
    """
    heads = model.heads * model.qk_dim + (0 if model.mla is not None else model.kv_heads * model.head_dim)
    sizes = [2.0 * model.hidden, 2.0 * model.hidden, 2.0 * heads, 3.0 * model.hidden]
    if model.qk_norm:
        sizes.append(2.0 * heads)
    if moe:
        sizes.append(2.0 * FP32 * model.experts / BF16)
        copies = float(model.top_k) if packed is None else packed
        sizes += [(1.0 + copies) * model.hidden] if copies else []
    return [size * BF16 * tokens for size in sizes]


def activation_bytes(model: ModelSpec, rows: float) -> float:
    """Forward HBM bytes of the experts' SwiGLU."""
    return 3.0 * model.expert_width * BF16 * rows


def expert_pointwise(model: ModelSpec, rows: float) -> list[float]:
    """Forward HBM bytes around the experts: sort by expert, SwiGLU, weight and unsort."""
    copy = 2.0 * model.hidden * BF16 * rows
    return [copy, activation_bytes(model, rows), copy]


def dropped_attention(
    model: ModelSpec, moe: bool, tokens: float, recompute: Recompute
) -> tuple[list[Gemm], list[float]]:
    """GEMMs and HBM bytes that selective recompute repeats around one attention block.

    The outputs of the norms (in a dense layer the second one belongs to the MLP's
    GEMM, which keeps it) and, with latent attention, the up projections of
    queries, keys and values with their rotary embedding.
    """
    gemms: list[Gemm] = []
    nbytes: list[float] = []
    if recompute.drops("layernorm"):
        nbytes += [2.0 * model.hidden * BF16 * tokens] * (2 if moe else 1)
    if model.mla is not None and recompute.drops("mla_up_proj"):
        mla, query = model.mla, model.heads * model.qk_dim
        narrow = model.hidden if mla.q_lora_rank is None else mla.q_lora_rank
        wide = model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        gemms.append(Gemm(tokens, narrow, query, use="projection"))
        gemms.append(Gemm(tokens, mla.kv_lora_rank, wide, use="projection"))
        nbytes.append(2.0 * query * BF16 * tokens)
    return gemms, nbytes


def norm_bytes(model: ModelSpec, rows: float) -> float:
    """Forward HBM bytes of one norm over the hidden dimension."""
    return 2.0 * model.hidden * BF16 * rows


def home_pointwise(model: ModelSpec, moe: bool, tokens: float, returned: float | None = None) -> list[float]:
    """Forward HBM bytes on a token's home rank: sum of the `returned` copies (None: top-k) and the residual add."""
    copies = (model.top_k if returned is None else returned) if moe else 1
    width = model.shared_width if moe else model.dense_width
    sizes = [(copies + 2.0) * model.hidden]
    if width:
        sizes.append(3.0 * width)
    return [size * BF16 * tokens for size in sizes]
